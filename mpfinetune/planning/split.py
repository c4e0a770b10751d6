"""The one solver for cuts: of all contiguous splits of a sequence over unequal parts, the best, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

# (part, start, stop) -> cost of giving the items start..stop-1 to the part; infinite where they do not fit there.
PartCost = Callable[[int, int, int], float]
_SEARCHED_PARTS = 4  # 80 blocks over 4 cards take half a second, over 6 ten


def best_split(count: int, parts: int, cost: PartCost, rounds: int | None = None) -> list[int] | None:
    """Cut ``count`` items into ``parts`` non-empty consecutive parts.

    Without ``rounds`` the largest cost of a part is made as small as possible. With ``rounds``, the largest ``earlier + rounds * own`` of a
    part, where ``earlier`` is the sum of the costs before it: no pipeline in which that many microbatches pass the parts forth and back is
    faster, since a part waits for the first one to come through the earlier parts, is busy with all, and the last one has to go back.

    Exact, by dynamic programming over (part, first item) in O(parts * items^2). Among equally good splits the first parts are the largest.
    (fairscale's ``blockpartition.solve`` is a bound, not an optimum: it cuts [3, 1, 1, 5] into [3, 1] and [1, 5], where [3, 1, 1] and [5] is best.)

    Returns:
        The number of items of each part, or None where no split has a finite cost.
    """
    return _sizes(*_tables(count, parts, cost, rounds))


def fastest_split(
    count: int, parts: int, cost: PartCost, rounds: int, step_seconds: Callable[[Sequence[int]], float]
) -> tuple[list[int], float] | None:
    """The split with the smallest ``step_seconds(sizes)`` of all with finite costs; it never beats ``best_split``'s bound.

    Branch and bound: parts are filled from the first, and a beginning is given up when the bound of its best end is no better than the
    fastest split found so far. Those tried first are the one with the best bound, which few others come near, and the most even one.

    With more than four parts the beginnings are too many; then it is the faster of those two, each the exact optimum of its objective.

    Returns:
        Its sizes and seconds, or None where no split has a finite cost.
    """
    best, cut = _tables(count, parts, cost, rounds)
    first = _sizes(best, cut)
    if first is None:
        return None
    even = best_split(count, parts, cost)
    assert even is not None
    seconds, found = min((step_seconds(sizes), sizes) for sizes in (first, even))

    def extend(sizes: list[int], start: int, earlier: float, bound: float) -> None:
        nonlocal found, seconds
        part = len(sizes)
        if part == parts:
            took = step_seconds(sizes)
            if took < seconds:
                found, seconds = list(sizes), took
            return
        ends = []
        for stop in range(start + 1, count - (parts - part - 1) + 1):
            own = cost(part, start, stop)
            reached = max(bound, earlier + rounds * own)
            ends.append((max(reached, earlier + own + best[part + 1][stop]), stop, own, reached))
        for least, stop, own, reached in sorted(ends):
            if least >= seconds:
                break
            extend([*sizes, stop - start], stop, earlier + own, reached)

    if parts <= _SEARCHED_PARTS:
        extend([], 0, 0.0, 0.0)
    return found, seconds


def _sizes(best: list[list[float]], cut: list[list[int]]) -> list[int] | None:
    """The number of items of each part, read from ``_tables``; None where no split has a finite cost (more parts than items, too)."""
    if math.isinf(best[0][0]):
        return None
    sizes, start = [], 0
    for stops in cut:
        sizes.append(stops[start] - start)
        start = stops[start]
    return sizes


def _tables(count: int, parts: int, cost: PartCost, rounds: int | None) -> tuple[list[list[float]], list[list[int]]]:
    """best[part][start]: the objective for the items start.. in the parts from ``part`` on; cut[part][start]: where that part ends."""
    times, passed = (1, 0) if rounds is None else (rounds, 1)
    best = [[math.inf] * (count + 1) for _ in range(parts + 1)]
    cut = [[0] * (count + 1) for _ in range(parts)]
    best[parts][count] = 0.0
    # Filled from the end, and from the longest part, so that ties prefer long first parts.
    for part in range(parts - 1, -1, -1):
        later = parts - 1 - part
        for start in range(count - later - 1, part - 1, -1):
            for stop in range(count - later, start, -1):
                own = cost(part, start, stop)
                value = max(times * own, passed * own + best[part + 1][stop]) if math.isfinite(own) else math.inf
                if value < best[part][start]:
                    best[part][start], cut[part][start] = value, stop
    return best, cut
