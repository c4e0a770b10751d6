"""Precision against compute capability, with cards that are not here."""

from __future__ import annotations

import pytest

from mpfinetune.errors import ConfigError
from mpfinetune.planning.capability import Card, judge_precision

RTX3090, RTX2080TI = Card("RTX 3090", (8, 6)), Card("RTX 2080 Ti", (7, 5))
GTX1080TI, GTX980, GTX780 = Card("GTX 1080 Ti", (6, 1)), Card("GTX 980", (5, 2)), Card("GTX 780", (3, 5))


@pytest.mark.parametrize("card", [RTX2080TI, GTX1080TI])
def test_bf16_below_8_0_is_refused_with_fp16_named(card: Card) -> None:
    with pytest.raises(ConfigError, match=r"precision: bf16 given, but card 0, .* has no bf16 .*; set precision: fp16"):
        judge_precision("bf16", [card])


def test_every_card_of_the_run_is_judged() -> None:
    with pytest.raises(ConfigError) as raised:
        judge_precision("bf16", [RTX2080TI, RTX3090, GTX1080TI])
    assert "card 0, RTX 2080 Ti (compute capability 7.5)" in str(raised.value)
    assert "card 2, GTX 1080 Ti (compute capability 6.1)" in str(raised.value)
    assert "RTX 3090" not in str(raised.value)


def test_a_card_without_either_is_sent_to_fp32() -> None:
    for precision in ("bf16", "fp16"):
        with pytest.raises(ConfigError, match="set precision: fp32"):
            judge_precision(precision, [GTX980])


def test_pascal_is_told_that_fp16_saves_memory_and_not_time() -> None:
    (line,) = judge_precision("fp16", [GTX1080TI])
    assert "GTX 1080 Ti" in line and "saves memory there, not time" in line


def test_what_fits_needs_no_advice() -> None:
    assert judge_precision("bf16", [RTX3090, RTX3090]) == []
    assert judge_precision("fp16", [RTX2080TI]) == []
    assert judge_precision("fp32", [RTX3090, GTX780]) == []


def test_fp16_is_advised_below_8_0() -> None:
    assert "precision: fp16 would halve" in judge_precision("fp32", [RTX2080TI])[0]
    assert "no gain in time" in judge_precision("fp32", [GTX1080TI])[0]


def test_without_cards_there_is_nothing_to_judge() -> None:
    assert judge_precision("bf16", []) == []
