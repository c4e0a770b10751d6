"""What a rank runs for the parity matrix: a few updates of a tiny model under any strategy, the same as the plain loop below."""

from __future__ import annotations

import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.data.batches import GlobalBatch
from mpfinetune.dist import DistContext, make_context
from mpfinetune.models.facts import inspect_model
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies.build import build_strategy
from mpfinetune.training.loss import count_targets, loss_sum_for
from mpfinetune.training.optim import NamedOptimizer
from tests.families import task_of, tiny_config

LR, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 0.5
PAD_TOKEN_ID = 0


def run_config(family: str, **changes: Any) -> RunConfig:
    """A config for the matrix; ``changes`` are top-level keys or sections."""
    base: dict[str, Any] = {
        "model": {"path": "in memory", "task": task_of(family), "init": "random"},
        "data": {"path": "in memory"} if task_of(family) == "causal_lm" else {"task": "mrpc"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY},
        "train": {"clip_norm": CLIP_NORM, "seed": 7},
        "run_dir": "unused",
        "device": "cpu",
        "strategy": "pipeline",
        "partition": {"rule": "uniform", "num_stages": 2},
    }
    return config_from_dict({**base, **changes})


def make_batches(family: str, shapes: tuple[tuple[int, int], ...] = ((8, 12), (7, 9), (5, 16)), left_padded: bool = False) -> list[GlobalBatch]:
    """One batch per (rows, tokens): right-padded rows of many lengths, the last update uneven."""
    generator = torch.Generator().manual_seed(3)
    lengths = random.Random(5)
    batches = []
    for rows, tokens in shapes:
        input_ids = torch.randint(3, 96, (rows, tokens), generator=generator)
        attention_mask = torch.zeros(rows, tokens, dtype=torch.int64)
        for row in range(rows):
            length = tokens if row == 0 else lengths.randint(2, tokens)
            attention_mask[row, tokens - length if left_padded else 0 : tokens if left_padded else length] = 1
        input_ids = torch.where(attention_mask == 1, input_ids, PAD_TOKEN_ID)
        if task_of(family) == "causal_lm":
            labels = torch.where(attention_mask == 1, input_ids, -100)
        else:
            labels = torch.randint(0, 2, (rows,), generator=generator)
        tensors = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        batches.append(GlobalBatch(tensors, rows, count_targets(labels), int(attention_mask.sum())))
    return batches


def train(
    family: str, changes: dict[str, Any], batches: list[GlobalBatch], model_changes: dict[str, Any] | None = None, folder: str | None = None
) -> dict[str, Any]:
    """Updates over the batches; returns losses, norms and this rank's parameters by name."""
    config = run_config(family, **changes)
    hf_config = tiny_config(family, **(model_changes or {}))
    facts = inspect_model(hf_config, config.model.task)
    distributed = dist.is_initialized() and config.strategy != "local"
    world = dist.get_world_size() if distributed else 1
    plan = make_plan(config, facts, World("cpu", 2, world))
    context = DistContext(0, 1, torch.device("cpu"))
    if distributed:
        context = make_context(dist.get_rank(), world, torch.device("cpu"), plan.pipeline_ranks, timedelta(seconds=60))
    loss_sum: Any = loss_sum_for(config.model.task, 2)
    strategy, _ = build_strategy(config, hf_config, facts, plan, context, loss_sum, Path(folder) if folder else None)
    optimizer = NamedOptimizer(strategy.named_parameters(), config.optimizer)
    strategy.optimizer, strategy.clip_norm = optimizer, config.train.clip_norm
    outcomes = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        outcomes.append(strategy.train_step(batch, LR))
    logits: list[Tensor] = []
    strategy.evaluate(batches[-1], lambda out, labels: logits.append(out.detach().float().clone()))
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "parameters": {name: p.detach().float().clone() for name, p in strategy.named_parameters().items()},
        "logits": torch.cat(logits)[: batches[-1].real_rows] if logits else None,
        "first_held": sorted(strategy.first_held_names()),
    }


def plain_loop(family: str, batches: list[GlobalBatch], model_changes: dict[str, Any] | None = None, clip_norm: float = CLIP_NORM) -> dict[str, Any]:
    """The plainest PyTorch loop on the whole model: one forward, one backward, clip_grad_norm_, AdamW."""
    from mpfinetune.models.stage import StageSpan
    from mpfinetune.strategies.build import build_stage

    config = run_config(family, strategy="local", partition={})
    hf_config = tiny_config(family, **(model_changes or {}))
    facts = inspect_model(hf_config, config.model.task)
    stage, _ = build_stage(config, hf_config, facts, StageSpan(0, facts.num_blocks, True, True), torch.device("cpu"), None)
    model = stage.model  # whole: transformers' own module, nothing replaced
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    if family == "gpt_oss":  # its experts' biases are matrices [E, F]
        biases = [p for name, p in parameters.items() if name.endswith("bias")]
        groups = [
            {"params": [p for name, p in parameters.items() if p.ndim >= 2 and not name.endswith("bias")], "weight_decay": WEIGHT_DECAY},
            {"params": biases + [p for name, p in parameters.items() if p.ndim < 2 and not name.endswith("bias")], "weight_decay": 0.0},
        ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        inputs = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
        logits = model(**inputs).logits.float()
        labels = batch.tensors["labels"]
        if labels.ndim == 2:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        else:
            loss = torch.nn.functional.cross_entropy(logits, labels)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
        losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        inputs = {name: tensor for name, tensor in batches[-1].tensors.items() if name != "labels"}
        logits = model(**inputs).logits
    return {"losses": losses, "norms": norms, "parameters": {n: p.detach().clone() for n, p in parameters.items()}, "logits": logits}
