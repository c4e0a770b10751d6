"""Cards to plan for: the table, what an entry may change, names as people and drivers write them, and a card that nobody knows."""

from __future__ import annotations

from typing import Any

import pytest

from mpfinetune.config import config_from_dict
from mpfinetune.errors import ConfigError
from mpfinetune.planning.cards import CARDS
from mpfinetune.planning.hardware import GIB, PlanCard, card_key, cards_of, present_card


def cards(*entries: Any) -> tuple[PlanCard, ...]:
    base = {"model": {"path": "x", "task": "causal_lm"}, "data": {"path": "x.txt"}, "run_dir": "x"}
    return cards_of(config_from_dict({**base, "hardware": list(entries)}))


def test_an_entry_is_the_table_s_card_with_its_own_figures() -> None:
    large, small = cards({"gpu": "RTX 3090"}, {"gpu": "gtx1080ti", "memory_gib": 10.5})
    assert (large.memory_bytes, large.spec) == (round(23.6 * GIB), CARDS["rtx3090"])
    assert small.memory_bytes == round(10.5 * GIB) and small.spec is not None and small.spec.bandwidth_gb_s == 484
    assert cards() == ()
    # no tensor cores before Volta: fp16 is no faster than fp32 there
    assert small.flops_per_second("fp16") == small.flops_per_second("fp32") and small.flops_per_second("bf16") is None
    assert large.flops_per_second("bf16") == 71e12


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA GeForce RTX 3090", "rtx3090"), ("rtx-3090", "rtx3090"), ("Tesla T4", "t4"), ("GTX 1080 Ti", "gtx1080ti"), ("RTX A6000", "rtxa6000")],
)
def test_names(name: str, key: str) -> None:
    assert card_key(name) == key and key in CARDS


@pytest.mark.parametrize(
    ("name", "key"),
    [("NVIDIA A100-SXM4-40GB", "a100"), ("Tesla V100-PCIE-16GB", "v100"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA GeForce RTX 3090", "rtx3090")],
)
def test_a_present_card_has_its_own_memory_and_the_table_s_rates(name: str, key: str) -> None:
    card = present_card(name, CARDS[key].capability, 7 * GIB)
    assert card.memory_bytes == 7 * GIB and card.spec == CARDS[key]


def test_a_present_card_that_the_table_does_not_have() -> None:
    card = present_card("NVIDIA GeForce RTX 3080 Laptop GPU", (8, 6), GIB)
    assert card.spec is None and card.flops_per_second("fp32") is None


def test_an_unknown_card_is_told_with_the_nearest_and_the_way_out() -> None:
    with pytest.raises(ConfigError) as raised:
        cards({"gpu": "rtx3091"}, {"gpu": "rtx4090"}, {"gpu": "xyzzy", "memory_gib": 4})
    first, second = raised.value.problems
    assert "hardware[0].gpu: 'rtx3091' given" in first and "rtx3090" in first.partition("nearest: ")[2]
    assert "hardware[2].gpu: 'xyzzy'" in second and second.endswith("add bandwidth_gb_s, fp32_tflops, fp16_tflops to the entry")
    figures = {"memory_gib": 4, "bandwidth_gb_s": 100, "fp32_tflops": 5, "fp16_tflops": 10, "capability": 7.5}
    (own,) = cards({"gpu": "xyzzy", **figures})
    assert own.memory_bytes == 4 * GIB and own.spec is not None and own.spec.capability == (7, 5) and own.flops_per_second("fp16") == 10e12


def test_the_table_is_plausible() -> None:
    assert len(CARDS) >= 20
    for name, card in CARDS.items():
        assert card_key(name) == name
        assert card.fp16_tflops >= card.fp32_tflops > 0 and 100 < card.bandwidth_gb_s < 10000 and 4 <= card.memory_gib < 256
        assert (card.bf16_tflops > 0) == (card.capability >= (8, 0))
