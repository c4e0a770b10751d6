"""What a rank runs for adapters, quantised bases and frozen stages: a few updates of a tiny model under any strategy."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.data.batches import GlobalBatch, count_targets
from mpfinetune.dist import DistContext, make_context
from mpfinetune.models.adapters import facts_with_adapters
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.models.load import stream_seed
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.build import build_strategy
from mpfinetune.strategies.update import PlainUpdate
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.optim import NamedOptimizer
from tests.families import VOCAB_SIZE, task_of, tiny_config

LR, SEED = 1e-2, 7
# Wider than the other tests' models: nf4 takes rows of 64 weights or more.
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 128},
    "bert": {"hidden_size": 64, "intermediate_size": 128},
    "gpt2": {"n_embd": 64},
}


@dataclass(frozen=True)
class Case:
    """What is trained; ``changes`` are (key, value) pairs of the config."""

    family: str = "llama"
    changes: tuple[tuple[str, Any], ...] = ()
    rows: tuple[int, ...] = (8, 7, 5)


def case(family: str, **changes: Any) -> Case:
    return Case(family, tuple(changes.items()))


def run_config(wanted: Case, **layout: Any) -> RunConfig:
    causal = task_of(wanted.family) == "causal_lm"
    base: dict[str, Any] = {
        "model": {"path": "in memory", "task": task_of(wanted.family), "init": "random"},
        "data": {"path": "in memory"} if causal else {"task": "mrpc"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": LR, "weight_decay": 0.1, "eps": 1e-6},
        "adapter": {"type": "lora", "rank": 4},
        "train": {"seed": SEED},
        "run_dir": "unused",
        "device": "cpu",
        "strategy": "pipeline",
        "partition": {"rule": "uniform", "num_stages": 2},
    }
    return config_from_dict({**base, **dict(wanted.changes), **layout})


def hf_config_of(wanted: Case) -> Any:
    return tiny_config(wanted.family, num_labels=2, **WIDE[wanted.family])


def facts_of(wanted: Case, config: RunConfig) -> ModelFacts:
    return facts_with_adapters(inspect_model(hf_config_of(wanted), config.model.task), config.adapter)


def make_batches(wanted: Case) -> list[GlobalBatch]:
    """One batch per update, padded on the right."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for rows in wanted.rows:
        mask = torch.ones(rows, 10, dtype=torch.int64)
        mask[1::2, 7:] = 0
        input_ids = torch.where(mask == 1, torch.randint(3, VOCAB_SIZE, (rows, 10), generator=generator), 0)
        labels = torch.randint(0, 2, (rows,), generator=generator)
        if task_of(wanted.family) == "causal_lm":
            labels = torch.where(mask == 1, input_ids, -100)
        tensors = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
        batches.append(GlobalBatch(tensors, rows, count_targets(labels), int(mask.sum())))
    return batches


def build(wanted: Case, layout: dict[str, Any], folder: str | None = None) -> Strategy:
    """The strategy of this rank with its optimizer, as a run builds it."""
    config = run_config(wanted, **layout)
    facts = facts_of(wanted, config)
    distributed = dist.is_initialized() and config.strategy != "local"
    world = dist.get_world_size() if distributed else 1
    plan = make_plan(config, facts, World("cpu", 2, world))
    context = DistContext(0, 1, torch.device("cpu"))
    if distributed:
        context = make_context(dist.get_rank(), world, torch.device("cpu"), plan.pipeline_ranks, timedelta(seconds=60))
    loss_sum: Any = loss_sum_for(config.model.task, 2)
    strategy, _ = build_strategy(config, hf_config_of(wanted), facts, plan, context, loss_sum, Path(folder) if folder else None)
    optimizer = NamedOptimizer(strategy.named_parameters(), config.optimizer, facts.embeddings)
    strategy.update = PlainUpdate(strategy, optimizer, config.train.clip_norm)
    return strategy


@contextmanager
def one_thread() -> Any:
    """As the ranks: sums in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train(wanted: Case, layout: dict[str, Any], folder: str | None = None) -> dict[str, Any]:
    """Updates over the case's batches, with an evaluation of the last batch before the last update."""
    strategy = build(wanted, layout, folder)
    batches = make_batches(wanted)
    outcomes, logits = [], []
    before = {name: p.detach().clone() for name, p in strategy.named_parameters().items() if not p.requires_grad}
    for step, batch in enumerate(batches):
        if step == len(batches) - 1:
            strategy.evaluate(batch, lambda out, labels: logits.append(out.detach().float().clone()))
        torch.manual_seed(stream_seed(SEED, step, strategy.context.rank))
        outcomes.append(strategy.train_step(batch, LR))
    assert strategy.update is not None
    parameters = strategy.named_parameters()
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "parameters": {name: p.detach().float().clone() for name, p in parameters.items() if p.requires_grad},
        "frozen_changed": [name for name, old in before.items() if not torch.equal(old, parameters[name])],
        "first_held": sorted(strategy.first_held_names()),
        "saved": sorted(strategy.saved_names()),
        "logits": torch.cat(logits) if logits else None,
        "types": {name: str(p.dtype) for name, p in parameters.items()},
    }


def worst(left: Tensor, right: Tensor) -> float:
    assert left.shape == right.shape
    return float((left - right).abs().max())
