"""How long the parts of a model, a step's transfers and its update take on each rank: by the roofline of the cards' figures, or as measured.

Both give the same thing, a ``RankTimes`` for each rank, from which the rest follows: a stage's seconds, the simulated step, its update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from mpfinetune.models.costs import ModelCosts
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.hardware import PlanCard
from mpfinetune.planning.schedule import Action
from mpfinetune.planning.simulate import StageSeconds, Timeline, simulate

# Shares of the vendor's peak figures that large matrix products and large copies reach; assumptions, which --calibrate replaces.
REACHED_FLOPS, REACHED_BANDWIDTH, REACHED_PCIE = 0.65, 0.8, 0.8
_LATENCY_SECONDS = 20e-6  # of one message between two cards
HOST_BYTES_PER_SECOND = 20e9  # of an update in host memory: dual-channel DDR4-3200 has 51 GB/s, of which CPUAdam reaches some 40 %


Source = Literal["measured", "cards' figures", "relative"]  # relative: in no unit, see ``relative_times``


@dataclass(frozen=True)
class PartSeconds:
    """One microbatch through one part, without recompute."""

    forward: float
    backward: float


@dataclass(frozen=True)
class RankTimes:
    """How fast one rank is with a microbatch of ``rows``."""

    rows: int
    parts: tuple[PartSeconds, ...]  # prologue, blocks, epilogue with the loss
    transfer_seconds: float  # hidden states of one microbatch to the next rank, or their gradient back
    update_bytes_per_second: float  # gradients and optimizer states gone through in an update
    host_bytes_per_second: float  # the same of what is offloaded
    stage_seconds: float = 0.0  # of each pass through a stage whatever is on it: masks, rotary tables, stubs
    source: Source = "cards' figures"

    def for_rows(self, rows: int) -> RankTimes:
        """The same rank with another microbatch: seconds grow with its rows."""
        if rows == self.rows:
            return self
        factor = rows / self.rows
        parts = tuple(PartSeconds(part.forward * factor, part.backward * factor) for part in self.parts)
        return replace(self, rows=rows, parts=parts, transfer_seconds=self.transfer_seconds * factor)

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> RankTimes:
        return RankTimes(**{**content, "parts": tuple(PartSeconds(**part) for part in content["parts"])})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def roofline(costs: ModelCosts, card: PlanCard, next_card: PlanCard | None, precision: str) -> RankTimes | None:
    """Seconds from operations and bytes (Williams et al., https://doi.org/10.1145/1498765.1498785); None where the card's rates are not known.

    Within a part the matrix products wait for arithmetic and the rest for memory, one after the other, so the two times add up. Cards exchange
    over PCIe, by way of the host where their driver has no direct path, as that of the GeForce cards.
    """
    rate = card.flops_per_second(precision)
    if card.spec is None or rate is None:
        return None
    flops, bandwidth = rate * REACHED_FLOPS, card.spec.bandwidth_gb_s * 1e9 * REACHED_BANDWIDTH
    parts = tuple(
        PartSeconds(
            part.forward_flops / flops + part.forward_moved_bytes / bandwidth,
            part.backward_flops / flops + part.backward_moved_bytes / bandwidth,
        )
        for part in costs.parts
    )
    neighbour = next_card.spec.pcie_gb_s if next_card is not None and next_card.spec is not None else card.spec.pcie_gb_s
    link = min(card.spec.pcie_gb_s, neighbour) * 1e9 * REACHED_PCIE
    boundary = costs.parts[0].boundary_bytes
    return RankTimes(costs.rows, parts, _LATENCY_SECONDS + boundary / link, bandwidth, min(link, HOST_BYTES_PER_SECOND))


def slowest(replicas: Sequence[RankTimes]) -> RankTimes:
    """The times of a pipeline rank: an update waits for the slowest of its replicas, and what they exchange for the slowest link."""
    longest = max(replicas, key=lambda times: sum(part.forward + part.backward for part in times.parts) + len(times.parts) * times.stage_seconds)
    return replace(
        longest,
        transfer_seconds=max(times.transfer_seconds for times in replicas),
        update_bytes_per_second=min(times.update_bytes_per_second for times in replicas),
        host_bytes_per_second=min(times.host_bytes_per_second for times in replicas),
    )


def relative_times(costs: ModelCosts) -> RankTimes:
    """Where no rate is known (an uncalibrated CPU): proportional to the operations, so that ranks can be balanced, but in no unit."""
    parts = tuple(PartSeconds(float(part.forward_flops), float(part.backward_flops)) for part in costs.parts)
    return RankTimes(costs.rows, parts, 0.0, 1.0, 1.0, source="relative")


class StageClock:
    """Seconds of any stage on any rank, in constant time; the stages of a split are asked for many times.

    Args:
        times: by pipeline rank.
        recomputed: the blocks that run their forward pass again in the backward pass.
    """

    def __init__(self, times: Sequence[RankTimes], recomputed: frozenset[int]) -> None:
        self._times = times
        self._forward = [[0.0, *accumulate(part.forward for part in rank.parts[1:-1])] for rank in times]
        backward = [[part.backward + (part.forward if index in recomputed else 0.0) for index, part in enumerate(rank.parts[1:-1])] for rank in times]
        again = [[part.forward if index in recomputed else 0.0 for index, part in enumerate(rank.parts[1:-1])] for rank in times]
        self._backward = [[0.0, *accumulate(values)] for values in backward]
        self._again = [[0.0, *accumulate(values)] for values in again]

    def of(self, rank: int, span: StageSpan) -> StageSeconds:
        """A stage on a rank. A split backward pass recomputes in both of its halves, each of which takes half of the rest."""
        times = self._times[rank]
        ends = [times.parts[0]] * span.has_prologue + [times.parts[-1]] * span.has_epilogue
        forward = self._forward[rank][span.stop] - self._forward[rank][span.start] + sum(part.forward for part in ends) + times.stage_seconds
        backward = self._backward[rank][span.stop] - self._backward[rank][span.start] + sum(part.backward for part in ends)
        again = self._again[rank][span.stop] - self._again[rank][span.start]
        half = (backward - again) / 2 + again
        return StageSeconds(forward, backward, half, half)


def simulate_step(orders: Mapping[int, Sequence[Action]], spans: Sequence[StageSpan], times: Sequence[RankTimes], clock: StageClock) -> Timeline:
    """The forward and backward passes of one update over the stages ``spans``, in the orders of the ranks."""
    rank_of = {stage: rank for rank, order in orders.items() for stage, _, _ in order}
    stages = [clock.of(rank_of[stage], span) for stage, span in enumerate(spans)]
    # A boundary between two ranks is as slow as the slower of their links.
    crossing = [max(times[rank_of[stage]].transfer_seconds, times[rank_of[stage + 1]].transfer_seconds) for stage in range(len(spans) - 1)]
    return simulate(orders, stages, crossing)
