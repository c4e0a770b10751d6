"""One process, several devices, microbatches in flight: contiguous stages through ``fairscale.nn.Pipe``, so that the devices work at once.

Pipe runs all forward passes, then autograd all backward passes (GPipe), with one worker thread per device. On `[cpu, cpu]` there is one
worker, so the numbers are the same and nothing overlaps.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpfinetune.data.batches import GlobalBatch, pad_rows
from mpfinetune.dist import DistContext
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.stage import StageModule
from mpfinetune.planning.plan import Plan
from mpfinetune.strategies.base import LossSum, Observer, Strategy

_JOIN_SECONDS = 10.0
# (logits, labels) of a microbatch -> what the pipe returns for it, [1].
_Finish = Callable[[Tensor, Tensor], Tensor]


class LocalPipeStrategy(Strategy):
    """Stage i on device i. Call ``close`` when done, or leave it to the interpreter's end."""

    def __init__(self, plan: Plan, facts: ModelFacts, context: DistContext, stages: dict[int, StageModule], loss_sum: LossSum) -> None:
        self._copies: list[tuple[nn.Module, str, nn.Parameter, torch.device]] = []
        super().__init__(plan, facts, context, stages, loss_sum)
        self._parts = [_Part(stages[index], index == 0, index == plan.num_stages - 1) for index in range(plan.num_stages)]
        self._pipe: _OwnedPipe | None = None

    def close(self) -> None:
        """End the worker threads; the strategy can be used again, with new ones."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _forget_shapes(self) -> None:
        self.close()

    def _forward_backward(self, batch: GlobalBatch, loss_scale: float) -> Tensor:
        factor = loss_scale / max(1, batch.target_count)
        losses = self._run(batch, lambda logits, labels: (self.loss_sum(logits, labels) * factor).reshape(1))
        losses.sum().backward()
        return losses.detach().sum().to(self.context.device) / loss_scale

    def _forward(self, batch: GlobalBatch, observe: Observer) -> None:
        def finish(logits: Tensor, labels: Tensor) -> Tensor:
            observe(logits, labels)  # in the last device's worker, one microbatch after the other, while this thread waits
            return logits.new_zeros(1)

        self._run(batch, finish)

    def _run(self, batch: GlobalBatch, finish: _Finish) -> Tensor:
        """All microbatches through the stages; returns what ``finish`` made of each, [microbatches]."""
        micro_size = self.plan.micro_size
        # Never fewer than micro_size rows: Pipe cuts with torch.chunk, which needs whole microbatches to cut them as asked.
        batch = pad_rows(batch, micro_size)
        chunks = batch.row_count // micro_size
        names = sorted(batch.tensors)
        for part in self._parts:
            part.names, part.finish = names, finish
        self._refresh_copies()
        try:
            return self._pipe_for(chunks)(chunks, tuple(batch.tensors[name].to(self.context.nth_device(0)) for name in names))
        except BaseException:
            self.close()  # results of the broken step may be left in its queues
            raise
        finally:
            for part in self._parts:
                part.finish = None

    def _pipe_for(self, chunks: int) -> _OwnedPipe:
        if self._pipe is None or self._pipe.max_chunks < chunks:
            self.close()
            devices = [self.context.nth_device(index) for index in range(self.plan.num_stages)]
            self._pipe = _OwnedPipe(self._parts, devices, max(chunks, self.plan.microbatches))
        return self._pipe

    # --- parameters that several stages use: tied weights, or what every stage reads ---

    def _tie_local_stages(self) -> None:
        """One owner, the first stage; another stage on the same device shares it, one on another device computes with a copy.

        The copy is no parameter but an image of the owner, made for each update as a part of the autograd graph: it can never differ from
        the owner, and its gradient, summed over the microbatches on its own device, flows back once.
        """
        first: dict[str, nn.Parameter] = {}
        for stage in self.stages.values():
            for name, parameter in list(stage.model.named_parameters(remove_duplicate=False)):
                kept = first.setdefault(self.facts.canonical_name(name), parameter)
                if kept is parameter:
                    continue
                owner, _, leaf = name.rpartition(".")
                module = stage.model.get_submodule(owner)
                if self._needs_copy(kept, parameter):
                    self._copies.append((module, leaf, kept, parameter.device))
                    delattr(module, leaf)
                else:
                    setattr(module, leaf, kept)

    def _needs_copy(self, owner: nn.Parameter, other: nn.Parameter) -> bool:
        return owner.device != other.device

    def _refresh_copies(self) -> None:
        for module, leaf, owner, device in self._copies:
            setattr(module, leaf, owner.to(device, copy=True))


class _Part(nn.Module):
    """A stage as Pipe calls it: a tuple of tensors in and out, of which only the hidden states carry gradients.

    The stage is no submodule: Pipe would move its parameters, and with them those that stages share, and refuse shared ones.
    """

    def __init__(self, stage: StageModule, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self._stage = (stage,)
        self._is_first = is_first
        self._is_last = is_last
        self.names: list[str] = []
        self.finish: _Finish | None = None

    def forward(self, tensors: tuple[Tensor, ...]) -> Any:
        hidden = None if self._is_first else tensors[0]
        carried = tensors if self._is_first else tensors[1:]
        # Pipe's copies count a floating tensor (scores as labels) as one with a gradient.
        batch = {name: tensor.detach() for name, tensor in zip(self.names, carried, strict=True)}
        labels = batch.pop("labels")
        result = self._stage[0](hidden, **batch)
        if self._is_last:
            assert self.finish is not None
            return self.finish(result, labels.to(result.device))
        return (result, *carried)


class _OwnedPipe:
    """A ``Pipe`` and the end of its worker threads.

    fairscale's workers are daemon threads that wait for tasks until ``Pipeline.__del__`` sends them away. When that runs in the
    interpreter's last phase they are frozen already, and it waits for ever; when it runs a little earlier, it returns before the threads
    have ended, and one that the interpreter stops within C++ code aborts the process. So they are told to end, and joined, when this object
    is closed or dropped, and at the latest by an exit handler, which runs while threads still do.
    """

    def __init__(self, parts: Sequence[nn.Module], devices: Sequence[torch.device], max_chunks: int) -> None:
        from fairscale.nn import Pipe

        self.max_chunks = max_chunks
        before = set(threading.enumerate())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it points to torch's copy, which torch has removed since
            self._pipe = Pipe(nn.Sequential(*parts), balance=[1] * len(parts), devices=list(devices), chunks=max_chunks, checkpoint="never")
        queues = list(self._pipe.pipeline.in_queues)
        # A thread is recognised by its queue: others may have been started meanwhile.
        workers = [t for t in threading.enumerate() if t not in before and any(argument in queues for argument in getattr(t, "_args", ()))]
        assert len(workers) == len(set(map(id, queues)))
        self._end = weakref.finalize(self, _end_workers, self._pipe.pipeline, workers)

    def __call__(self, chunks: int, tensors: tuple[Tensor, ...]) -> Tensor:
        self._pipe.chunks = chunks  # read at each call; only its copy streams were made for max_chunks
        result: Tensor = self._pipe(tensors)
        return result

    def close(self) -> None:
        """End the worker threads; may be called more than once."""
        self._end()


def _end_workers(pipeline: Any, workers: list[threading.Thread]) -> None:
    for queue in {id(queue): queue for queue in pipeline.in_queues}.values():
        queue.put(None)
    for worker in workers:
        if worker is not threading.current_thread():  # the garbage collector may have been started there
            worker.join(_JOIN_SECONDS)
    # Its __del__ would send them away a second time.
    pipeline.in_queues, pipeline.out_queues = [], []
