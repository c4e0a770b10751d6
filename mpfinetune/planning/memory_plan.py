"""The predicted bytes of a plan, as data and in words."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30
# Of a checkpoint that are on their way at a time, while it is written or read; one tensor may be larger.
CHECKPOINT_BYTES_AT_ONCE = 256 * MIB


@dataclass(frozen=True)
class PhaseMemory:
    """Most bytes on one card during one phase of a run: load, first step, step, update, evaluation, save."""

    name: str
    weight_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0  # states and fp32 masters
    activation_bytes: int = 0  # kept for the backward pass, over all microbatches in flight
    workspace_bytes: int = 0  # of the operations, with logits, loss, recompute and the engine's buffers
    buffer_bytes: int = 0  # hidden states and gradients received from other ranks

    @property
    def total_bytes(self) -> int:
        held = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        return held + self.activation_bytes + self.workspace_bytes + self.buffer_bytes


@dataclass(frozen=True)
class CardMemory:
    """One card of one rank; ``device`` numbers the devices of a process that has several."""

    rank: int
    device: int
    phases: tuple[PhaseMemory, ...]
    in_flight: tuple[tuple[int, int], ...] = ()  # (stage, most microbatches whose activations are held at once)
    saved_bytes: int = 0  # most that autograd keeps at once; activations have besides what leaves a stage and what recompute is given again
    context_bytes: int = 0  # the driver's and the libraries' own
    fragmentation_bytes: int = 0  # allowance for what the allocator cannot reuse
    card_bytes: int | None = None  # the card's memory; None: not known

    @property
    def peak(self) -> PhaseMemory:
        """The fullest phase; its total is what ``torch.cuda.max_memory_allocated`` would show."""
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def needed_bytes(self) -> int:
        """What the card must have for the run."""
        return self.peak.total_bytes + self.context_bytes + self.fragmentation_bytes

    @property
    def fits(self) -> bool | None:
        """None: the card's memory is not known."""
        return None if self.card_bytes is None else self.needed_bytes <= self.card_bytes

    def phase(self, name: str) -> PhaseMemory:
        return next(phase for phase in self.phases if phase.name == name)


@dataclass(frozen=True)
class MemoryPlan:
    """Every card of one replica, and the host that holds most."""

    cards: tuple[CardMemory, ...]
    host_pinned_bytes: tuple[int, ...]  # by rank
    host_pageable_bytes: tuple[int, ...]  # by rank; on the CPU without the "card" itself
    fullest_host_bytes: int  # of all processes on one host; on the CPU with their "cards"
    host_total_bytes: int | None = None  # this host's memory; None: not known
    activations_known: bool = True

    @property
    def host_fits(self) -> bool | None:
        return None if self.host_total_bytes is None else self.fullest_host_bytes <= self.host_total_bytes


MEMORY_COLUMNS = (
    "rank",
    "fullest in",
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "in flight",
    "workspace",
    "buffers",
    "peak",
    "needs",
    "has",
)


def memory_unit(memory: MemoryPlan) -> tuple[str, float]:
    """The unit in which the largest card is easy to read."""
    return ("GiB", GIB) if max(card.needed_bytes for card in memory.cards) >= 10 * GIB else ("MiB", MIB)


def memory_rows(memory: MemoryPlan) -> list[tuple[str, ...]]:
    """One row per card, in ``memory_unit``."""
    unit, size = memory_unit(memory)
    several = len({card.device for card in memory.cards}) > 1
    digits = 2 if unit == "GiB" else 1

    def words(count: int) -> str:
        return f"{count / size:,.{digits}f}"

    rows = []
    for card in memory.cards:
        peak = card.peak
        parts = (peak.weight_bytes, peak.gradient_bytes, peak.optimizer_bytes, peak.activation_bytes)
        flight = "+".join(str(count) for _, count in card.in_flight) or "-"
        has = "?" if card.card_bytes is None else words(card.card_bytes) + ("" if card.fits else " TOO SMALL")
        rest = (peak.workspace_bytes, peak.buffer_bytes, peak.total_bytes, card.needed_bytes)
        name = f"{card.rank}, device {card.device}" if several else str(card.rank)
        rows.append((name, peak.name, *map(words, parts), flight, *map(words, rest), has))
    return rows


def host_line(memory: MemoryPlan) -> str:
    """The host's part of the prediction."""
    pinned, pageable = sum(memory.host_pinned_bytes), sum(memory.host_pageable_bytes)
    total = "" if memory.host_total_bytes is None else f" of {memory.host_total_bytes / GIB:.1f} GiB here"
    return (
        f"host memory: {memory.fullest_host_bytes / GIB:.1f} GiB for the processes of one host{total} "
        f"({pageable / GIB:.1f} GiB pageable and {pinned / GIB:.1f} GiB pinned over one replica's ranks)"
    )
