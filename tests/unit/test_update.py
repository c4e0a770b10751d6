"""The loss scale of fp16: halved by an overflow, doubled after a quiet time, one for the other precisions."""

from __future__ import annotations

from mpfinetune.strategies.update import LossScale


def test_an_overflow_halves_the_scale_and_starts_the_count_again() -> None:
    scale = LossScale.for_precision("fp16")
    scale.note(overflow=False)
    scale.note(overflow=True)
    assert (scale.value, scale.updates_since_change) == (2.0**15, 0)


def test_the_scale_doubles_after_the_interval_without_overflow() -> None:
    scale = LossScale(value=8.0, dynamic=True, growth_interval=3)
    values = []
    for _ in range(6):
        scale.note(overflow=False)
        values.append(scale.value)
    assert values == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0]


def test_the_scale_never_falls_below_its_minimum_and_is_exhausted_there() -> None:
    scale = LossScale(value=2.0, dynamic=True)
    assert not scale.exhausted
    scale.note(overflow=True)
    scale.note(overflow=True)
    assert scale.value == 1.0
    assert scale.exhausted


def test_other_precisions_keep_one() -> None:
    for precision in ("fp32", "bf16"):
        scale = LossScale.for_precision(precision)
        scale.note(overflow=True)
        assert (scale.value, scale.dynamic) == (1.0, False)
