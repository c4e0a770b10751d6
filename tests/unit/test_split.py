"""The solver against every possible cut: random costs, unequal parts, budgets that forbid, and both objectives."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest
from fairscale.nn.pipe.balance import blockpartition
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfinetune.planning.split import PartCost, best_split


def all_splits(count: int, parts: int) -> list[list[int]]:
    return [[b - a for a, b in pairwise((0, *inner, count))] for inner in combinations(range(1, count), parts - 1)]


def objective(sizes: list[int], cost: PartCost, rounds: int | None) -> float:
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    costs = [cost(part, start, start + size) for part, (start, size) in enumerate(zip(starts, sizes, strict=True))]
    return max(costs) if rounds is None or math.isinf(max(costs)) else sum(costs) + (rounds - 1) * max(costs)


def check_against_all(count: int, parts: int, cost: PartCost, rounds: int | None) -> None:
    best = min((objective(sizes, cost, rounds) for sizes in all_splits(count, parts)), default=math.inf)
    found = best_split(count, parts, cost, rounds)
    if found is None:
        assert math.isinf(best)
        return
    assert len(found) == parts and sum(found) == count and min(found) >= 1
    assert objective(found, cost, rounds) == pytest.approx(best, rel=1e-12)


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Seconds and bytes of each item, and of each part its slowness, its budget and how many microbatches it keeps."""
    count, parts = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    items = st.lists(st.integers(0, 30), min_size=count, max_size=count)
    of_parts = [st.lists(st.integers(low, high), min_size=parts, max_size=parts) for low, high in ((1, 5), (5, 150), (1, 4))]
    seconds, size = draw(items), draw(items)
    slowness, budgets, kept = (draw(strategy) for strategy in of_parts)
    return seconds, size, slowness, budgets, kept


@settings(deadline=None, max_examples=150)
@given(machines(), st.one_of(st.none(), st.integers(1, 12)))
def test_best_of_all_cuts_within_budgets(machine: tuple[list[int], ...], rounds: int | None) -> None:
    seconds, size, slowness, budgets, kept = machine

    def cost(part: int, start: int, stop: int) -> float:
        fits = kept[part] * sum(size[start:stop]) <= budgets[part]
        return slowness[part] * sum(seconds[start:stop]) if fits else math.inf

    check_against_all(len(seconds), len(slowness), cost, rounds)


@settings(deadline=None)
@given(machines(), st.integers(2, 12))
def test_parts_whose_costs_do_not_add_up(machine: tuple[list[int], ...], rounds: int) -> None:
    """A workspace as large as the largest item's: the cost of a part is no sum over its items."""
    seconds, size, slowness, _, kept = machine

    def cost(part: int, start: int, stop: int) -> float:
        return kept[part] * sum(size[start:stop]) + slowness[part] * max(seconds[start:stop])

    for objective_rounds in (None, rounds):
        check_against_all(len(seconds), len(slowness), cost, objective_rounds)


def of_sums(costs: list[int]) -> PartCost:
    return lambda part, start, stop: sum(costs[start:stop])


def test_ties_go_to_the_first_parts() -> None:
    assert best_split(5, 2, of_sums([1, 1, 1, 1, 1])) == [3, 2]
    assert best_split(3, 2, of_sums([1, 1, 5])) == [2, 1]
    assert best_split(5, 2, of_sums([1, 1, 1, 1, 1]), rounds=4) == [3, 2]


def test_what_does_not_fit_is_none() -> None:
    assert best_split(2, 3, of_sums([1, 1])) is None
    assert best_split(2, 2, lambda part, start, stop: math.inf if part == 1 else 1.0) is None


def test_a_faster_part_gets_more_and_the_sum_counts() -> None:
    """Part 0 is four times as fast. With one round only the sum counts, so it takes all it may; with many the slower one must not be the last."""
    speed = (1, 4)

    def cost(part: int, start: int, stop: int) -> float:
        return float(speed[part] * (stop - start))

    assert best_split(10, 2, cost) == [8, 2]
    assert best_split(10, 2, cost, rounds=1) == [9, 1]
    assert best_split(10, 2, cost, rounds=100) == [8, 2]


def test_fairscales_solver_is_a_bound_as_the_docstring_says() -> None:
    costs = [3, 1, 1, 5]
    assert blockpartition.solve(costs, 2) == [[3, 1], [1, 5]]
    found = best_split(4, 2, of_sums(costs))
    assert found == [3, 1]
    assert (objective([2, 2], of_sums(costs), None), objective([3, 1], of_sums(costs), None)) == (6, 5)


def test_eighty_blocks_over_eight_cards_take_no_time() -> None:
    """All pairs that no other beats stay few; the count of cost calls is bounded, whatever the clock says."""
    calls = 0
    costs = [1.0 + 0.01 * (index % 7) for index in range(82)]

    def cost(part: int, start: int, stop: int) -> float:
        nonlocal calls
        calls += 1
        return (1.0 + 0.3 * (part % 3)) * sum(costs[start:stop])

    found = best_split(82, 8, cost, rounds=16)
    assert found is not None and sum(found) == 82 and calls <= 8 * 82 * 83 // 2
