"""Times measured on the devices that are here: a few blocks, the embedding and the head, an update and a crossing, in a few seconds.

All ranks measure at the same time, each on its own device, as they will compute: what they share (a memory bus, a core) slows them alike.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from mpfinetune.config import RunConfig
from mpfinetune.dist import DistContext, environment_int, init_distributed, launched_by_torchrun
from mpfinetune.errors import ConfigError
from mpfinetune.models.architecture import TORCH_DTYPES
from mpfinetune.models.costs import ModelCosts
from mpfinetune.models.stage import StageModule, StageSpan
from mpfinetune.planning.micro_size import rows_to_measure
from mpfinetune.planning.predict import update_bytes
from mpfinetune.planning.tensor_bytes import learning_names, optimizer_bytes
from mpfinetune.planning.timing import HOST_BYTES_PER_SECOND, PartSeconds, RankTimes, slowest
from mpfinetune.strategies.base import LossSum
from mpfinetune.strategies.build import build_stage
from mpfinetune.training.forecast import Forecast, write_calibration
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.optim import NamedOptimizer
from mpfinetune.training.prepare import plan_run

_WARM_UPS, _FEWEST_REPEATS, _MOST_REPEATS, _SECONDS_A_PROBE = 2, 3, 15, 1.0
_BLOCKS = 3  # in the longer of the two stages whose difference is a block


def calibrate(forecast: Forecast, context: DistContext, on_stage: Callable[[StageModule], None] | None = None) -> list[RankTimes]:
    """The times of every pipeline rank, on every rank; collective.

    Args:
        on_stage: called with each stage that is measured, before it runs; for tests and benchmarks that slow a rank down.
    """
    probe = _Probe(forecast, context, on_stage)
    own = probe.rank_times()
    gathered = context.gather_objects(own)
    groups = [[gathered[context.global_rank(rank, replica)] for replica in range(context.replicas)] for rank in range(context.pipeline_ranks)]
    return [slowest(group) for group in groups]


def calibrate_run(config: RunConfig) -> None:
    """Measure as one of the run's processes and write the times into the run's folder; collective over the processes that were started.

    Raises:
        UserError: whatever is wrong with config, model, map or processes.
    """
    if config.partition.local_overlap:
        raise ConfigError(
            "partition.local_overlap: true given, whose devices one process drives, and --calibrate measures one device for each process, so its "
            "times would not be used; leave out --calibrate, or set strategy: pipeline to measure each card with a process of its own"
        )
    planned = plan_run(config, environment_int("WORLD_SIZE") if launched_by_torchrun() else None)
    context = init_distributed(config, planned.plan.pipeline_ranks)
    times = calibrate(planned.forecast, context)
    if context.rank == 0:
        write_calibration(config, planned.forecast.calibration_key(context.pipeline_ranks), times)
    context.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _seconds_of_one(one: float, several: float, more: int) -> float:
    """A block's seconds from a stage with one and a stage with ``more`` blocks more; what a pass takes besides them is never less than nothing.

    On a busy machine the two are not measured alike, and their difference may be anything; then a block is its share of the longer stage.
    """
    share, difference = several / (more + 1), (several - one) / more
    return difference if 0.0 < difference <= share else share


class _Probe:
    def __init__(self, forecast: Forecast, context: DistContext, on_stage: Callable[[StageModule], None] | None) -> None:
        self.forecast, self.context, self.on_stage = forecast, context, on_stage
        # Recompute follows from the forward time, so that one measurement serves every policy.
        self.config = replace(forecast.config, recompute="none")
        self.facts = forecast.facts
        self.learning = learning_names(self.config, self.facts)
        self.loss_sum: LossSum = loss_sum_for(self.config.model.task, forecast.num_labels)
        self.rows, self.tokens = rows_to_measure(self.config), self.config.data.max_length
        self.update_rate = 0.0

    def rank_times(self) -> RankTimes:
        costs = self.forecast.meter.measure(self.rows, self.tokens)
        blocks, overhead = self._blocks(costs)
        count = self.facts.num_blocks
        ends = [self._stage(StageSpan(0, 0, True, False)), self._stage(StageSpan(count, count, False, True))] if count else []
        if not ends:  # a model that cannot be cut is measured whole
            whole = self._stage(StageSpan(0, 0, True, True))
            ends, overhead = [PartSeconds(0.0, 0.0), whole], 0.0
        first, last = (PartSeconds(max(0.0, part.forward - overhead), part.backward) for part in ends)
        return RankTimes(
            rows=self.rows,
            parts=(first, *blocks, last),
            transfer_seconds=self._transfer(costs),
            update_bytes_per_second=self.update_rate or HOST_BYTES_PER_SECOND,
            host_bytes_per_second=min(self.update_rate or HOST_BYTES_PER_SECOND, HOST_BYTES_PER_SECOND),
            stage_seconds=overhead,
            source="measured",
        )

    def _blocks(self, costs: ModelCosts) -> tuple[list[PartSeconds], float]:
        """Each block's seconds, one measurement for those of equal costs; and what a pass through any stage takes besides."""
        measured: dict[object, PartSeconds] = {}
        overheads: list[float] = []
        found = []
        builds = [replace(part, name="") for part in costs.blocks]
        for index, build in enumerate(builds):
            if build not in measured:
                stop = index + 1
                while stop < len(builds) and stop - index < _BLOCKS and builds[stop] == build:
                    stop += 1
                one = self._stage(StageSpan(index, index + 1, False, False), with_update=not measured)
                if stop - index > 1:
                    several = self._stage(StageSpan(index, stop, False, False))
                    more = stop - index - 1
                    block = PartSeconds(_seconds_of_one(one.forward, several.forward, more), _seconds_of_one(one.backward, several.backward, more))
                    overheads.append(max(0.0, one.forward - block.forward))
                    one = block
                measured[build] = one
            found.append(measured[build])
        return found, statistics.median(overheads) if overheads else 0.0

    def _stage(self, span: StageSpan, with_update: bool = False) -> PartSeconds:
        """Forward and backward seconds of one microbatch through a stage, the loss included where the head is."""
        stage, _ = build_stage(self.config, self.forecast.hf_config, self.facts, span, self.context.device, None)
        stage.train()
        if self.on_stage is not None:
            self.on_stage(stage)
        named = {self.facts.canonical_name(name): parameter for name, parameter in stage.model.named_parameters() if parameter.requires_grad}
        # Before the first backward pass: it is the optimizer that makes gradients of narrow weights add up in fp32.
        optimizer = NamedOptimizer(named, self.config.optimizer, self.facts.embeddings)
        batch, labels = self._batch()
        hidden = None if span.has_prologue else self._hidden(span)
        forward: list[float] = []
        backward: list[float] = []
        for repeat in range(_WARM_UPS + _MOST_REPEATS):
            self.context.barrier()
            started = self._now()
            output = stage(hidden, **batch)
            loss = self.loss_sum(output, labels) if span.has_epilogue else None
            middle = self._now()
            if loss is not None and loss.requires_grad:
                loss.backward()
            elif loss is None and output.requires_grad:
                output.backward(torch.ones_like(output))
            ended = self._now()
            if hidden is not None:
                hidden.grad = None
            if repeat >= _WARM_UPS:
                forward.append(middle - started)
                backward.append(ended - middle)
            # The slowest rank's time, so that all stop together.
            spent = self.context.gather_objects(sum(forward) + sum(backward))
            if len(forward) >= _FEWEST_REPEATS and max(spent) > _SECONDS_A_PROBE:
                break
        if with_update:
            self.update_rate = self._update_rate(optimizer)
        return PartSeconds(statistics.median(forward), statistics.median(backward))

    def _update_rate(self, optimizer: NamedOptimizer) -> float:
        """Bytes of gradients and states that an update goes through in a second; 0 where nothing learns."""
        learning = {name: parameter for name, parameter in optimizer.parameters.items() if parameter.grad is not None}
        if not learning:
            return 0.0
        size = update_bytes(4 * self.facts.numel(learning), sum(optimizer_bytes(self.config, self.facts, name) for name in learning))
        seconds = []
        for _ in range(_WARM_UPS + _FEWEST_REPEATS):
            self.context.barrier()
            started = self._now()
            norms = torch._foreach_norm([parameter.grad for parameter in learning.values() if parameter.grad is not None])
            torch.stack([norm.double() for norm in norms]).square().sum().item()
            optimizer.step(0.0, 0.5)
            seconds.append(self._now() - started)
        return size / statistics.median(seconds[_WARM_UPS:])

    def _transfer(self, costs: ModelCosts) -> float:
        """Hidden states of one microbatch to the next pipeline rank; every boundary in turn."""
        context, took = self.context, 0.0
        hidden = torch.zeros((self.rows, self.tokens, self.facts.hidden_size), dtype=TORCH_DTYPES[self.config.precision], device=context.device)
        for boundary in range(context.pipeline_ranks - 1):
            seconds = []
            for _ in range(_WARM_UPS + _FEWEST_REPEATS):
                context.barrier()
                started = self._now()
                if context.pipeline_rank == boundary:
                    peer = context.global_rank(boundary + 1, context.replica)
                    dist.send(hidden, peer, group=context.pipeline_group)
                    dist.recv(hidden, peer, group=context.pipeline_group)
                elif context.pipeline_rank == boundary + 1:
                    peer = context.global_rank(boundary, context.replica)
                    dist.recv(hidden, peer, group=context.pipeline_group)
                    dist.send(hidden, peer, group=context.pipeline_group)
                seconds.append((self._now() - started) / 2)
            if context.pipeline_rank == boundary:
                took = statistics.median(seconds[_WARM_UPS:])
        return took

    def _batch(self) -> tuple[dict[str, Tensor], Tensor]:
        """Rows of ``data.max_length`` tokens; of several one is shorter, and packed ones hold two each, so that the model makes its masks."""
        device, rows, tokens = self.context.device, self.rows, self.tokens
        vocabulary = self.forecast.hf_config.get_text_config().vocab_size
        input_ids = torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))
        if self.config.data.packing:
            told_by = {"position_ids": (torch.arange(tokens) % math.ceil(tokens / 2)).expand(rows, -1)}
        else:
            told_by = {"attention_mask": torch.ones_like(input_ids)}
            told_by["attention_mask"][1:, -1] = 0
        if self.config.model.task == "causal_lm":
            labels = input_ids
        else:
            labels = torch.zeros(rows, dtype=torch.float32 if self.forecast.num_labels == 1 else torch.int64)
        return {name: tensor.to(device) for name, tensor in {"input_ids": input_ids, **told_by}.items()}, labels.to(device)

    def _hidden(self, span: StageSpan) -> Tensor:
        """What enters a stage; it asks for a gradient where something before the stage learns."""
        shape = (self.rows, self.tokens, self.facts.hidden_size)
        hidden = torch.randn(shape, dtype=TORCH_DTYPES[self.config.precision], device=self.context.device)
        before = StageSpan(0, span.start, True, False).parameter_names(self.facts)
        return hidden.requires_grad_(any(self.facts.canonical_name(name) in self.learning for name in before))

    def _now(self) -> float:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        return time.perf_counter()
