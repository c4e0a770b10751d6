"""Adapters, quantised bases and frozen stages keep the promise: the pipeline has the numbers of ``local``, over three updates.

Adapters are drawn, trained and held in fp32. NF4 and int8 are deterministic on the CPU, so the tolerance is that of the plain matrix; int8
computes in fp16 and rounds what enters a layer to 8 bits, so a last bit of fp32 can become a whole step of 1/127: it has a wider one.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.adapter_cases import Case, case, one_thread, train, worst
from tests.multiproc.rank_pool import RankPool

TRAIN = "tests.multiproc.adapter_cases:train"
LOCAL: dict[str, Any] = {"strategy": "local", "partition": {}}
TOLERANCE, INT8_TOLERANCE = 1e-5, 1e-3
FOUR_STAGES = {"partition": {"rule": "uniform", "num_stages": 4}}


def lora(**changes: Any) -> dict[str, Any]:
    return {"adapter": {"type": "lora", "rank": 4, **changes}}


def on_blocks(family_path: str, *blocks: int) -> dict[str, Any]:
    """LoRA on the named blocks only: the other stages learn nothing."""
    return lora(targets=[f"{family_path}.{block}.self_attn.q_proj" for block in blocks])


# name -> (case, layout, tolerance)
CASES: dict[str, tuple[Case, dict[str, Any], float]] = {
    "llama": (case("llama"), {}, TOLERANCE),
    "llama-gpipe": (case("llama"), {"schedule": "gpipe"}, TOLERANCE),
    "llama-nf4": (case("llama", quantize="nf4"), {}, TOLERANCE),
    "llama-int8": (case("llama", quantize="int8"), {}, INT8_TOLERANCE),
    "bert": (case("bert"), {}, TOLERANCE),
    "bert-nf4": (case("bert", quantize="nf4"), {}, TOLERANCE),
    "bert-int8": (case("bert", quantize="int8"), {}, INT8_TOLERANCE),
    "gpt2": (case("gpt2"), {}, TOLERANCE),
    "llama-rslora": (case("llama", adapter={"type": "rslora", "rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}), {}, TOLERANCE),
    "bert-dora-nf4": (case("bert", quantize="nf4", adapter={"type": "dora", "rank": 4, "targets": ["query", "value"]}), {}, TOLERANCE),
    "llama-first-stage-frozen": (case("llama", **on_blocks("model.layers", 2, 3)), {}, TOLERANCE),
    "llama-last-stage-frozen": (case("llama", **on_blocks("model.layers", 0)), {}, TOLERANCE),
    "llama-middle-learns": (case("llama", **on_blocks("model.layers", 1)), {**FOUR_STAGES, "schedule": "interleaved_1f1b"}, TOLERANCE),
    "llama-zbv": (case("llama"), {**FOUR_STAGES, "schedule": "zbv"}, TOLERANCE),
    "llama-zbv-frozen-ends": (case("llama", **on_blocks("model.layers", 1)), {**FOUR_STAGES, "schedule": "zbv"}, TOLERANCE),
    "llama-zero-bubble-frozen-ends": (
        case("llama", **on_blocks("model.layers", 2)), {**FOUR_STAGES, "schedule": "interleaved_zero_bubble"}, TOLERANCE,
    ),
    "llama-recompute-frozen-first": (case("llama", recompute="full", **on_blocks("model.layers", 3)), {}, TOLERANCE),
    "bert-frozen-without-adapter": (case("bert", adapter={"type": "none"}, trainable=["head"]), {}, TOLERANCE),
    "bert-trainable-pooler": (case("bert", trainable=["bert.pooler"]), {}, TOLERANCE),
}


@pytest.mark.parametrize("name", CASES)
def test_pipeline_equals_local(two_ranks: RankPool, name: str) -> None:
    wanted, layout, tolerance = CASES[name]
    with one_thread():
        expected = train(wanted, LOCAL)
    results = two_ranks.run(TRAIN, {"wanted": wanted, "layout": layout})
    held: dict[str, Any] = {}
    for result in results:
        assert result["frozen_changed"] == []
        assert result["losses"] == pytest.approx(expected["losses"], abs=tolerance)
        assert result["norms"] == pytest.approx(expected["norms"], abs=tolerance * 10)
        held |= result["parameters"]
        if result["logits"] is not None:
            assert worst(result["logits"][: wanted.rows[-1]], expected["logits"]) <= tolerance * 10
    assert sorted(held) == sorted(expected["parameters"])
    differences = {key: worst(value, expected["parameters"][key]) for key, value in held.items()}
    name_of_worst = max(differences, key=lambda key: differences[key])
    assert differences[name_of_worst] <= tolerance, f"{name_of_worst}: {differences[name_of_worst]:.2e}"
    assert sorted(key for result in results for key in result["first_held"]) == sorted(expected["first_held"])
