"""The solver against every possible cut: random costs, unequal parts, budgets that forbid, and both objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

import pytest
from fairscale.nn.pipe.balance import blockpartition
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfinetune.planning.simulate import StageSeconds, simulate
from mpfinetune.planning.split import PartCost, best_split, fastest_split
from mpfinetune.strategies.orders import schedule_orders


def all_splits(count: int, parts: int) -> list[list[int]]:
    return [[b - a for a, b in pairwise((0, *inner, count))] for inner in combinations(range(1, count), parts - 1)]


def objective(sizes: list[int], cost: PartCost, rounds: int | None) -> float:
    starts = [sum(sizes[:part]) for part in range(len(sizes))]
    costs = [cost(part, start, start + size) for part, (start, size) in enumerate(zip(starts, sizes, strict=True))]
    if rounds is None or math.isinf(max(costs)):
        return max(costs)
    return max(sum(costs[:part]) + rounds * own for part, own in enumerate(costs))


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


@settings(deadline=None, max_examples=60)
@given(machines(), st.integers(0, 4), st.integers(0, 3), st.sampled_from(["1f1b", "gpipe"]))
def test_fastest_is_the_fastest_of_all_simulated_steps(machine: tuple[list[int], ...], extra: int, transfer: int, schedule: str) -> None:
    """With transfers and the real schedule, over every cut that keeps within the budgets."""
    seconds, size, slowness, budgets, kept = machine
    parts = min(4, len(slowness))
    rounds = parts + extra
    orders = schedule_orders(schedule, parts, 1, rounds)

    def cost(part: int, start: int, stop: int) -> float:
        fits = kept[part] * sum(size[start:stop]) <= budgets[part]
        return 3.0 * slowness[part] * sum(seconds[start:stop]) if fits else math.inf

    def step_seconds(sizes: Sequence[int]) -> float:
        starts = [sum(sizes[:part]) for part in range(parts)]
        forward = [cost(part, start, start + size) / 3 for part, (start, size) in enumerate(zip(starts, sizes, strict=True))]
        return simulate(orders, [StageSeconds(value, 2 * value) for value in forward], [float(transfer)] * (parts - 1)).seconds

    allowed = [sizes for sizes in all_splits(len(seconds), parts) if math.isfinite(objective(sizes, cost, None))]
    found = fastest_split(len(seconds), parts, cost, rounds, step_seconds)
    assert (found is None) == (not allowed)
    if found is not None:
        assert found[0] in allowed and found[1] == pytest.approx(min(map(step_seconds, allowed)))


def of_sums(costs: list[int]) -> PartCost:
    return lambda part, start, stop: sum(costs[start:stop])


def test_ties_go_to_the_first_parts() -> None:
    assert best_split(5, 2, of_sums([1, 1, 1, 1, 1])) == [3, 2]
    assert best_split(3, 2, of_sums([1, 1, 5])) == [2, 1]


def test_what_does_not_fit_is_none() -> None:
    assert best_split(2, 3, of_sums([1, 1])) is None
    assert best_split(2, 2, lambda part, start, stop: math.inf if part == 1 else 1.0) is None


def test_a_faster_part_gets_more() -> None:
    """Part 0 is four times as fast. With one round a part only has to be passed once, so all but one go there; with many the load is even."""
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


def test_eighty_blocks_over_four_unequal_cards_need_few_simulations() -> None:
    costs = [1.0 + 0.01 * (index % 7) for index in range(82)]
    sums = [0.0, *accumulate(costs)]
    tried = 0

    def cost(part: int, start: int, stop: int) -> float:
        return (1.0 + 0.3 * (part % 3)) * (sums[stop] - sums[start])

    def step_seconds(sizes: Sequence[int]) -> float:
        nonlocal tried
        tried += 1
        starts = [0, *accumulate(sizes)]
        stages = [cost(part, starts[part], starts[part + 1]) / 3 for part in range(len(sizes))]
        return simulate(orders, [StageSeconds(value, 2 * value) for value in stages], [0.1] * (len(sizes) - 1)).seconds

    orders = schedule_orders("1f1b", 4, 1, 8)
    found = fastest_split(82, 4, cost, 8, step_seconds)
    assert found is not None and sum(found[0]) == 82 and tried < 2000, tried
    tried, orders = 0, schedule_orders("1f1b", 8, 1, 16)
    assert fastest_split(82, 8, cost, 16, step_seconds) is not None and tried == 2
