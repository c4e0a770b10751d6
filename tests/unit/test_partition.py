"""Cuts: every block on one stage, the remainder spread, the largest stage as small as it can be, and every mistake of a map named."""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest

from mpfinetune.config import PartitionConfig
from mpfinetune.errors import ConfigError
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.partition import effective_rule, partition, spans_from_sizes
from tests.families import task_of, tiny_config

BLOCKS_KEY = {"gpt2": "n_layer"}


@cache
def facts_of(family: str, blocks: int = 4, width: int | None = None, vocab_size: int | None = None) -> ModelFacts:
    changes: dict[str, Any] = {BLOCKS_KEY.get(family, "num_hidden_layers"): blocks}
    changes |= {} if vocab_size is None else {"vocab_size": vocab_size}
    changes |= {} if width is None else {"hidden_size": width, "intermediate_size": 2 * width}
    return inspect_model(tiny_config(family, **changes), task_of(family))


def sizes(spans: tuple[StageSpan, ...]) -> list[int]:
    return [span.stop - span.start for span in spans]


# --- rules ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", range(1, 14))
@pytest.mark.parametrize("stages", range(1, 5))
def test_uniform(blocks: int, stages: int) -> None:
    facts, wish = facts_of("llama", blocks), PartitionConfig(rule="uniform")
    if stages > blocks:
        with pytest.raises(ConfigError, match=f"{stages} stages, but the model has {blocks} blocks; at most one stage per block"):
            partition(wish, facts, stages)
        return
    spans = partition(wish, facts, stages)
    assert sum(sizes(spans)) == blocks and max(sizes(spans)) - min(sizes(spans)) <= 1
    assert sizes(spans) == sorted(sizes(spans), reverse=True)  # the remainder first, away from the head
    assert [span.has_prologue for span in spans] == [True] + [False] * (stages - 1)
    assert [span.has_epilogue for span in spans] == [False] * (stages - 1) + [True]
    assert [span.start for span in spans] == [sum(sizes(spans)[:stage]) for stage in range(stages)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_parameters_is_the_best_of_all_cuts(family: str, stages: int) -> None:
    facts = facts_of(family)
    held = [[facts.numel(span.parameter_names(facts)) for span in spans_from_sizes(parts)] for parts in all_sizes(4, stages)]
    found = partition(PartitionConfig(rule="parameters"), facts, stages)
    assert max(facts.numel(span.parameter_names(facts)) for span in found) == min(map(max, held))


def all_sizes(blocks: int, stages: int) -> list[list[int]]:
    cuts = [(0, *inner, blocks) for inner in combinations(range(1, blocks), stages - 1)]
    return [[b - a for a, b in pairwise(cut)] for cut in cuts]


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_heavy_vocabulary_is_not_split_by_counting_blocks(family: str) -> None:
    """50k words of width 64: the tables outweigh the blocks. GPT-2 holds one at each end, BERT's classifier only the first."""
    changes = {"n_embd": 64} if family == "gpt2" else {"hidden_size": 64}
    facts = inspect_model(tiny_config(family, vocab_size=50000, **changes), task_of(family))
    expected = [2, 2] if family == "gpt2" else [1, 3]
    assert sizes(partition(PartitionConfig(rule="parameters"), facts, 2)) == expected
    untied = inspect_model(tiny_config("llama", vocab_size=50000, hidden_size=64, intermediate_size=128), "sequence_classification")
    assert sizes(partition(PartitionConfig(), untied, 2)) == [1, 3]


def test_the_rule_that_is_meant() -> None:
    assert effective_rule(PartitionConfig()) == "parameters"
    assert effective_rule(PartitionConfig(stages=["embed, 0", "1, head"])) == "manual"
    assert effective_rule(PartitionConfig(device_map={"": 0})) == "manual"
    assert effective_rule(PartitionConfig(rule="uniform")) == "uniform"


def test_a_model_that_cannot_be_split_is_one_stage() -> None:
    facts = inspect_model(tiny_config("albert"), "sequence_classification")
    assert partition(PartitionConfig(), facts, 1) == (StageSpan(0, 0, True, True),)
    with pytest.raises(ConfigError, match=r"strategy: .* nothing to split over stages"):
        partition(PartitionConfig(), facts, 2)


# --- maps -------------------------------------------------------------------------------------------------------------------------

LLAMA_MAP = {"model.embed_tokens": 0, **{f"model.layers.{i}": i // 2 for i in range(4)}, "model.norm": 1, "lm_head": 1}
GPT2_MAP = {"transformer.wte": 0, "transformer.wpe": 0, **{f"transformer.h.{i}": i // 2 for i in range(4)}, "transformer.ln_f": 1, "lm_head": 1}


def of_map(given: list[Any] | dict[str, int], family: str = "llama", stages: int = 2) -> tuple[StageSpan, ...]:
    wish = PartitionConfig(stages=given) if isinstance(given, list) else PartitionConfig(device_map=given)
    return partition(wish, facts_of(family), stages)


@pytest.mark.parametrize(
    ("given_map", "family", "expected"),
    [
        (["embed, 0-1", "2-3, head"], "llama", [2, 2]),
        (["embed,0", "1 - 3,head"], "llama", [1, 3]),
        (["embed", "0-3, head"], "llama", [0, 4]),
        (["embed, 0-3", "head"], "llama", [4, 0]),
        ([["embed", 0, 1, 2], [3, "head"]], "llama", [3, 1]),
        (["head, 3", "2, embed, 1, 0"][::-1], "llama", [3, 1]),
        (["model.embed_tokens, model.layers.0", "model.layers.1, 2-3, model.norm"], "llama", [1, 3]),
        (["embed, 0", "1", "2", "3, head"], "llama", [1, 1, 1, 1]),
        (LLAMA_MAP, "llama", [2, 2]),
        (GPT2_MAP, "gpt2", [2, 2]),
        ({"": 0, "model.layers.3": 1, "model.norm": 1, "lm_head": 1}, "llama", [3, 1]),
        ({"model": 0, "model.layers.2": 1, "model.layers.3": 1, "model.norm": 1, "lm_head": 1}, "llama", [2, 2]),
        ({**LLAMA_MAP, "model.rotary_emb": 0}, "llama", [2, 2]),
        ({**LLAMA_MAP, "model.rotary_emb": 1}, "llama", [2, 2]),
        ({"bert.embeddings": 0, "bert.encoder.layer.0": 0, **{f"bert.encoder.layer.{i}": 1 for i in (1, 2, 3)}, "bert.pooler": 1, "classifier": 1},
         "bert", [1, 3]),
        ({"bert.embeddings.word_embeddings": 0, "bert.embeddings": 0, "bert.encoder": 1, "bert.pooler": 1, "classifier": 1}, "bert", [0, 4]),
        ({**LLAMA_MAP, "model.layers.1.mlp": 0, "model.layers.1.self_attn": 0}, "llama", [2, 2]),
    ],
)  # fmt: skip
def test_good_maps(given_map: Any, family: str, expected: list[int]) -> None:
    spans = of_map(given_map, family, len(expected))
    assert sizes(spans) == expected
    assert spans[0].has_prologue and spans[-1].has_epilogue and sum(span.has_prologue + span.has_epilogue for span in spans) == 2


def without(name: str) -> dict[str, int]:
    return {key: stage for key, stage in LLAMA_MAP.items() if key != name}


@pytest.mark.parametrize(
    ("given_map", "messages"),
    [
        (["embed, 0-1", "3, head"], [r"partition.stages: missing, on no stage: block 2 \(model.layers.2\)"]),
        (without("model.layers.1"), [r"partition.device_map: missing, on no stage: block 1 \(model.layers.1\)"]),
        (["embed, 0-2", "2-3, head"], [r"block 2 \(model.layers.2\) is given 2 times, to the stages 0, 1"]),
        (["embed, 0, 0-1", "2-3, head"], [r"block 0 \(model.layers.0\) is given 2 times"]),
        (["embed, 0-1", "2-9, head"], [r"partition.stages\[1\]: '2-9' is out of range; the model has the blocks 0-3 \(model.layers\)"]),
        (["embed, 0-1", "2-3, 7, head"], [r"'7' is out of range"]),
        (["embed, 1-0", "2-3, head"], [r"the range '1-0' runs backwards; write 0-1"]),
        (["embd, 0-1", "2-3, head"], [r"partition.stages\[0\]: 'embd' is no part of this model \(did you mean 'embed'\?\)", "missing.*embed"]),
        ({**without("model.layers.1"), "model.layerz.1": 0}, [r"'model.layerz.1' is no module of this model \(did you mean 'model.layers.1'\?\)",
                                                              r"missing, on no stage: block 1"]),
        (["2-3, embed", "0-1, head"], [r"block 2 .* on stage 0, but what runs before it is on stage 1; .*embed, blocks from first to last, head"]),
        ({**LLAMA_MAP, "model.embed_tokens": 1}, [r"block 0 .* is on stage 0, but what runs before it is on stage 1"]),
        ({**without("model.layers.1"), "model.layers.1.self_attn": 0, "model.layers.1.mlp": 1},
         [r"model.layers.1 is cut inside \('model.layers.1.\w+'\): stages 0 and 1.*only between blocks; give 'model.layers.1' one stage"]),
        ({**LLAMA_MAP, "model.layers.1.mlp": 1}, [r"model.layers.1 is cut inside \('model.layers.1.mlp'\): stages 0 and 1"]),
        (GPT2_MAP, [r"'transformer.wte' is no module of this model", r"missing, on no stage: embed \(model.embed_tokens\), block 0 .*block 3"]),
        ({**LLAMA_MAP, "lm_head": 0}, [r"head \(model.norm, lm_head\) is given 2 times, to the stages 0, 1"]),
        ({**without("model.layers.0"), "model.norm": 0}, ["missing, on no stage: block 0", r"head \(model.norm, lm_head\) is given 2 times"]),
    ],
)  # fmt: skip
def test_bad_maps(given_map: Any, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        of_map(given_map)
    for message in messages:
        raised.match(message)


def test_a_stage_without_anything_on_it() -> None:
    with pytest.raises(ConfigError, match="nothing is on stage 1; stages are numbered from 0 without gaps"):
        of_map({name: stage * 2 for name, stage in LLAMA_MAP.items()}, stages=3)


def test_all_problems_of_a_map_are_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        of_map(["embed, 0, 1-0", "1, 1, 8, hed"])
    assert len(raised.value.problems) == 5, raised.value.problems
    for part in ("backwards", "out of range", "'hed' is no part", "missing, on no stage: block 2", "block 1 .* is given 2 times"):
        raised.match(part)
