"""What a rank of the pool runs: a whole run of the product over the group that the pool keeps."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mpfinetune.config import load_config
from mpfinetune.dist import DistContext, make_context
from mpfinetune.errors import UserError
from mpfinetune.reports.console import Reporter
from mpfinetune.training import checkpoint, run, shared_folder, tensor_files
from mpfinetune.training.checkpoint import RankTensors, RunState, save_checkpoint
from mpfinetune.training.loop import Trainer
from mpfinetune.training.prepare import PreparedRun, plan_run, prepare_run
from tests.checkpoints import streams
from tests.oom_injection import out_of_memory_at


@contextlib.contextmanager
def _group_of_the_pool(prepared: PreparedRun) -> Iterator[DistContext]:
    ranks = prepared.planned.plan.pipeline_ranks
    yield make_context(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), ranks, timedelta(seconds=60))


def train(config: str, overrides: list[str] | None = None) -> list[str]:
    """``mpfinetune train`` on this rank; returns what it said."""
    said: list[str] = []
    prepared = prepare_run(plan_run(load_config(Path(config), overrides), dist.get_world_size()), said.append)
    with mock.patch.object(run, "_processes", _group_of_the_pool), mock.patch.object(Reporter, "say", lambda self, text: said.append(text)):
        run.train(prepared, Reporter(enabled=dist.get_rank() == 0))
    return said


def train_apart(configs: list[str]) -> str:
    """As ``train``, each rank with a config of its own, as where one run_dir is another folder on each machine; returns the error."""
    try:
        with mock.patch.object(shared_folder, "_VISIBLE_SECONDS", 0.3):
            train(configs[dist.get_rank()])
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def evaluate(config: str, which: str) -> dict[str, float]:
    """``mpfinetune eval`` on this rank."""
    prepared = prepare_run(plan_run(load_config(Path(config)), dist.get_world_size()), lambda text: None)
    with mock.patch.object(run, "_processes", _group_of_the_pool):
        return run.evaluate(prepared, which, Reporter(enabled=False))


def save_with_fault(folder: str, fault: str, faulty_rank: int) -> str | None:
    """Two checkpoints of a small tensor, the second while ``fault`` fails on one rank with a full disk; returns the message."""
    context = make_context(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.get_world_size(), timedelta(seconds=60))
    tensors = RankTensors({f"weight{context.rank}": torch.ones(4)}, {f"weight{context.rank}/step": torch.ones(())})
    save_checkpoint(Path(folder), RunState(step=1), streams(tensors), context)
    full = OSError(errno.ENOSPC, "No space left on device")
    owner: Any = {"mkdir": Path, "_write_tensors": tensor_files}.get(fault, checkpoint)
    broken = mock.patch.object(owner, fault, side_effect=full) if context.rank == faulty_rank else contextlib.nullcontext()
    try:
        with broken:
            save_checkpoint(Path(folder), RunState(step=2), streams(tensors), context)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return None


def build_local(config: Path) -> Trainer:
    """The trainer of a local run, before its first update; writes nothing."""
    prepared = prepare_run(plan_run(load_config(config), None), lambda text: None)
    context = DistContext(0, 1, torch.device("cpu"))
    return run._trainer(prepared, context, Reporter(enabled=False), tracking=False)


def train_out_of_memory(config: str, rank: int, update: int, microbatch: int) -> list[str]:
    """As ``train``; on one rank the forward pass of a microbatch (from 0) of an update (from 1) runs out of memory once."""
    original = Trainer._update_once
    done: list[int] = []

    def injected(self: Trainer, *arguments: Any) -> Any:
        if dist.get_rank() != rank or self.state.step != update - 1 or done:
            return original(self, *arguments)
        done.append(self.state.step)
        with out_of_memory_at(microbatch):
            return original(self, *arguments)

    with mock.patch.object(Trainer, "_update_once", injected):
        return train(config)
