"""One process per stage (or per two stages), microbatches in flight: torch.distributed.pipelining over our stage modules.

Stages exchange hidden states [B, T, D] only. Labels are small integers that every rank has, so the last stage returns the loss, a
scalar: torch's runtime keeps the last stage's outputs of a whole step, which would be all logits.

A rank that runs out of memory goes through the rest of the schedule without computing: stand-ins take the place of its results, so that every
send finds its receive and no rank waits for ever, and the batch's result is thrown away by all (see ``oom``).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType, _PipelineScheduleRuntime

from mpfinetune.config_rules import ZERO_BUBBLE_SCHEDULES
from mpfinetune.data.batches import GlobalBatch, pad_rows, slice_rows
from mpfinetune.dist import DistContext
from mpfinetune.models.architecture import TORCH_DTYPES
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.stage import StageModule
from mpfinetune.planning.plan import Plan
from mpfinetune.planning.schedule import SCHEDULES, Action, forward_order, stages_of_rank
from mpfinetune.strategies.base import LossSum, Observer, Strategy
from mpfinetune.strategies.oom import MemoryGuard, nothing
from mpfinetune.strategies.orders import schedule_orders

# A cached schedule holds receive buffers for all its microbatches; the least recently used ones go beyond this.
_CACHED_BUFFER_BYTES = 256 * 2**20


class _ListedSchedule(_PipelineScheduleRuntime):
    """An order of our own on torch's action runtime, which posts receives ahead of the compute that needs them."""

    def __init__(self, stages: list[PipelineStage], n_microbatches: int, orders: dict[int, list[Action]], loss_fn: Any) -> None:
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, scale_grads=False)
        kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
        actions = {rank: [_Action(stage, kinds[kind], index) for stage, kind, index in order] for rank, order in orders.items()}
        # The lowering step of torch's runtime, without its check, which refuses an order without backward passes (evaluation).
        self.stage_index_to_group_rank = {stage: rank for rank, order in orders.items() for stage, _, _ in order}
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank
        self.pipeline_order_with_comms = _add_send_recv(actions, lambda stage: self.stage_index_to_group_rank[stage], self._num_stages)


class _GuardedStage(PipelineStage):
    """A stage whose computations go through a ``MemoryGuard``; what they would have left for the exchanges is there in any case.

    Args:
        stand_in: sent in place of a result: hidden states [rows, T, D] to the next stage and their gradient to the previous one.
        passes_gradient: whether the stage sends a gradient back.
    """

    def __init__(self, *args: Any, guard: MemoryGuard, stand_in: Tensor, passes_gradient: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.guard = guard
        self.stand_in_gradient = stand_in if passes_gradient else None
        self.stand_in_output = stand_in.new_zeros(1, dtype=torch.float32) if self.is_last else stand_in

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward_one_chunk
        if not self.guard.runs(lambda: forward(fwd_chunk_id, *args, **kwargs)):
            self.fwd_cache[fwd_chunk_id] = ((self.stand_in_output,), [])
        (output,), _ = self.fwd_cache[fwd_chunk_id]
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        backward = super().backward_one_chunk
        if not self.guard.runs(lambda: backward(bwd_chunk_id, *args, **kwargs)):
            self.bwd_cache[bwd_chunk_id] = () if self.is_first else (self.stand_in_gradient,)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        backward = super().backward_weight_one_chunk
        self.guard.runs(lambda: backward(bwd_chunk_id, *args, **kwargs))

    def release(self) -> None:
        """Drop the graphs of all microbatches; what is still to be sent becomes a stand-in."""
        for chunk in self.fwd_cache:
            self.fwd_cache[chunk] = ((self.stand_in_output,), [])
        for chunk in self.bwd_cache:
            self.bwd_cache[chunk] = () if self.is_first else (self.stand_in_gradient,)
        self.backward_state.clear()
        self.dw_runner.clear()


class _StageWithLoss(nn.Module):
    """A stage as torch's runtime calls it: ``(hidden, labels=..., **batch)``; the last one gives its part of the mean loss."""

    def __init__(self, stage: StageModule, loss_sum: LossSum) -> None:
        super().__init__()
        self.stage = stage
        self.loss_sum = loss_sum
        self.loss_factor = 1.0
        self.observe: Observer | None = None

    def forward(self, *hidden: Tensor, labels: Tensor, **batch: Tensor) -> Tensor:
        output = self.stage(*hidden, **batch)
        if not self.stage.span.has_epilogue:
            return output
        if self.observe is not None:
            self.observe(output, labels)
            return output.new_zeros(1)
        return self.loss_sum(output, labels).reshape(1) * self.loss_factor


class PipelineStrategy(Strategy):
    """Stages over processes, replicas over the rest."""

    def __init__(self, plan: Plan, facts: ModelFacts, context: DistContext, stages: dict[int, StageModule], loss_sum: LossSum) -> None:
        super().__init__(plan, facts, context, stages, loss_sum)
        self._modules = {index: _StageWithLoss(stage, loss_sum) for index, stage in stages.items()}
        self._schedules: OrderedDict[tuple[bool, int, int, int], _PipelineScheduleRuntime] = OrderedDict()
        # Not that of some parameter: quantised ones are bytes, adapters are always fp32.
        self._carries_gradient = self._find_carriers()
        self._hidden_dtype = TORCH_DTYPES[plan.precision]

    def _find_carriers(self) -> list[bool]:
        """Whether the hidden states that enter each stage lead back to something that learns; else no gradient is computed or sent."""
        if self.plan.schedule in ZERO_BUBBLE_SCHEDULES:
            # torch's split backward finds the weights to differentiate from the stage's input: without a gradient there, none learns.
            return [True] * (self.plan.num_stages + 1)
        own = {index: any(p.requires_grad for p in stage.parameters()) for index, stage in self.stages.items()}
        learns = {index: flag for found in self.context.gather_objects(own) for index, flag in found.items()}
        return [any(learns[before] for before in range(index)) for index in range(self.plan.num_stages + 1)]

    def _forward_backward(self, batch: GlobalBatch, loss_scale: float) -> Tensor:
        losses: list[Tensor] = []
        for module in self._modules.values():
            module.loss_factor = loss_scale / max(1, batch.target_count)
        self._run(batch, train=True, losses=losses)
        if not self.has_logits:
            return torch.zeros((), device=self.context.device)
        return torch.stack([loss.detach() for loss in losses]).sum() / loss_scale

    def _forward(self, batch: GlobalBatch, observe: Observer) -> None:
        for module in self._modules.values():
            module.observe = observe
        try:
            self._run(batch, train=False, losses=None)
        finally:
            for module in self._modules.values():
                module.observe = None

    def _guarded(self, work: Callable[[], object]) -> None:
        work()  # its computations are guarded one by one, since other ranks wait for what comes between them

    def _forget_shapes(self) -> None:
        self._schedules.clear()
        self.memory.release = nothing

    def _run(self, batch: GlobalBatch, train: bool, losses: list[Tensor] | None) -> None:
        padded = pad_rows(batch, self.plan.padded_rows(batch.row_count))
        rows = padded.tensors["input_ids"].shape[0] // self.context.replicas
        own = slice_rows(padded, self.context.replica * rows, (self.context.replica + 1) * rows)
        schedule = self._schedule(train, rows // self.plan.micro_size, own.tensors["input_ids"].shape[1])
        tensors: dict[str, Any] = dict(own.tensors)

        def move() -> None:
            for name, tensor in own.tensors.items():
                tensors[name] = tensor.to(self.context.device, non_blocking=True)

        self.memory.release = partial(_release, schedule)
        self.memory.runs(move)  # where the card has no room even for them, the rest of the step does not read them
        # The runtime wants a target for its loss function; ours is already in the last stage's output.
        unused_target = torch.zeros(rows) if train and self.has_logits else None
        schedule.step(target=unused_target, losses=losses, return_outputs=False, **tensors)

    def _schedule(self, train: bool, microbatches: int, tokens: int) -> _PipelineScheduleRuntime:
        """Buffers are fixed per shape, so there is one schedule for each (microbatches, rows, tokens), over the same modules."""
        key = (train, microbatches, self.plan.micro_size, tokens)
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        self.memory.runs(lambda: self._make_ready(key))
        self._agree()  # that all have room for the receive buffers: in the step, a rank without them could not take part
        # The same sequence of keys on every rank, so all drop the same ones.
        row_bytes = self.facts.hidden_size * self._hidden_dtype.itemsize
        while len(self._schedules) > 1 and sum((1 + k[0]) * k[1] * k[2] * k[3] * row_bytes for k in self._schedules) > _CACHED_BUFFER_BYTES:
            self._schedules.popitem(last=False)
        return self._schedules[key]

    def _make_ready(self, key: tuple[bool, int, int, int]) -> None:
        """Build the schedule and its receive buffers, which torch would make in the first step, after the stages have greeted each other."""
        schedule = self._schedules[key] = self._build_schedule(*key)
        for stage in schedule._stages:
            stage.has_backward = key[0]
        schedule._initialize_stages((), {})

    def _build_schedule(self, train: bool, microbatches: int, rows: int, tokens: int) -> _PipelineScheduleRuntime:
        shape = (rows, tokens, self.facts.hidden_size)
        # Entering each stage, the last one leaving. Both sides of a boundary must agree, or one waits for a gradient for ever.
        hidden = [torch.empty(shape, dtype=self._hidden_dtype, device="meta", requires_grad=train and carries) for carries in self._carries_gradient]
        loss = torch.empty(1, dtype=torch.float32 if train else self._hidden_dtype, device="meta", requires_grad=train)
        stand_in = torch.zeros(shape, dtype=self._hidden_dtype, device=self.context.device)
        stages: list[PipelineStage] = [
            _GuardedStage(
                module,
                index,
                self.plan.num_stages,
                self.context.device,
                # Static shapes: torch's trial run to find them costs a step and breaks under other engines.
                input_args=() if index == 0 else (hidden[index],),
                output_args=loss if index == self.plan.num_stages - 1 else hidden[index + 1],
                group=self.context.pipeline_group,
                guard=self.memory,
                stand_in=stand_in,
                passes_gradient=train and self._carries_gradient[index],
            )
            for index, module in self._modules.items()
        ]
        row = SCHEDULES[self.plan.schedule]
        ranks = range(self.plan.pipeline_ranks)
        if not train:
            orders = {r: forward_order(stages_of_rank(self.plan.schedule, r, len(ranks), self.plan.stages_per_rank), microbatches) for r in ranks}
            return _ListedSchedule(stages, microbatches, orders, loss_fn=None)
        if row.order is not None:
            orders = schedule_orders(self.plan.schedule, len(ranks), self.plan.stages_per_rank, microbatches)
            return _ListedSchedule(stages, microbatches, orders, loss_fn=_pass_loss)
        assert row.torch_class is not None
        return getattr(pipelining, row.torch_class)(stages, microbatches, loss_fn=_pass_loss, scale_grads=False)


def _release(schedule: _PipelineScheduleRuntime) -> None:
    """Drop the graphs of a step that will not be finished."""
    for stage in schedule._stages:
        assert isinstance(stage, _GuardedStage)
        stage.release()
    schedule._internal_losses[:] = [loss.detach() for loss in schedule._internal_losses]


def _pass_loss(output: Tensor, target: Tensor) -> Tensor:
    """The last stage has computed the loss; torch wants a function that returns it."""
    return output.sum()
