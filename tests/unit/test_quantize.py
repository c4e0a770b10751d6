"""Quantised bases: which layers, in how many bytes, with which numbers, and that evaluation leaves them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpfinetune.errors import ConfigError
from mpfinetune.models.architecture import construct_model
from mpfinetune.models.buffers import persistent_buffers
from mpfinetune.models.facts import inspect_model
from mpfinetune.models.quantize import in_words, left_layers, quantised_layers
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.planning.tensor_bytes import learning_names
from mpfinetune.strategies.build import build_stage
from tests.families import tiny_config
from tests.multiproc.training_cases import adapter_problem, build, facts_of, hf_config_of, make_batches, run_config, task_of

LOCAL: dict[str, Any] = {"strategy": "local", "partition": {}}
CPU = torch.device("cpu")


def stage_of(family: str, folder: Path | None, **changes: Any) -> Any:
    problem = adapter_problem(family, **changes)
    config = run_config(problem, **LOCAL)
    facts = facts_of(problem, config)
    return build_stage(config, hf_config_of(problem), facts, StageSpan(0, facts.num_blocks, True, True), CPU, folder)[0]


def save_base(family: str, folder: Path) -> Any:
    """A folder with random weights, as transformers writes it; also the model."""
    torch.manual_seed(1)
    model = construct_model(hf_config_of(adapter_problem(family)), task_of(family), "auto", torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for buffer in persistent_buffers(model).values():  # deepseek_v3's, which choose the experts
        torch.nn.init.normal_(buffer)
    model.save_pretrained(folder)
    return model.eval()


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters with bitsandbytes' statistics."""
    tensors: list[torch.Tensor] = []
    for parameter in model.parameters():
        tensors.append(parameter.data)
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
        if getattr(parameter, "SCB", None) is not None:
            tensors.append(parameter.SCB)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_read_weights_are_those_that_bitsandbytes_makes(family: str, kind: str, tmp_path: Path) -> None:
    import bitsandbytes.functional as functional

    model = save_base(family, tmp_path)
    stage = stage_of(family, tmp_path, quantize=kind)
    facts = inspect_model(hf_config_of(adapter_problem(family)), task_of(family))
    assert facts.linears
    for name, linear in facts.linears.items():
        weight = model.get_parameter(f"{name}.weight").detach()
        weight = (weight.T if linear.transposed else weight).contiguous()
        own = stage.model.get_submodule(name).base_layer.weight
        if kind == "nf4":
            expected, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
            assert torch.equal(functional.dequantize_4bit(own.data, own.quant_state), functional.dequantize_4bit(expected, state))
        else:
            expected, scales, _ = functional.int8_vectorwise_quant(weight.half())
            assert torch.equal(own.SCB, scales)
        assert torch.equal(own.data, expected) and not own.requires_grad
    batch = {key: value for key, value in make_batches(adapter_problem(family))[0].tensors.items() if key != "labels"}
    with torch.no_grad():
        difference = (stage.eval()(**batch) - model(**batch).logits).abs().max()
    assert 0 < difference < {"nf4": 0.6, "int8": 0.1}[kind], float(difference)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_planned_bytes_are_the_held_ones(kind: str) -> None:
    problem = adapter_problem("llama", quantize=kind, precision="bf16")
    config = run_config(problem, **LOCAL)
    plan = make_plan(config, facts_of(problem, config), World("cpu", 1))
    assert held_bytes(stage_of("llama", None, quantize=kind, precision="bf16").model) == plan.ranks[0].weight_bytes


def test_only_adapters_cost_gradients_and_states() -> None:
    problem = adapter_problem("llama", quantize="nf4", precision="bf16")
    config = run_config(problem, **LOCAL)
    facts = facts_of(problem, config)
    adapters = facts.numel(facts.adapter_names)
    row = make_plan(config, facts, World("cpu", 1)).ranks[0]
    assert row.gradient_bytes == adapters * 4 and row.optimizer_bytes == adapters * 8  # fp32 adapters need no master


def test_short_rows_keep_their_precision_and_are_named() -> None:
    facts = inspect_model(tiny_config("llama", hidden_size=64, intermediate_size=96), "causal_lm")
    left = left_layers(facts, "nf4")
    assert set(left) == {f"model.layers.{block}.mlp.down_proj" for block in range(4)}
    assert "96 weights is no multiple of nf4's block of 64" in next(iter(left.values()))
    assert "24 of 28 linear layers of the blocks in nf4" in in_words(facts, "nf4")
    assert "so do 4 layers: down_proj (a row of 96 weights" in in_words(facts, "nf4")
    assert not set(left) & set(quantised_layers(facts, "nf4")) and left_layers(facts, "int8") == {}


def test_a_model_without_a_layer_to_quantise_is_refused() -> None:
    facts = inspect_model(tiny_config("llama"), "causal_lm")
    with pytest.raises(ConfigError, match=r"quantize: 'nf4' given, but no layer of the model \(llama\) can be: a row of 32 weights"):
        quantised_layers(facts, "nf4")


def test_a_quantised_weight_cannot_learn() -> None:
    problem = adapter_problem("llama", quantize="nf4", adapter={"type": "lora", "targets": ["q_proj"]}, trainable=["*.up_proj.*"])
    config = run_config(problem, **LOCAL)
    with pytest.raises(ConfigError, match=r"trainable: model.layers.0.mlp.up_proj.weight.* would learn, but quantize: nf4"):
        learning_names(config, facts_of(problem, config))


def test_quantise_without_adapter_is_refused_by_the_config() -> None:
    with pytest.raises(ConfigError, match="quantize: 'nf4' given, must be none without an adapter"):
        run_config(adapter_problem("llama", quantize="nf4", adapter={"type": "none"}))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_evaluation_and_training_change_no_quantised_byte_and_move_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes as bnb

    problem = adapter_problem("llama", quantize=kind)
    strategy = build(problem, LOCAL)
    before = {name: p.detach().clone() for name, p in strategy.named_parameters().items() if not p.requires_grad}
    for kind_of_parameter in (bnb.nn.Params4bit, bnb.nn.Int8Params):
        monkeypatch.setattr(kind_of_parameter, "to", lambda *a, **k: pytest.fail("a quantised parameter was moved"))
    batch = make_batches(problem)[0]
    strategy.evaluate(batch, lambda out, labels: None)
    strategy.train_step(batch, 1e-2)
    strategy.evaluate(batch, lambda out, labels: None)
    after = strategy.named_parameters()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
