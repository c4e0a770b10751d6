"""What a rank runs to prove the recovery from a want of memory: updates of a tiny model, one of which does not fit on one rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from mpfinetune.models.load import stream_seed
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.oom import OutOfMemory
from tests.multiproc.training_cases import LR, SEED, Problem, build, make_batches
from tests.oom_injection import no_room_for_buffers, out_of_memory_at


@dataclass(frozen=True)
class Injection:
    """Which rank runs out of memory, in which update (from 0), at which of its passes (from 0)."""

    rank: int
    update: int
    microbatch: int
    where: str = "forward"
    kind: str = "torch"


def train(problem: Problem, changes: dict[str, Any], injection: Injection | None = None, halved_at: int | None = None) -> dict[str, Any]:
    """The problem's updates; after a failure the micro-batch is halved and the update is run again, as the training loop does.

    ``halved_at``: from that update on it is half as large without any failure.
    """
    strategy = build(problem, changes)
    rank, losses, norms, failures, sizes = strategy.context.rank, [], [], [], []
    for step, batch in enumerate(make_batches(problem)):
        if step == halved_at:
            strategy.set_micro_size(strategy.plan.micro_size // 2)
        fails = injection is not None and (injection.rank, injection.update) == (rank, step)
        with _failing(injection) if injection is not None and fails else nullcontext():
            outcome = None
            while outcome is None:
                torch.manual_seed(stream_seed(SEED, "update", step, rank))
                try:
                    outcome = strategy.train_step(batch, LR)
                except OutOfMemory as failure:
                    if not failure.agreed:
                        raise
                    failures.append((step, failure.ranks, failure.agreed, str(failure)))
                    strategy.set_micro_size(strategy.plan.micro_size // 2)
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
        sizes.append(strategy.plan.micro_size)
    return {
        "losses": losses,
        "norms": norms,
        "failures": failures,
        "sizes": sizes,
        "parameters": weights_of(strategy),
    }


def _failing(injection: Injection) -> AbstractContextManager[Any]:
    if injection.where == "buffers":
        return no_room_for_buffers()
    return out_of_memory_at(injection.microbatch, injection.where, injection.kind)


def train_without_retry(problem: Problem, changes: dict[str, Any], injection: Injection) -> None:
    """As ``train``, but a failure ends the case: on this rank only, where the others do not know of it."""
    with mock.patch.object(Strategy, "set_micro_size", side_effect=AssertionError("a retry was tried")):
        train(problem, changes, injection)


def weights_of(strategy: Strategy) -> dict[str, torch.Tensor]:
    assert strategy.update is not None
    return {name: tensor.detach().float().clone() for name, tensor in strategy.update.weight_stream()}
