"""Out-of-memory errors where a test wants them: at the forward or backward pass of one microbatch, or of all that are too large."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from mpfinetune.models.stage import StageModule

WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB (injected)"
CPU_WORDS = "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
# Made anew each time: an error that is kept keeps the frames in which it was raised.
KINDS: dict[str, Callable[[], Exception]] = {"torch": lambda: torch.OutOfMemoryError(WORDS), "cpu": lambda: RuntimeError(CPU_WORDS)}


@contextmanager
def out_of_memory_at(microbatch: int, where: str = "forward", kind: str = "torch") -> Iterator[list[int]]:
    """One error at the training pass of the ``microbatch``-th call (from 0) of a stage in the block; yields the rows of every call."""
    forward = StageModule.forward
    calls: list[int] = []

    def counted(self: StageModule, hidden: Tensor | None = None, **batch: Tensor) -> Tensor:
        if not self.training:
            return forward(self, hidden, **batch)
        calls.append(batch["input_ids"].shape[0])
        fails = len(calls) == microbatch + 1
        if fails and where == "forward":
            raise KINDS[kind]()
        output = forward(self, hidden, **batch)
        return _FailingBackward.apply(output, kind) if fails else output

    with mock.patch.object(StageModule, "forward", counted):
        yield calls


@contextmanager
def no_room_for_buffers() -> Iterator[None]:
    """Once, a pipeline stage cannot make its receive buffers for a new shape."""
    setup = PipelineStage._setup_forward_recv_info
    done: list[int] = []

    def failing(self: PipelineStage, *arguments: Any, **options: Any) -> None:
        if not done:
            done.append(self.stage_index)
            raise torch.OutOfMemoryError(WORDS)
        setup(self, *arguments, **options)

    with mock.patch.object(PipelineStage, "_setup_forward_recv_info", failing):
        yield


@contextmanager
def room_for(rows: int, evaluation: bool = False) -> Iterator[list[int]]:
    """No pass of more than ``rows`` rows fits (while training; with ``evaluation`` only while not); yields the rows of every call."""
    forward = StageModule.forward
    calls: list[int] = []

    def limited(self: StageModule, hidden: Tensor | None = None, **batch: Tensor) -> Tensor:
        calls.append(batch["input_ids"].shape[0])
        if self.training is not evaluation and calls[-1] > rows:
            raise torch.OutOfMemoryError(WORDS)
        return forward(self, hidden, **batch)

    with mock.patch.object(StageModule, "forward", limited):
        yield calls


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise KINDS[ctx.kind]()
