"""Memory after each update, and whether it grows without end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import psutil
import torch

from mpfinetune.config import WatchConfig
from mpfinetune.dist import DistContext

KINDS = ("allocated", "reserved", "host")
_PARTS = 5


@dataclass(frozen=True)
class Leak:
    """Steady growth: of which rank's memory, of which kind, after which update it began, and how fast it is."""

    rank: int
    kind: str
    began: int
    bytes_per_update: float

    def __str__(self) -> str:
        what = {"allocated": "memory in use on the card", "reserved": "memory held by the card's allocator", "host": "host memory of the process"}
        return (
            f"rank {self.rank}: the {what[self.kind]} has grown steadily since update {self.began}, by {self.bytes_per_update / 2**20:.2f} MiB an "
            "update. Something keeps what an update has made (a list of tensors or losses, a cache); a longer run will end out of memory."
        )


class Growth:
    """Tells a steady growth from noise, from a single jump and from settling.

    The last ``steps`` values are cut into five parts. Growth is steady where the smallest value rises from each part to the next, nowhere by
    less than half of the mean rise, and by more than ``floor_bytes`` in all. Noise does not move the smallest values far, a jump moves one
    of them only, and what settles rises less and less.
    """

    def __init__(self, steps: int, floor_bytes: float) -> None:
        assert steps >= _PARTS
        self.floor_bytes = floor_bytes
        self.values: deque[tuple[int, float]] = deque(maxlen=steps)

    def note(self, step: int, value: float) -> tuple[int, float] | None:
        """Add the value after an update; (the update after which the growth began, bytes per update) once it is steady."""
        self.values.append((step, value))
        count = len(self.values)
        if count < (self.values.maxlen or 0):
            return None
        seen = list(self.values)
        bounds = [count * part // _PARTS for part in range(_PARTS + 1)]
        # Of equal values the last: growth that sets in within the first part begins after it.
        lowest = [min(seen[start:stop], key=lambda pair: (pair[1], -pair[0])) for start, stop in pairwise(bounds)]
        rises = [after[1] - before[1] for before, after in pairwise(lowest)]
        total = sum(rises)
        if total <= self.floor_bytes or min(rises) < total / len(rises) / 2:
            return None
        (first_step, first), (last_step, last) = lowest[0], lowest[-1]
        return first_step, (last - first) / (last_step - first_step)


class LeakWatch:
    """Watches every kind of memory of every rank; reports each at most once."""

    def __init__(self, config: WatchConfig, world_size: int) -> None:
        self.config = config
        self.growth: dict[tuple[str, int], Growth] = {}
        if config.leak_steps:
            self.growth = {(kind, rank): Growth(config.leak_steps, config.leak_mib * 2**20) for kind in KINDS for rank in range(world_size)}

    def note(self, step: int, memory: Mapping[str, Sequence[int]]) -> list[Leak]:
        """Add the bytes after an update, {kind: one number per rank}; returns what is steadily growing and was not reported before."""
        found = []
        for (kind, rank), growth in list(self.growth.items()):
            seen = growth.note(step, memory[kind][rank])
            if seen is not None:
                del self.growth[kind, rank]
                found.append(Leak(rank, kind, *seen))
        return found


def memory_of_ranks(context: DistContext, peak_bytes: int) -> tuple[list[int], dict[str, list[int]]]:
    """Bytes of every rank, on every rank: the peaks as given, and of each kind what is held now (on the CPU torch counts none of its own: 0)."""
    device = context.device
    on_card = device.type == "cuda"
    own = {
        "allocated": torch.cuda.memory_allocated(device) if on_card else 0,
        "reserved": torch.cuda.memory_reserved(device) if on_card else 0,
        "host": psutil.Process().memory_info().rss,
    }
    table = torch.zeros(1 + len(own), context.world_size, dtype=torch.float64)
    table[:, context.rank] = torch.tensor([peak_bytes, *own.values()], dtype=torch.float64)
    peaks, *held = context.sum_over_world(table.to(device)).long().tolist()
    return peaks, dict(zip(own, held, strict=True))
