"""What the microbatches in flight hold and need at each moment of a step, from the parts' measured costs and a rank's order of actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpfinetune.models.costs import ModelCosts
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.schedule import Action


@dataclass(frozen=True)
class PartMoment:
    """One part of a stage. Peaks are above what other microbatches hold, all that this one holds included."""

    kept_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    evaluation_peak_bytes: int
    gradient_bytes: int  # fp32 sums that exist once the part's first backward pass is over


@dataclass(frozen=True)
class StageCost:
    """A stage for one microbatch. ``kept_bytes`` is what it holds from its forward to its backward pass, receive buffers left out."""

    parts: tuple[PartMoment, ...]
    kept_bytes: int
    saved_bytes: int  # what autograd keeps: without the stage's output and what recompute holds besides, but with a received input

    @property
    def evaluation_peak_bytes(self) -> int:
        return max((part.evaluation_peak_bytes for part in self.parts), default=0)


@dataclass(frozen=True)
class StepPeak:
    """The fullest moment of a rank's step, without weights and optimizer states."""

    activation_bytes: int = 0
    workspace_bytes: int = 0
    gradient_bytes: int = 0
    most_kept_bytes: int = 0  # the most that is held for the backward pass at any moment, which may be another one
    most_saved_bytes: int = 0  # of it, what autograd itself keeps
    in_flight: tuple[tuple[int, int], ...] = ()  # (stage, most microbatches held at once)

    @property
    def total_bytes(self) -> int:
        return self.activation_bytes + self.workspace_bytes + self.gradient_bytes


def stage_cost(
    costs: ModelCosts, span: StageSpan, recomputed: frozenset[int], offloaded: bool, gradients: Mapping[str, int], held_gradient_bytes: int = 0
) -> StageCost:
    """Put the parts of a stage one after the other.

    Args:
        recomputed: the blocks that keep only their input, on the CPU where ``offloaded``.
        gradients: bytes of the gradients' sums by part (``prologue``, ``block 3``, ``epilogue``); a missing one has none.
        held_gradient_bytes: of the head's gradient of a matrix tied to the embedding, which waits for the embedding's own.
    """
    first = 0 if span.has_prologue else span.start + 1
    last = len(costs.parts) - 1 if span.has_epilogue else span.stop
    own = range(span.start, span.stop)
    # A recomputed block is given its side inputs again, so they are held; else only what its operations keep.
    side_saved = costs.side_saved_bytes if any(block not in recomputed for block in own) or not costs.blocks else 0
    side_kept = costs.side_input_bytes if any(block in recomputed for block in own) else side_saved
    moments, base, received_bytes = [], side_kept, 0
    for index in range(first, last + 1):
        part = costs.parts[index]
        entering = costs.parts[index - 1].boundary_bytes if index else 0
        received = index == first and index > 0  # in the pipeline's buffer, counted there
        again = 0 < index < len(costs.parts) - 1 and index - 1 in recomputed
        keeps_input = entering if again and not offloaded else 0 if again else part.input_bytes
        input_bytes = 0 if received else keeps_input
        received_bytes += keeps_input if received else 0
        alive = 0 if received else entering
        forward = part.evaluation_peak_bytes if again else part.forward_peak_bytes
        backward = part.backward_peak_bytes
        if again:
            backward = max(part.forward_peak_bytes + part.boundary_bytes, backward) + (entering if offloaded else 0)
        waiting = held_gradient_bytes if index < len(costs.parts) - 1 else 0
        moments.append(
            PartMoment(
                kept_bytes=input_bytes + (0 if again else part.saved_bytes),
                forward_peak_bytes=base - side_kept + costs.side_input_bytes + alive + forward,
                backward_peak_bytes=base + input_bytes + backward + waiting if part.backward_peak_bytes else 0,
                evaluation_peak_bytes=costs.side_input_bytes + alive + part.evaluation_peak_bytes,
                gradient_bytes=gradients.get(part.name, 0),
            )
        )
        base += moments[-1].kept_bytes
    leaving = 0 if span.has_epilogue else costs.parts[last].boundary_bytes
    saved = base - side_kept + side_saved + received_bytes
    return StageCost(tuple(moments), base + leaving, saved)


def step_peak(order: Sequence[Action], stages: Mapping[int, StageCost]) -> StepPeak:
    """Walk through a rank's actions; the gradients' sums come into being in each stage's first backward pass."""
    best, most, most_saved = StepPeak(), 0, 0
    held_bytes, saved_bytes, present_bytes = 0, 0, 0
    held: dict[int, int] = dict.fromkeys(stages, 0)
    in_flight = dict(held)
    with_gradients: set[int] = set()
    for stage, kind, _ in order:
        cost = stages[stage]
        if kind == "F":
            for part in cost.parts:
                best = _larger(best, held_bytes, part.forward_peak_bytes, present_bytes)
            held_bytes, saved_bytes, held[stage] = held_bytes + cost.kept_bytes, saved_bytes + cost.saved_bytes, held[stage] + 1
            most, most_saved, in_flight[stage] = max(most, held_bytes), max(most_saved, saved_bytes), max(in_flight[stage], held[stage])
            continue
        others = held_bytes - cost.kept_bytes
        for part in reversed(cost.parts):
            best = _larger(best, others, part.backward_peak_bytes, present_bytes)
            if stage not in with_gradients and kind != "I":
                present_bytes += part.gradient_bytes
        if kind != "I":  # the split backward pass keeps all until the weights' half is over
            with_gradients.add(stage)
            held_bytes, saved_bytes, held[stage] = others, saved_bytes - cost.saved_bytes, held[stage] - 1
    return replace(best, most_kept_bytes=most, most_saved_bytes=most_saved, in_flight=tuple(in_flight.items()))


def _larger(best: StepPeak, others: int, own: int, gradients: int) -> StepPeak:
    return StepPeak(others, own, gradients) if others + own + gradients > best.total_bytes else best
