"""What a rank runs to prove the DeepSpeed engines: a few updates under any strategy, saved and gone on from under another."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.data.batches import GlobalBatch, count_targets
from mpfinetune.dist import DistContext, make_context
from mpfinetune.models.facts import inspect_model
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.build import build_stage, build_strategy
from mpfinetune.strategies.deepspeed_engine import DeepSpeedUpdate
from mpfinetune.strategies.update import LossScale, PlainUpdate
from mpfinetune.training.checkpoint import RunState, load_into, save_checkpoint, tensors_of
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.optim import NamedOptimizer
from tests.families import VOCAB_SIZE, task_of, tiny_config

LR, WEIGHT_DECAY, CLIP_NORM, SEED, EPS = 1e-3, 0.1, 0.5, 7, 1e-6


@dataclass(frozen=True)
class Task:
    """What is trained, whatever the split."""

    family: str
    precision: str = "fp32"
    shapes: tuple[tuple[int, int], ...] = ((8, 12), (7, 9), (5, 16))


def config_of(task: Task, changes: dict[str, Any]) -> RunConfig:
    causal = task_of(task.family) == "causal_lm"
    base: dict[str, Any] = {
        "model": {"path": "in memory", "task": task_of(task.family), "init": "random"},
        "data": {"path": "in memory"} if causal else {"task": "mrpc"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS},
        "train": {"clip_norm": CLIP_NORM, "seed": SEED},
        "precision": task.precision,
        "run_dir": "unused",
        "device": "cpu",
    }
    return config_from_dict({**base, **changes})


def batches_of(task: Task) -> list[GlobalBatch]:
    """One batch per update: rows of many lengths, padded, the last updates uneven."""
    generator, lengths = torch.Generator().manual_seed(3), random.Random(5)
    batches = []
    for rows, tokens in task.shapes:
        mask = torch.zeros(rows, tokens, dtype=torch.int64)
        for row in range(rows):
            mask[row, : tokens if row == 0 else lengths.randint(2, tokens)] = 1
        ids = torch.where(mask == 1, torch.randint(3, VOCAB_SIZE, (rows, tokens), generator=generator), 0)
        causal = task_of(task.family) == "causal_lm"
        labels = torch.where(mask == 1, ids, -100) if causal else torch.randint(0, 2, (rows,), generator=generator)
        batches.append(GlobalBatch({"input_ids": ids, "attention_mask": mask, "labels": labels}, rows, count_targets(labels), int(mask.sum())))
    return batches


def build(task: Task, changes: dict[str, Any], folder: str | None = None) -> Strategy:
    """The strategy of this rank with its update, as a run builds it."""
    config, hf_config = config_of(task, changes), tiny_config(task.family)
    facts = inspect_model(hf_config, config.model.task)
    distributed = dist.is_initialized() and config.strategy != "local" and config.devices != 1
    world = dist.get_world_size() if distributed else 1
    plan = make_plan(config, facts, World("cpu", config.devices or 2, world))
    context = DistContext(0, 1, torch.device("cpu"))
    if distributed:
        context = make_context(dist.get_rank(), world, torch.device("cpu"), plan.pipeline_ranks, timedelta(seconds=60))
    strategy, _ = build_strategy(config, hf_config, facts, plan, context, loss_sum_for(config.model.task, 2), Path(folder) if folder else None)
    if plan.zero_stage:
        strategy.update = DeepSpeedUpdate(strategy, config)
    else:
        optimizer = NamedOptimizer(strategy.named_parameters(), config.optimizer)
        strategy.update = PlainUpdate(strategy, optimizer, CLIP_NORM, LossScale.for_precision(task.precision))
    return strategy


def train(
    task: Task,
    changes: dict[str, Any],
    first: int = 0,
    last: int | None = None,
    resume: str | None = None,
    save: str | None = None,
    poison: tuple[int, str, float] | None = None,
    folder: str | None = None,
) -> dict[str, Any]:
    """Updates ``first`` to ``last`` of the task's batches, after an evaluation of the first of them.

    ``resume`` and ``save``: a checkpoint's folder, and the folder of checkpoints. ``poison``: (update, parameter, value of its gradient).
    """
    strategy = build(task, changes, folder)
    if resume is not None:
        load_into(strategy, Path(resume))
    logits: list[Tensor] = []
    batches = batches_of(task)[first:last]
    strategy.evaluate(batches[0], lambda out, labels: logits.append(out.detach().float().clone()))
    outcomes = []
    for step, batch in enumerate(batches):
        hook = None
        if poison is not None and poison[0] == step and poison[1] in strategy.named_parameters():
            hook = strategy.named_parameters()[poison[1]].register_hook(lambda gradient: torch.full_like(gradient, poison[2]))
        outcomes.append(strategy.train_step(batch, LR))
        if hook is not None:
            hook.remove()
    tensors = tensors_of(strategy)
    if save is not None:
        save_checkpoint(Path(save), RunState(step=len(batches)), tensors, strategy.context)
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "skipped": [outcome.skipped for outcome in outcomes],
        "weights": {name: tensor.float().clone() for name, tensor in tensors.weights.items()} if strategy.context.replica == 0 else {},
        "states": {name: tensor.float().clone() for name, tensor in tensors.states.items()},
        "logits": torch.cat(logits) if logits else None,
        "plan": (strategy.plan.strategy, strategy.plan.zero_stage, strategy.plan.offload_optimizer, strategy.plan.offload_parameters),
    }


def plain(task: Task) -> dict[str, Any]:
    """The plainest loop on the whole model in one process: one forward, one backward, clip_grad_norm_, torch's AdamW."""
    hf_config = tiny_config(task.family)
    config = config_of(task, {"strategy": "local"})
    facts = inspect_model(hf_config, config.model.task)
    stage, _ = build_stage(config, hf_config, facts, StageSpan(0, facts.num_blocks, True, True), torch.device("cpu"), None)
    model: Any = stage.model
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if (p.ndim > 1) is decayed], "weight_decay": WEIGHT_DECAY if decayed else 0.0}
        for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, eps=EPS)
    losses, norms = [], []
    for batch in batches_of(task):
        inputs = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
        loss = loss_sum_for(config.model.task, 2)(model(**inputs).logits, batch.tensors["labels"]) / batch.target_count
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": {facts.canonical_name(n): p.detach().clone() for n, p in named.items()}}


def load_bytes(folder: str, part_bytes: int) -> dict[str, float]:
    """Memory of this process while stage 3 reads a model from its files: bytes of the whole, of the largest part, of the peak."""
    import threading
    import time
    from unittest import mock

    import psutil

    from mpfinetune.models.architecture import load_hf_config
    from mpfinetune.strategies import zero

    config = config_of(Task("llama"), {"strategy": "zero", "zero": {"stage": 3}, "model": {"path": folder, "task": "causal_lm"}})
    hf_config = load_hf_config(config.model, None)
    facts = inspect_model(hf_config, "causal_lm")
    plan = make_plan(config, facts, World("cpu", 2, dist.get_world_size()))
    context = make_context(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), 1, timedelta(seconds=60))
    zero.join_deepspeed(context)
    parts = zero.part_spans(facts, plan.spans[0], 4, part_bytes)
    process, seen, done = psutil.Process(), [0.0], threading.Event()
    before = process.memory_full_info().uss

    def watch() -> None:
        while not done.is_set():
            seen.append(float(process.memory_full_info().uss - before))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with mock.patch.object(zero, "part_spans", lambda *_: parts):
        strategy, _ = build_strategy(config, hf_config, facts, plan, context, loss_sum_for("causal_lm", 2), Path(folder))
    done.set()
    watcher.join()
    assert all(parameter.numel() == 0 for parameter in strategy.named_parameters().values() if parameter.ds_persist is False)
    largest = max(facts.numel(part.parameter_names(facts)) for part in parts) * 4
    return {"whole": facts.numel(facts.parameters) * 4, "largest_part": largest, "peak": max(seen)}
