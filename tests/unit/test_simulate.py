"""The simulated step against what is known of schedules in closed form, and torch's own orders run to their end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfinetune.planning.schedule import SCHEDULES, microbatch_multiple, min_microbatches, stages_of_rank
from mpfinetune.planning.simulate import StageSeconds, Timeline, simulate, timeline_rows
from mpfinetune.strategies.orders import schedule_orders


def step(schedule: str, seconds: list[float], microbatches: int, transfer: float = 0.0, ranks: int | None = None) -> Timeline:
    """A stage's backward pass takes twice its forward pass, each half of it as long as the forward pass."""
    ranks = ranks or len(seconds)
    stages = [StageSeconds(value, 2 * value, value, value) for value in seconds]
    return simulate(schedule_orders(schedule, ranks, len(seconds) // ranks, microbatches), stages, [transfer] * (len(seconds) - 1))


@settings(deadline=None, max_examples=40)
@given(seconds=st.lists(st.integers(1, 9), min_size=1, max_size=5), extra=st.integers(0, 6))
def test_one_stage_a_rank_takes_what_is_known_in_closed_form(seconds: list[int], extra: int) -> None:
    """GPipe: the sum once, then the slowest stage for each further microbatch. 1F1B is as fast or faster, and never beats the split's bound."""
    microbatches, own = len(seconds) + extra, [3.0 * value for value in seconds]
    gpipe, one_f_one_b = (step(schedule, [float(value) for value in seconds], microbatches) for schedule in ("gpipe", "1f1b"))
    assert gpipe.seconds == pytest.approx(sum(own) + (microbatches - 1) * max(own))
    bound = max(sum(own[:stage]) + microbatches * value for stage, value in enumerate(own))
    assert bound - 1e-9 <= one_f_one_b.seconds <= gpipe.seconds + 1e-9
    for timeline in (gpipe, one_f_one_b):
        assert timeline.busy_seconds == pytest.approx([microbatches * value for value in own])


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 3)])
def test_the_bubble_of_equal_stages_is_the_textbook_s(ranks: int, microbatches: int) -> None:
    timeline = step("1f1b", [1.0] * ranks, microbatches)
    assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert timeline.idle_shares == pytest.approx([timeline.bubble] * ranks)


def test_interleaving_and_zero_bubble_shrink_the_bubble() -> None:
    """Narayanan et al.: (p - 1) / (v m + p - 1). Qi et al.: nearly none for ZB-V with equal F, I and W."""
    half = [0.5] * 4
    interleaved = step("interleaved_1f1b", half, 4, ranks=2)
    assert interleaved.bubble == pytest.approx(1 / (2 * 4 + 1))
    zero = step("zbv", half, 8, ranks=2)
    assert zero.bubble <= step("interleaved_zero_bubble", half, 8, ranks=2).bubble < interleaved.bubble < step("1f1b", [1.0, 1.0], 4).bubble
    assert zero.seconds < 1.05 * max(zero.busy_seconds)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_runs_to_its_end(schedule: str, ranks: int) -> None:
    chunks = SCHEDULES[schedule].stages_per_rank
    multiple = microbatch_multiple(schedule, ranks)
    microbatches = max(min_microbatches(schedule, ranks), 2 * multiple)
    orders = schedule_orders(schedule, ranks, chunks, microbatches)
    for rank, order in orders.items():
        own = stages_of_rank(schedule, rank, ranks, chunks)
        assert {stage for stage, _, _ in order} == set(own)
        for stage in own:
            kinds = [[microbatch for s, kind, microbatch in order if (s, kind) == (stage, wanted)] for wanted in "FBIW"]
            assert sorted(kinds[0]) == sorted(kinds[1] + kinds[2]) == sorted(kinds[1] + kinds[3]) == list(range(microbatches))
    timeline = step(schedule, [1.0] * (ranks * chunks), microbatches, ranks=ranks)
    assert timeline.seconds >= 3 * chunks * microbatches and sum(timeline.busy_seconds) == pytest.approx(3 * chunks * microbatches * ranks)
    for before, after in zip(timeline.events, timeline.events[1:], strict=False):
        assert before.rank != after.rank or after.start >= before.end


def test_transfers_delay_and_share_a_link() -> None:
    # Two stages, one microbatch: forward, crossing, forward and backward, crossing, backward.
    assert step("gpipe", [1.0, 1.0], 1, transfer=0.25).seconds == pytest.approx(6.5)
    # A crossing that takes longer than a stage: the link, not the compute, sets the pace of the forward passes.
    slow = step("gpipe", [1.0, 1.0], 3, transfer=4.0)
    starts = [event.start for event in slow.events if (event.stage, event.kind) == (1, "F")]
    assert starts == [5.0, 9.0, 13.0]
    # On one rank nothing crosses.
    assert step("interleaved_1f1b", [1.0, 1.0], 2, transfer=100.0, ranks=1).seconds == pytest.approx(12.0)


def test_orders_that_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match=r"the ranks .* wait"):
        simulate({0: [(0, "B", 0), (0, "F", 0)], 1: [(1, "F", 0), (1, "B", 0)]}, [StageSeconds(1, 2)] * 2, [0.0])


def test_the_time_line_as_text() -> None:
    assert timeline_rows(step("1f1b", [1.0, 1.0], 2).events, width=18) == ["0011....aaaa..bbbb", "..00aaaa11bbbb...."]
