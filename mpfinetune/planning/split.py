"""The one solver for cuts: of all contiguous splits of a sequence over unequal parts, the best, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

# (part, start, stop) -> cost of giving the items start..stop-1 to the part; infinite where they do not fit there.
PartCost = Callable[[int, int, int], float]
# Largest cost of a part, sum of the costs, first item of the next part.
_Entry = tuple[float, float, int]


def best_split(count: int, parts: int, cost: PartCost, rounds: int | None = None) -> list[int] | None:
    """Cut ``count`` items into ``parts`` non-empty consecutive parts.

    Without ``rounds`` the largest cost of a part is made as small as possible. With ``rounds`` the objective is ``sum + (rounds - 1) * max``:
    the time of a pipeline in which ``rounds`` microbatches pass the parts one after another, each part busy ``cost`` seconds with each: the
    first fills it, then one leaves whenever the slowest part is done (Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2). With
    equal cards the sum is the same for every cut and the two objectives agree; a faster card makes the sum smaller, too.

    Exact, by dynamic programming over (part, first item). For the sum the table keeps every pair (max, sum) that no other pair beats in both:
    an optimal split has an optimal rest for its own maximum, so the pairs are enough. Among equally good splits the first parts are the largest.
    (fairscale's ``blockpartition.solve`` is a bound, not an optimum: it cuts [3, 1, 1, 5] into [3, 1] and [1, 5], where [3, 1, 1] and [5] is best.)

    Returns:
        The number of items of each part, or None where no split has a finite cost.
    """
    # front[start]: the pairs for the items start.. in the parts from the present one on; filled from the last part to the first.
    front: list[list[_Entry]] = [[] for _ in range(count)] + [[(0.0, 0.0, count)]]
    tables = []
    for part in range(parts - 1, -1, -1):
        rest = parts - 1 - part
        row: list[list[_Entry]] = [[] for _ in range(count + 1)]
        for start in range(part, count - rest):
            found: list[_Entry] = []
            # Longest first, so that ties prefer it.
            for stop in range(count - rest, start, -1):
                own = cost(part, start, stop)
                if math.isfinite(own):
                    found += [(max(own, largest), own + total if rounds is not None else 0.0, stop) for largest, total, _ in front[stop]]
            row[start] = _not_beaten(found)
        tables.append(row)
        front = row
    if parts > count or not front[0]:
        return None
    return _read_back(tables[::-1], rounds)


def _not_beaten(entries: list[_Entry]) -> list[_Entry]:
    """Of the entries those that no other beats in maximum and sum; of equal ones the first."""
    kept: list[_Entry] = []
    for entry in sorted(entries, key=lambda entry: entry[:2]):  # a stable sort: equal ones stay in their order
        if not kept or entry[1] < kept[-1][1]:
            kept.append(entry)
    return kept


def _read_back(tables: list[list[list[_Entry]]], rounds: int | None) -> list[int]:
    weight = 1 if rounds is None else rounds - 1
    largest, _, stop = min(tables[0][0], key=lambda entry: weight * entry[0] + entry[1])
    sizes, start = [stop], stop
    for row in tables[1:]:
        # Any rest within the bound is as good for the maximum, so the one with the smallest sum.
        _, _, stop = min((entry for entry in row[start] if entry[0] <= largest), key=lambda entry: entry[1])
        sizes.append(stop - start)
        start = stop
    return sizes
