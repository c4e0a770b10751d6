"""The structure that one run with fake tensors finds: blocks, parts, ties, and why a model cannot be split."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from mpfinetune.config import ModelConfig, PartitionConfig
from mpfinetune.errors import ConfigError, ModelError
from mpfinetune.models.architecture import construct_model, load_hf_config, parameters_on_meta
from mpfinetune.models.facts import BlockCall, ModelFacts, _block_call, _Call, inspect_model
from mpfinetune.planning.partition import spans_from_sizes, uniform
from tests.families import FAMILIES, T5, task_of, tiny_config

REPOSITORY = Path(__file__).resolve().parents[2]
SPLIT = (*FAMILIES, "deberta-v2")
# Names that a family's blocks go by, where they are not model.layers.
BLOCKS_PATHS = {
    **dict.fromkeys(("gpt2", "gpt_neo", "gptj", "bloom", "falcon"), "transformer.h"),
    **{"gpt_neox": "gpt_neox.layers", "opt": "model.decoder.layers", "modernbert": "model.layers", "distilbert": "distilbert.transformer.layer"},
    **{family: f"{family}.encoder.layer" for family in ("bert", "roberta", "electra", "mpnet")},
    **{"xlm-roberta": "roberta.encoder.layer", "deberta-v2": "deberta.encoder.layer"},
}
TUPLE_LENGTHS = {"gpt_neo": 2, "bloom": 2, "falcon": 2, "mpnet": 1, "deberta-v2": 2}
TIED = {"qwen2", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "opt", "bloom", "falcon", "cohere", "starcoder2", "smollm3"}
SIDE_PARAMETERS = {
    "mpnet": {"mpnet.encoder.relative_attention_bias.weight"},
    "deberta-v2": {"deberta.encoder.rel_embeddings.weight", "deberta.encoder.LayerNorm.weight", "deberta.encoder.LayerNorm.bias"},
}


@cache
def facts_of(family: str) -> ModelFacts:
    return inspect_model(tiny_config(family), task_of(family))


@cache
def whole_model(family: str) -> nn.Module:
    with parameters_on_meta():
        model = construct_model(tiny_config(family), task_of(family), "auto", torch.float32)
    model.tie_weights()  # on meta each name is registered anew
    return model


def test_the_matrix_has_the_34_families() -> None:
    assert len(FAMILIES) == 34


@pytest.mark.parametrize("family", SPLIT)
def test_structure(family: str) -> None:
    facts = facts_of(family)
    assert facts.refusal is None
    assert facts.blocks_path == BLOCKS_PATHS.get(family, "model.layers")
    assert (facts.num_blocks, facts.hidden_size) == (4, 32)
    assert facts.block_call == BlockCall(0, TUPLE_LENGTHS.get(family), 0)
    assert bool(facts.tied_names) == (family in TIED)
    assert set(facts.names_of("every_stage")) == SIDE_PARAMETERS.get(family, set())
    assert facts.prologue_modules and facts.epilogue_modules


@pytest.mark.parametrize("family", SPLIT)
def test_each_parameter_has_one_part_and_its_own_shape(family: str) -> None:
    facts, model = facts_of(family), whole_model(family)
    real = dict(model.named_parameters(remove_duplicate=False))
    assert {name: tuple(p.shape) for name, p in real.items()} == {name: p.shape for name, p in facts.parameters.items()}
    for name, parameter in facts.parameters.items():
        inside = name.startswith(f"{facts.blocks_path}.")
        assert (parameter.part == "block") == inside
        assert parameter.block == (int(name[len(facts.blocks_path) + 1 :].split(".")[0]) if inside else None)
    assert facts.numel(facts.parameters) == sum(p.numel() for p in model.parameters())
    assert facts.module_names == {name for name, _ in model.named_modules() if name}


@pytest.mark.parametrize("family", SPLIT)
def test_the_spans_hold_every_name(family: str) -> None:
    facts = facts_of(family)
    for sizes in ((4,), (2, 2), (0, 4), (4, 0), (1, 2, 1), (1, 1, 1, 1)):
        held = [set(span.parameter_names(facts)) for span in spans_from_sizes(sizes)]
        assert set().union(*held) == set(facts.parameters)
        # No name twice, but for those that every stage needs.
        assert sum(map(len, held)) == len(facts.parameters) + (len(sizes) - 1) * len(SIDE_PARAMETERS.get(family, set()))


@pytest.mark.parametrize("blocks", range(1, 14))
def test_the_spans_hold_every_name_of_any_depth(blocks: int) -> None:
    facts = inspect_model(tiny_config("gpt2", n_layer=blocks), "causal_lm")
    assert facts.num_blocks == blocks
    for stages in range(1, min(4, blocks) + 1):
        names = [name for span in uniform(PartitionConfig(), facts, stages, None) for name in span.parameter_names(facts)]
        assert sorted(names) == sorted(facts.parameters)


def test_tied_names() -> None:
    facts = facts_of("gpt2")
    assert facts.tied_names == (("transformer.wte.weight", "lm_head.weight"),)
    assert facts.canonical_name("lm_head.weight") == "transformer.wte.weight"
    assert facts.canonical_name("transformer.ln_f.weight") == "transformer.ln_f.weight"
    assert facts.numel(["transformer.wte.weight", "lm_head.weight"]) == 96 * 32
    assert (facts.parameters["transformer.wte.weight"].part, facts.parameters["lm_head.weight"].part) == ("prologue", "epilogue")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_one_block_is_read_as_many_are(family: str) -> None:
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    facts = inspect_model(tiny_config(family, **{key: 1}), task_of(family))
    whole = facts_of(family)
    assert (facts.num_blocks, facts.block_call, facts.blocks_path) == (1, whole.block_call, whole.blocks_path)
    assert (facts.prologue_modules, facts.epilogue_modules) == (whole.prologue_modules, whole.epilogue_modules)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_the_attention_kernel_does_not_change_the_structure(family: str) -> None:
    assert inspect_model(tiny_config(family), task_of(family), "eager") == facts_of(family)


def test_the_head_of_a_decoder_that_scores_rows() -> None:
    facts = inspect_model(tiny_config("llama"), "sequence_classification")
    assert facts.epilogue_modules == ("model.norm", "score")


def test_inspection_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_rng_state()
    inspect_model(tiny_config("llama"), "causal_lm")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert type(torch.ones(1)) is torch.Tensor


# --- refusals ---------------------------------------------------------------------------------------------------------------------


def test_albert_is_refused_with_the_reason_and_can_be_trained_whole() -> None:
    facts = facts_of("albert")
    assert facts.refusal == (
        "the model (albert) runs the same layers of 'albert.encoder.albert_layer_groups' 4 times: all its depth shares one set of weights, "
        "so there is nothing to split over stages. Use strategy: local."
    )
    assert {p.part for p in facts.parameters.values()} == {"prologue"}
    assert facts.numel(facts.parameters) == sum(p.numel() for p in whole_model("albert").parameters())


def test_t5_is_refused_with_the_reason(tmp_path: Path) -> None:
    AutoConfig.for_model("t5", **T5).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is an encoder-decoder \(t5\): its decoder reads the encoder's output in every block"):
        load_hf_config(ModelConfig(path=str(tmp_path)), None)


def call(index: int, given: torch.Tensor, output: object) -> _Call:
    return _Call("blocks", index, (given,), {}, output)


def test_a_model_that_computes_between_its_blocks_is_refused() -> None:
    first, second = (torch.zeros(2, 8, 4, requires_grad=True) for _ in range(2))
    with pytest.raises(ModelError, match="computes something between block 0 and block 1"):
        _block_call("odd", [call(0, first, first), call(1, second, second)])


def test_a_model_that_calls_its_blocks_in_two_ways_is_refused() -> None:
    hidden = [torch.zeros(2, 8, 4, requires_grad=True) for _ in range(3)]
    calls = [call(0, hidden[0], hidden[1]), call(1, hidden[1], (hidden[2],)), call(2, hidden[2], hidden[0])]
    with pytest.raises(ModelError, match="calls its blocks in 2 different ways"):
        _block_call("odd", calls)


def test_a_task_that_the_family_has_no_class_for() -> None:
    with pytest.raises(ModelError, match=r"model.task: no causal_lm model can be built from the configuration \(mpnet\)"):
        inspect_model(tiny_config("mpnet"), "causal_lm")


def test_config_mistakes_name_the_key(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.overrides.hiden_size: not a key .* \(did you mean 'hidden_size'\?\)"):
        load_hf_config(ModelConfig(path=str(tmp_path), overrides={"hiden_size": 3}), None)
    assert load_hf_config(ModelConfig(path=str(tmp_path), overrides={"hidden_size": 48}), None).hidden_size == 48
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"model.path: the configuration in .* cannot be read"):
        load_hf_config(ModelConfig(path=str(tmp_path)), None)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "llama-1b").mkdir()
    (tmp_path / "file").write_text("")
    for name, message in (("llama-1b", "has no config.json"), ("file", "is a file"), ("lama-1b", r"no such folder .*did you mean .*llama-1b'")):
        with pytest.raises(ModelError, match=message):
            load_hf_config(ModelConfig(path=str(tmp_path / name)), None)


# --- size -------------------------------------------------------------------------------------------------------------------------

SEVENTY_BILLION = {
    "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8,
}  # fmt: skip
INSPECT = """
import json, resource, sys, time
from transformers import AutoConfig
from mpfinetune.models.facts import inspect_model
import torch, transformers.models.llama.modeling_llama
keys = json.loads(sys.argv[1])
if keys is None:
    keys = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
began = time.monotonic()
facts = inspect_model(AutoConfig.for_model("llama", **keys), "causal_lm")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": time.monotonic() - began, "peak": peak, "blocks": facts.num_blocks, "numel": facts.numel(facts.parameters)}))
"""


def inspected(keys: dict[str, int] | None) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", INSPECT, json.dumps(keys)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_seventy_billion_parameters_take_seconds_and_no_memory() -> None:
    large, bare = inspected(SEVENTY_BILLION), inspected(None)
    assert large["blocks"] == 80
    assert large["numel"] == 70_553_706_496
    assert large["seconds"] < 20
    assert large["peak"] - bare["peak"] < 256 * 2**20  # the weights would be 131 GiB
