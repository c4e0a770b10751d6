"""The memory prediction against the real step: weights, gradients and optimizer to the byte, what autograd keeps within 5 %."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.memory_cases import Numbers, compare
from tests.multiproc.rank_pool import RankPool

CASE = "tests.multiproc.memory_cases:compare"
SAVED_TOLERANCE = 0.05
LORA = {"adapter": {"type": "lora", "rank": 8}}

ONE_PROCESS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "bert": ("bert", {}),
    "one-row": ("llama", {"batch": {"global_size": 8, "micro_size": 1}}),
    "four-rows": ("gpt2", {"batch": {"global_size": 8, "micro_size": 4}}),
    "bf16": ("llama", {"precision": "bf16"}),
    "recompute-full": ("llama", {"recompute": "full"}),
    "recompute-every-2": ("gpt2", {"recompute": "every_2"}),
    "recompute-blocks": ("bert", {"recompute": [0, "2-3"]}),
    "lora": ("llama", LORA),
    "dora-bf16": ("llama", {"adapter": {"type": "dora", "rank": 8}, "precision": "bf16"}),
    "qlora-nf4": ("llama", {**LORA, "quantize": "nf4", "precision": "bf16"}),
    "qlora-int8": ("gpt2", {**LORA, "quantize": "int8"}),
    "frozen-embed": ("bert", {"frozen": ["embed"]}),
    "last-block": ("gpt2", {"trainable": ["last_1_block", "head"]}),
    "adamw-8bit": ("llama", {"optimizer": {"name": "adamw_8bit"}}),
    "sgd-momentum": ("gpt2", {"optimizer": {"name": "sgd", "momentum": 0.9}}),
    "experts": ("mixtral", {}),
}
PIPELINE: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 2}}
FOUR: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 4}}
TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("llama", PIPELINE),
    "1f1b-tied": ("gpt2", PIPELINE),
    "gpipe": ("bert", {**PIPELINE, "schedule": "gpipe"}),
    "1f1b-recompute": ("bert", {**PIPELINE, "recompute": "full"}),
    "interleaved": ("llama", {**FOUR, "schedule": "interleaved_1f1b"}),
    "interleaved-zero-bubble": ("gpt2", {**FOUR, "schedule": "interleaved_zero_bubble"}),
    "zbv": ("llama", {**FOUR, "schedule": "zbv"}),
    "1f1b-qlora": ("llama", {**PIPELINE, **LORA, "quantize": "nf4", "precision": "bf16"}),
    "1f1b-8bit": ("gpt2", {**PIPELINE, "optimizer": {"name": "adamw_8bit"}}),
    "offload": ("llama", {**PIPELINE, "offload": {"optimizer": "cpu"}}),
    "offload-bf16": ("gpt2", {**PIPELINE, "offload": {"optimizer": "cpu"}, "precision": "bf16"}),
}


def check(predicted: Numbers, measured: Numbers) -> None:
    exact = ("weights", "gradients", "optimizer", "offloaded")
    assert {name: getattr(predicted, name) for name in exact} == {name: getattr(measured, name) for name in exact}
    assert measured.saved > 0
    assert predicted.saved == pytest.approx(measured.saved, rel=SAVED_TOLERANCE)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name: str) -> None:
    family, changes = ONE_PROCESS[name]
    check(*compare(family, changes))


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(two_ranks: RankPool, name: str) -> None:
    family, changes = TWO_RANKS[name]
    for predicted, measured in two_ranks.run(CASE, {"family": family, "changes": changes}):
        check(predicted, measured)
