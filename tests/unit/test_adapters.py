"""Adapters: where they go, what learns beside them, their checkpoints, and both exports read by peft and transformers themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mpfinetune.config import AdapterConfig
from mpfinetune.dist import DistContext
from mpfinetune.errors import CheckpointError, ConfigError, ModelError
from mpfinetune.models.adapters import facts_with_adapters
from mpfinetune.models.architecture import auto_class
from mpfinetune.models.facts import inspect_model
from mpfinetune.models.stage import StageSpan
from mpfinetune.models.trainable import trainable_names
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.build import build_stage
from mpfinetune.training import export_adapter as exports
from mpfinetune.training.checkpoint import RunState, load_into, save_checkpoint, streams_of
from mpfinetune.training.export import export_checkpoint
from mpfinetune.training.forecast import Forecast
from mpfinetune.training.prepare import PlannedRun
from tests.families import tiny_config
from tests.multiproc.training_cases import Problem, adapter_problem, build, facts_of, hf_config_of, largest_gap, make_batches, run_config, task_of
from tests.unit.test_quantize import CPU, LOCAL, save_base

ALONE = DistContext(0, 1, CPU)


class NoTokenizer:
    """The exports ask a tokenizer for its pad token and to save itself."""

    pad_token_id = 0

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")


TOKENIZER: Any = NoTokenizer()


def facts(family: str, **adapter: Any) -> Any:
    problem = adapter_problem(family)
    return facts_with_adapters(inspect_model(hf_config_of(problem), task_of(family)), AdapterConfig(**{"type": "lora", **adapter}))


def test_layers_that_peft_takes_for_fused_experts_get_no_adapter() -> None:
    """deepseek_v3's dense and shared layers have the names that its experts had in transformers 4; peft would look for those."""
    found = facts_with_adapters(inspect_model(tiny_config("deepseek_v3"), "causal_lm"), AdapterConfig(type="lora"))
    endings = {name.rpartition(".")[2] for name in found.adapted}
    assert endings == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    with pytest.raises(ConfigError, match=r"adapter.targets: 'gate_proj' is a linear layer .* but peft takes the name for that of its fused experts"):
        facts_with_adapters(inspect_model(tiny_config("deepseek_v3"), "causal_lm"), AdapterConfig(type="lora", targets=["q_b_proj", "gate_proj"]))
    assert "gate_proj" in {name.rpartition(".")[2] for name in facts("llama").adapted}


# --- where they go ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_facts_have_the_names_and_shapes_that_peft_makes(family: str, kind: str) -> None:
    problem = adapter_problem(family, adapter={"type": kind, "rank": 3})
    config = run_config(problem, **LOCAL)
    known = facts_of(problem, config)
    stage, _ = build_stage(config, hf_config_of(problem), known, StageSpan(0, known.num_blocks, True, True), CPU, None)
    live = {known.canonical_name(name): tuple(parameter.shape) for name, parameter in stage.model.named_parameters()}
    assert live == {name: known.parameters[name].shape for name in map(known.canonical_name, known.parameters)}
    learning = {known.canonical_name(name) for name, parameter in stage.model.named_parameters() if parameter.requires_grad}
    assert learning == set(trainable_names(known, [], [])) == known.adapter_names | known.classification_head


def test_all_linear_is_every_linear_layer_of_the_blocks_and_no_other() -> None:
    known = facts("llama")
    assert len(known.adapted) == 4 * 7 and not any("lm_head" in name for name in known.adapted)


def test_initial_values_do_not_depend_on_the_split() -> None:
    problem = adapter_problem("llama")
    config = run_config(problem)
    known = facts_of(problem, config)

    def weights(*spans: StageSpan) -> dict[str, Tensor]:
        stages = [build_stage(config, hf_config_of(problem), known, span, CPU, None)[0] for span in spans]
        return {known.canonical_name(name): p.detach() for stage in stages for name, p in stage.model.named_parameters()}

    whole, split = weights(StageSpan(0, 4, True, True)), weights(StageSpan(0, 1, True, False), StageSpan(1, 4, False, True))
    assert whole.keys() == split.keys() and all(torch.equal(whole[name], split[name]) for name in whole)
    drawn = [whole[name] for name in sorted(known.adapter_names) if name.endswith("q_proj.lora_A.weight")]
    assert not any(torch.equal(drawn[0], other) for other in drawn[1:]) and all(float(tensor.abs().max()) > 0 for tensor in drawn)


@pytest.mark.parametrize(
    ("family", "targets", "words"),
    [
        ("gpt2", ["q_proj"], r"adapter.targets: 'q_proj' is no linear layer of the blocks.*; this model \(gpt2\) has attn.c_attn, attn.c_proj, mlp"),
        ("llama", ["q_pro", "query"], r"'q_pro' is no linear layer of the blocks \(did you mean 'q_proj'\?\)"),
        ("llama", ["lm_head"], "'lm_head' is no linear layer of the blocks"),
    ],
)
def test_targets_that_do_not_exist_are_told_with_those_that_do(family: str, targets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        facts(family, targets=targets)
    assert len(error.value.problems) == len(targets)


def test_a_model_without_blocks_is_refused() -> None:
    known = inspect_model(tiny_config("albert"), "sequence_classification")
    with pytest.raises(ConfigError, match=r"adapter.type: 'lora' given, but the model \(albert\) has no linear layers in a chain of blocks"):
        facts_with_adapters(known, AdapterConfig(type="lora"))


# --- what learns ------------------------------------------------------------------------------------------------------------------


def test_trainable_adds_and_frozen_takes_away() -> None:
    known = facts("bert", targets=["query"])
    assert "bert.pooler.dense.weight" in trainable_names(known, ["bert.pooler"], [])
    assert not trainable_names(known, [], ["head"]) & known.classification_head
    kept = trainable_names(known, [], ["bert.encoder.layer.0"])
    assert {name for name in known.adapter_names if ".layer.0." in name}.isdisjoint(kept)


def test_what_cannot_learn_beside_adapters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainable: .*query.bias.* would learn, but the layer carries an adapter"):
        trainable_names(facts("bert", targets=["query"]), ["*.bias"], [])
    with pytest.raises(ConfigError, match=r"trainable: transformer.wte.weight is shared by two modules"):
        trainable_names(facts("gpt2"), ["transformer.wte"], [])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_adapters_are_in_fp32_on_a_narrow_base(precision: str) -> None:
    problem = adapter_problem("llama", precision=precision, adapter={"type": "dora", "rank": 2})
    config = run_config(problem, **LOCAL)
    known = facts_of(problem, config)
    stage, _ = build_stage(config, hf_config_of(problem), known, StageSpan(0, 1, True, False), CPU, None)
    for name, parameter in stage.model.named_parameters():
        narrow = known.canonical_name(name) not in known.adapter_names
        assert (parameter.dtype != torch.float32) == narrow, name


def test_a_parameter_without_a_gradient_stops_the_first_update() -> None:
    strategy = build(adapter_problem("bert"), LOCAL)
    strategy.stages[0].model.register_parameter("forgotten", nn.Parameter(torch.zeros(2)))
    with pytest.raises(ModelError, match="frozen: forgotten should learn, but the loss of the first update gives no gradient there"):
        strategy.train_step(make_batches(adapter_problem("bert"))[0], 1e-3)


# --- checkpoints and exports --------------------------------------------------------------------------------------------------------


def planned_run(problem: Problem, base: Path) -> PlannedRun:
    config = run_config(problem, **LOCAL)
    config.model.path, config.model.init = str(base), "pretrained"
    hf_config, known = hf_config_of(problem), facts_of(problem, config)
    world = World("cpu", 1)
    return PlannedRun(config, hf_config, known, make_plan(config, known, world), 2, Forecast(config, hf_config, known, world, 2))


def train_and_save(problem: Problem, base: Path, updates: int = 3, start: Path | None = None, first: int = 0) -> tuple[Strategy, Path]:
    strategy = build(problem, LOCAL, str(base))
    if start is not None:
        load_into(strategy, start)
    for batch in make_batches(problem)[first:updates]:
        strategy.train_step(batch, 1e-2)
    return strategy, save_checkpoint(base.parent / "checkpoints", RunState(step=updates), streams_of(strategy), ALONE)


def sample(problem: Problem) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in make_batches(problem)[0].tensors.items() if name != "labels"}


def logits(model: Any, problem: Problem) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(**sample(problem)).logits
    return found


EXPORTS: dict[str, Problem] = {
    "llama-lora": adapter_problem("llama"),
    "gpt2-rslora": adapter_problem("gpt2", adapter={"type": "rslora", "rank": 4, "alpha": 4}),
    "bert-dora-with-head-and-pooler": adapter_problem(
        "bert", adapter={"type": "dora", "rank": 4, "targets": ["query", "value"]}, trainable=["bert.pooler"]
    ),
    "bert-norm-weights": adapter_problem("bert", adapter={"type": "lora", "rank": 4, "targets": ["query"]}, trainable=["*.LayerNorm.weight"]),
    "llama-nf4": adapter_problem("llama", quantize="nf4"),
    # Its files hold buffers.
    "deepseek_v3-attention": adapter_problem("deepseek_v3", adapter={"type": "lora", "rank": 4, "targets": ["q_b_proj", "o_proj"]}),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_exports_have_the_trained_models_logits(name: str, tmp_path: Path) -> None:
    import peft

    problem = EXPORTS[name]
    base = tmp_path / "base"
    save_base(problem.family, base)
    strategy, checkpoint = train_and_save(problem, base)
    planned = planned_run(problem, base)
    export_checkpoint(planned, checkpoint, TOKENIZER, tmp_path / "export")
    hf_class = auto_class(task_of(problem.family))
    with_adapter = logits(peft.PeftModel.from_pretrained(hf_class.from_pretrained(base), tmp_path / "export"), problem)
    untrained = logits(hf_class.from_pretrained(base), problem)
    assert largest_gap(with_adapter, untrained) > 1e-3  # what was trained is in it
    if problem.config != EXPORTS["llama-nf4"].config:
        with torch.no_grad():
            trained = strategy.stages[0].eval()(**sample(problem))
        assert largest_gap(with_adapter, trained) <= 1e-5
    merged = exports.export_merged(planned, checkpoint, TOKENIZER, tmp_path / "merged")
    assert merged.difference <= merged.tolerance
    plain = logits(hf_class.from_pretrained(tmp_path / "merged"), problem)
    assert largest_gap(plain, with_adapter) <= 1e-4
    stored, original = (load_file(tmp_path / folder / "model.safetensors") for folder in ("merged", "base"))
    assert stored.keys() == original.keys()


def test_a_merge_that_changes_the_outputs_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = adapter_problem("llama")
    save_base("llama", tmp_path / "base")
    _, checkpoint = train_and_save(problem, tmp_path / "base", updates=1)
    monkeypatch.setitem(exports.MERGE_TOLERANCE, "fp32", -1.0)
    with pytest.raises(CheckpointError, match=r"export --merge: merged model against base .* nothing was written"):
        exports.export_merged(planned_run(problem, tmp_path / "base"), checkpoint, TOKENIZER, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "checkpoints"]


def test_merge_without_an_adapter_is_refused(tmp_path: Path) -> None:
    save_base("llama", tmp_path / "base")
    planned = planned_run(adapter_problem("llama", adapter={"type": "none"}), tmp_path / "base")
    with pytest.raises(ConfigError, match=r"export --merge: adapter.type is none"):
        exports.export_merged(planned, tmp_path, TOKENIZER, tmp_path / "merged")


def test_a_checkpoint_holds_what_learns_and_resumes_exactly(tmp_path: Path) -> None:
    from mpfinetune.training.tensor_files import read_tensors

    problem = adapter_problem("bert", quantize="nf4", optimizer={"name": "adamw_8bit", "lr": 1e-2})
    base = tmp_path / "base"
    save_base("bert", base)
    whole, _ = train_and_save(problem, base)
    _, checkpoint = train_and_save(problem, base, updates=2)
    held = set(read_tensors(checkpoint, "weights"))
    assert held == {name for name, p in whole.named_parameters().items() if p.requires_grad} == whole.saved_names()
    resumed, _ = train_and_save(problem, base, start=checkpoint, first=2)
    for name, parameter in whole.named_parameters().items():
        assert torch.equal(parameter, resumed.named_parameters()[name]), name


def test_what_no_file_holds_is_in_the_checkpoint_too(tmp_path: Path) -> None:
    """A pooler that is drawn and frozen would else be drawn otherwise by whoever loads the adapter."""
    from transformers import BertModel

    base = tmp_path / "base"
    BertModel(hf_config_of(adapter_problem("bert")), add_pooling_layer=False).save_pretrained(base)
    strategy, checkpoint = train_and_save(adapter_problem("bert"), base, updates=1)
    assert {"bert.pooler.dense.weight", "classifier.weight"} <= strategy.saved_names()
    planned = planned_run(adapter_problem("bert"), base)
    export_checkpoint(planned, checkpoint, TOKENIZER, tmp_path / "export")
    import peft

    loaded = peft.PeftModel.from_pretrained(auto_class("sequence_classification").from_pretrained(base), tmp_path / "export")
    with torch.no_grad():
        assert largest_gap(logits(loaded, adapter_problem("bert")), strategy.stages[0].eval()(**sample(adapter_problem("bert")))) <= 1e-5
