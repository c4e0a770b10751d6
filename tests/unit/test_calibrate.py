"""A block's seconds from two stages, also where a busy machine has made nonsense of their difference."""

from __future__ import annotations

import pytest

from mpfinetune.training.calibrate import _seconds_of_one


@pytest.mark.parametrize(
    ("one", "several", "expected"),
    [
        (1.5, 3.5, 1.0),  # half a second besides the blocks
        (1.0, 3.0, 1.0),  # nothing besides
        (5.0, 3.0, 1.0),  # the short stage was disturbed: the difference would be negative
        (0.5, 3.0, 1.0),  # the long one was: a pass would take less than nothing besides its blocks
    ],
)
def test_a_block_from_stages_of_one_and_of_three(one: float, several: float, expected: float) -> None:
    assert _seconds_of_one(one, several, more=2) == pytest.approx(expected)
