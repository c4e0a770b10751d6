"""The predicted step: what the costs, the ranks' times and the schedule give together; for a split that is looked for, and for a whole plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.schedule import Action, stages_of_rank
from mpfinetune.planning.simulate import Event, timeline_rows
from mpfinetune.planning.tensor_bytes import TYPE_BYTES
from mpfinetune.planning.timing import RankTimes, Source, StageClock, simulate_step

if TYPE_CHECKING:
    from mpfinetune.planning.plan import Plan

# (schedule, pipeline ranks, stages a rank, microbatches) -> each rank's actions in order.
Orders = Callable[[str, int, int, int], Mapping[int, Sequence[Action]]]
# (rows of a microbatch, pipeline ranks, replicas) -> the times of each rank, its slowest replica's.
TimesOf = Callable[[int, int, int], Sequence[RankTimes]]


@dataclass(frozen=True)
class StepPrediction:
    """One update as it is expected, all seconds of the longest rows (``data.max_length``)."""

    step_seconds: float
    schedule_seconds: float  # the forward and backward passes
    update_seconds: tuple[float, ...]  # by rank: norm, optimizer, sums over replicas
    idle_shares: tuple[float, ...]  # by rank, of the whole step
    bubble: float
    tokens_per_second: float
    source: Source
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Knowledge:
    """What a plan asks where a split by time, or a prediction, is wanted. Each is found when it is asked for."""

    times_of: TimesOf
    orders: Orders
    # (plan, rank, device of the rank) -> bytes that the card must have; only that rank's row of the plan need be right.
    needed_bytes: Callable[[Plan, int, int], int]
    # a number for each block, equal for those that are built alike and cost the same
    block_kinds: Callable[[], Sequence[int]]
    tokens_per_row: int


@dataclass(frozen=True)
class Layout:
    """What the simulation needs of a plan that is not complete yet."""

    schedule: str  # as for the orders; "1f1b" with one rank for a strategy that holds the whole model
    ranks: int
    stages_per_rank: int
    microbatches: int
    recomputed: frozenset[int]

    @property
    def num_stages(self) -> int:
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        owners = {own: rank for rank in range(self.ranks) for own in stages_of_rank(self.schedule, rank, self.ranks, self.stages_per_rank)}
        return owners[stage]


class Stopwatch:
    """The time of stages and of steps in one layout."""

    def __init__(self, layout: Layout, times: Sequence[RankTimes], orders: Mapping[int, Sequence[Action]]) -> None:
        self.layout = layout
        self._times, self._orders = times, orders
        self._clock = StageClock(times, layout.recomputed)
        self._rank_of = [layout.rank_of(stage) for stage in range(layout.num_stages)]

    def stage_seconds(self, stage: int, span: StageSpan) -> float:
        """Forward and backward pass of one microbatch through a stage on its rank."""
        return self._clock.of(self._rank_of[stage], span).total

    def step_seconds(self, spans: Sequence[StageSpan]) -> float:
        """All forward and backward passes of an update."""
        return simulate_step(self._orders, spans, self._times, self._clock).seconds

    def predict(self, plan: Plan, tokens_per_row: int) -> StepPrediction | None:
        """The step of a plan; None where the ranks' times are in no unit."""
        if any(times.source == "relative" for times in self._times):
            return None
        timeline = simulate_step(self._orders, plan.spans, self._times, self._clock)
        updates = tuple(update_seconds(plan, rank, self._times[min(rank, len(self._times) - 1)]) for rank in range(len(plan.ranks)))
        total = timeline.seconds + max(updates)
        idle = tuple(1 - (busy + updates[min(rank, len(updates) - 1)]) / total for rank, busy in enumerate(timeline.busy_seconds))
        return StepPrediction(
            step_seconds=total,
            schedule_seconds=timeline.seconds,
            update_seconds=updates,
            idle_shares=idle,
            bubble=timeline.bubble,
            tokens_per_second=plan.global_size * tokens_per_row / total,
            source=self._times[0].source,
            events=timeline.events,
        )


def update_bytes(gradients: int, optimizer: int) -> int:
    """What an update goes through: gradients for the norm and for the update, weights read and written (as many bytes), states likewise."""
    return 4 * gradients + 2 * optimizer


def update_seconds(plan: Plan, rank: int, times: RankTimes) -> float:
    """Norm, clipping, optimizer, and all that replicas and engines exchange in a step, on one rank.

    Over replicas a sum crosses a ring's links twice, half of it to every rank its part and half to gather (Patarasu and Yuan,
    https://doi.org/10.1016/j.jpdc.2008.09.002). ZeRO-2 gives every rank its part after each microbatch; ZeRO-3 gathers the weights for each
    forward and each backward pass besides (Rajbhandari et al., https://arxiv.org/abs/1910.02054, section 7).
    """
    row, link = plan.ranks[rank], times.host_bytes_per_second
    seconds = update_bytes(row.gradient_bytes, row.optimizer_bytes) / times.update_bytes_per_second
    if plan.offload_optimizer != "none":
        seconds += 2 * row.offloaded_bytes / link
    if row.leaving_gradient_bytes:  # every microbatch's in the weights' type; the last one's is counted above
        seconds += (plan.microbatches - 1) * row.leaving_gradient_bytes * TYPE_BYTES[plan.precision] / 4 / link
    ring = (plan.replicas - 1) / plan.replicas
    if plan.zero_stage >= 2:
        seconds += plan.microbatches * ring * (row.gradient_bytes + row.leaving_gradient_bytes) * plan.replicas / link
    else:
        seconds += 2 * ring * row.gradient_bytes / link
    if plan.zero_stage == 3:
        seconds += 2 * plan.microbatches * ring * row.weight_bytes * plan.replicas / link
    if plan.offload_parameters != "none":
        seconds += 2 * plan.microbatches * row.offloaded_bytes / link
    return seconds


def prediction_lines(prediction: StepPrediction) -> list[str]:
    """For people: the step, each rank's idle share, and the time line."""
    idle = ", ".join(f"rank {rank} {share:.0%}" for rank, share in enumerate(prediction.idle_shares))
    source = "times measured by --calibrate" if prediction.source == "measured" else "the cards' figures, of which a part is reached"
    return [
        f"predicted step, all rows at full length, from {source}: {_seconds(prediction.step_seconds)} = "
        f"{_seconds(prediction.schedule_seconds)} forward and backward + {_seconds(max(prediction.update_seconds))} update; "
        f"{prediction.tokens_per_second:,.0f} tokens/s; idle: {idle}",
        "time line (0-9: forward of a microbatch, a-z: backward, a is microbatch 0; dots: idle)",
        *(f"  rank {rank} |{line}|" for rank, line in enumerate(timeline_rows(prediction.events))),
    ]


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
