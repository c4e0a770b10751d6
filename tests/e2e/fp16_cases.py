"""What a rank runs for fp16: the product's own training loop, with overflows put into the gradients of one rank."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpfinetune.config import load_config
from mpfinetune.dist import DistContext, make_context
from mpfinetune.reports.console import Reporter
from mpfinetune.training import run
from mpfinetune.training.checkpoint import complete_checkpoints
from mpfinetune.training.loop import NotFinite, Trainer
from mpfinetune.training.prepare import plan_run, prepare_run


def fit(
    config: str, overflows: tuple[int, ...], rank: int, scale: float | None = None, growth_interval: int = 2000, resume: str | None = None
) -> dict[str, Any]:
    """A run of the config on this rank, as ``mpfinetune train`` makes it.

    Args:
        overflows: updates, counted from 0, in which the gradient of one parameter of rank ``rank`` is infinite.
        scale: the loss scale to begin with.
        resume: a checkpoint to go on from.
    """
    trainer = _trainer(Path(config))
    if scale is not None:
        trainer.update.scale.value = scale
    trainer.update.scale.growth_interval = growth_interval
    if resume is not None:
        trainer.resume(Path(resume))
    context = trainer.strategy.context
    if context.rank == rank:
        parameter = next(p for p in trainer.strategy.named_parameters().values() if p.requires_grad)
        parameter.register_hook(lambda gradient: torch.full_like(gradient, torch.inf) if trainer.state.step in overflows else gradient)
    records = _record(trainer)
    stopped = None
    try:
        trainer.fit()
    except NotFinite as error:
        stopped = str(error)
    saved = complete_checkpoints(trainer.checkpoints)
    return {
        "records": records,
        "stopped": stopped,
        "newest": str(saved[-1]) if saved else None,
        "end": _snapshot(trainer),
        "scale": (trainer.update.scale.value, trainer.update.scale.updates_since_change),
    }


def _trainer(config: Path) -> Any:
    distributed = dist.is_initialized()
    prepared = prepare_run(plan_run(load_config(config), dist.get_world_size() if distributed else None), lambda text: None)
    context = DistContext(0, 1, torch.device("cpu"))
    if distributed:
        ranks = prepared.planned.plan.pipeline_ranks
        context = make_context(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), ranks, timedelta(seconds=60))
    return run._trainer(prepared, context, Reporter(enabled=False), tracking=False)


def _record(trainer: Trainer) -> list[dict[str, Any]]:
    """Of each update: whether it was skipped, its learning rate and loss, the scale after it, and whether it left every tensor as it was."""
    records: list[dict[str, Any]] = []
    original: Any = trainer.strategy.train_step
    update: Any = trainer.update

    def step(batch: Any, lr: float, **more: Any) -> Any:
        before = _snapshot(trainer)
        outcome = original(batch, lr, **more)
        after = _snapshot(trainer)
        unchanged = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        scale = (update.scale.value, update.scale.updates_since_change)
        records.append({"loss": outcome.loss, "lr": lr, "skipped": outcome.skipped, "scale": scale, "unchanged": unchanged})
        return outcome

    trainer.strategy.train_step = step  # type: ignore[method-assign]
    return records


def _snapshot(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, masters and optimizer states."""
    weights = {f"weight {name}": p for name, p in trainer.strategy.named_parameters().items()}
    masters = {f"master {name}": tensor for name, tensor in trainer.update.weight_stream()}
    return {name: tensor.detach().clone() for name, tensor in {**weights, **masters, **dict(trainer.update.state_stream())}.items()}
