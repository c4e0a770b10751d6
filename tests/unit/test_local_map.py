"""Maps of `strategy: local`: the resolver and its report, which tensors move, and the same numbers as the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

from mpfinetune.errors import ConfigError
from mpfinetune.models.architecture import construct_model
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.planning.device_map import Placement, Transfer, parameters_by_device, resolve_device_map, transfers
from mpfinetune.strategies.dispatch import dispatch
from tests.families import task_of, tiny_config
from tests.multiproc.training_cases import (
    CPU,
    SUB_BLOCK_MAPS,
    Problem,
    build,
    differences,
    local_over,
    make_batches,
    plain_loop,
    run_updates,
    worst_of,
)

TOLERANCE = 1e-5
# A second device on a machine without one: under FakeTensorMode torch refuses to mix tensors of the CPU with those of "lazy".
SECOND = torch.device("lazy:0")

# One of each way to call blocks, to make masks and positions and to tie; all 34 of tests/families passed when this was written.
FAKE_DEVICE_FAMILIES = ("bert", "bloom", "electra", "gemma3_text", "gpt2", "gpt_neo", "gpt_oss", "llama", "mixtral", "modernbert", "mpnet", "opt")


@pytest.fixture(scope="module")
def llama() -> ModelFacts:
    return inspect_model(tiny_config("llama"), "causal_lm")


@pytest.fixture(scope="module")
def gpt2() -> ModelFacts:
    return inspect_model(tiny_config("gpt2"), "causal_lm")


def problems_of(device_map: dict[str, int], facts: ModelFacts, devices: int = 2) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        resolve_device_map(device_map, facts, devices)
    return raised.value.problems


# --- the resolver -----------------------------------------------------------------------------------------------------------------


def test_every_parameter_gets_the_device_of_the_deepest_key(llama: ModelFacts) -> None:
    placement = resolve_device_map(
        {"": 0, "model.layers.*": 1, "model.layers.*.mlp": 0, "model.layers.2.mlp.up_proj.weight": 0, "*.norm": 1}, llama, 2
    )
    for name in llama.parameters:
        in_block, in_mlp = name.startswith("model.layers."), ".mlp." in name
        assert placement.device_of(name) == int((in_block and not in_mlp) or name == "model.norm.weight"), name
    assert placement.mixed == {"", "model", "model.layers", *(f"model.layers.{index}" for index in range(4))}
    assert placement.homes["model.layers.1"] == 1


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_wins_over_a_glob_whatever_the_order(llama: ModelFacts, order: int) -> None:
    items = [("", 0), ("model.layers.*", 1), ("model.layers.3", 0), ("*.mlp", 0), ("model.layers.1.mlp", 1)][::order]
    placement = resolve_device_map(dict(items), llama, 2)
    assert [placement.device_of(f"model.layers.{index}.self_attn.q_proj") for index in range(4)] == [1, 1, 1, 0]
    assert [placement.device_of(f"model.layers.{index}.mlp.up_proj.weight") for index in range(4)] == [0, 1, 0, 0]


def test_modules_without_parameters_follow_what_is_around_them(llama: ModelFacts) -> None:
    placement = resolve_device_map(SUB_BLOCK_MAPS["llama"], llama, 2)
    assert placement.device_of("model.rotary_emb.inv_freq") == placement.homes["model"] == 0
    assert placement.device_of("model.layers.0.mlp.act_fn") == 1


def test_all_mistakes_of_a_map_are_reported_at_once(llama: ModelFacts) -> None:
    found = "\n".join(problems_of({"model.embed_tokens": 0, "model.layerz.1": 1, "model.layers.0": 2, "model.layers.*.mpl": 0, "lm_head": -1}, llama))
    assert "'model.layerz.1' is no module of this model (did you mean 'model.layers.1'?)" in found
    assert "'model.layers.*.mpl' is no module of this model (did you mean 'model.layers.0.mlp'?)" in found
    assert "'model.layers.0' is given device 2, but the run uses 2 device(s), numbered 0-1; change the number, or devices" in found
    assert "'lm_head' is given device -1" in found
    assert "missing, on no device: model.layers.1, model.layers.2, model.layers.3, model.norm (" in found


def test_a_map_of_another_family_is_refused_by_name(llama: ModelFacts) -> None:
    found = problems_of({"transformer.wte": 0, "transformer.h.0": 0, "transformer.h.1": 1}, llama)
    assert sum("is no module of this model" in line for line in found) == 3 and any("missing, on no device" in line for line in found)


def test_keys_that_contradict_each_other_are_refused(llama: ModelFacts) -> None:
    (line,) = problems_of({"": 0, "model.layers.*.mlp": 0, "model.layers.?.mlp": 1}, llama)
    assert line.startswith("partition.device_map: overlapping, 'model.layers.*.mlp' (0) and 'model.layers.?.mlp' (1) match the same modules")


def test_the_parameters_of_one_module_stay_together(gpt2: ModelFacts) -> None:
    (line,) = problems_of({"": 0, "transformer.h.1.mlp.c_fc.bias": 1}, gpt2)
    assert "the parameters of 'transformer.h.1.mlp.c_fc' are given several devices" in line


def test_tied_weights_have_one_owner_and_the_user_is_told(gpt2: ModelFacts) -> None:
    placement = resolve_device_map({"": 0, "lm_head": 1, "transformer.h.*": 1}, gpt2, 2)
    assert placement.device_of("lm_head.weight") == placement.device_of("transformer.wte.weight") == 0
    assert len(placement.notes) == 1 and "'lm_head' shares its weight with 'transformer.wte'" in placement.notes[0]
    untold = resolve_device_map({"transformer": 1}, gpt2, 2)  # accelerate leaves the tied name out of its maps
    assert parameters_by_device(placement, gpt2)[0] == sum(gpt2.parameters[f"transformer.{n}.weight"].numel for n in ("wte", "wpe", "ln_f")) + 32
    assert untold.device_of("lm_head.weight") == 1 and untold.notes == ()


def test_outputs_come_back_inside_a_block_and_not_between_blocks_or_after_them(llama: ModelFacts) -> None:
    moved = transfers(resolve_device_map(SUB_BLOCK_MAPS["llama"], llama, 2), llama)
    assert moved["model.layers.1"] == Transfer(0, bring_back=False)
    assert moved["model.layers.1.mlp"] == Transfer(1, bring_back=True)
    assert moved["model.layers.1.self_attn"] == Transfer(0, bring_back=True)
    assert moved["model.embed_tokens"] == Transfer(0, bring_back=True)
    assert moved["lm_head"] == Transfer(1, bring_back=False)  # logits stay where they are
    assert "model.layers.1.mlp.up_proj" not in moved and "model" not in moved


def test_nothing_moves_on_one_device(llama: ModelFacts) -> None:
    assert transfers(resolve_device_map({"": 1}, llama, 2), llama) == {}


# --- two devices that torch does not let mix --------------------------------------------------------------------------------------


def place(model: nn.Module, placement: Placement, devices: list[torch.device]) -> None:
    """Move parameters, tied ones once, and buffers: what ``load_stage`` does for weights that exist."""
    placed: dict[int, nn.Parameter] = {}
    for owner, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            device = devices[placement.device_of(f"{owner}.{name}".lstrip("."))]
            setattr(module, name, placed.setdefault(id(parameter), nn.Parameter(parameter.detach().to(device))))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer.to(devices[placement.device_of(f"{owner}.{name}".lstrip("."))]))


def every_second_part(facts: ModelFacts) -> dict[str, int]:
    """Every second child of every block, and the head, on device 1."""
    first = f"{facts.blocks_path}.0."
    children = sorted({name.removeprefix(first).split(".")[0] for name in facts.parameters if name.startswith(first)})
    return {"": 0, **{f"{facts.blocks_path}.*.{child}": 1 for child in children[1::2]}, **dict.fromkeys(facts.epilogue_modules, 1)}


@pytest.mark.parametrize("family", FAKE_DEVICE_FAMILIES)
def test_no_operation_meets_tensors_of_two_devices(family: str) -> None:
    """Forward and backward of a sub-block map; masks, rotary tables and position ids follow, gradients are where their parameters are."""
    facts = inspect_model(tiny_config(family), task_of(family))  # type: ignore[arg-type]
    placement = resolve_device_map(every_second_part(facts), facts, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        # bf16: the grouped product of mixture-of-experts models has no other fake kernel
        model: Any = construct_model(tiny_config(family), task_of(family), "auto", torch.bfloat16)  # type: ignore[arg-type]
        place(model, placement, [CPU, SECOND])
        dispatch(model, facts, placement, [CPU, SECOND])
        tokens = torch.ones(2, 8, dtype=torch.int64)
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        logits.float().sum().backward()
        devices = {name: parameter.device for name, parameter in model.named_parameters()}
        assert set(devices.values()) == {CPU, SECOND}
        assert all(p.grad is not None and p.grad.device == p.device for p in model.parameters())


def test_without_the_hooks_the_same_run_mixes_devices(llama: ModelFacts) -> None:
    """The test above can fail."""
    placement = resolve_device_map(every_second_part(llama), llama, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model: Any = construct_model(tiny_config("llama"), "causal_lm", "auto", torch.bfloat16)
        place(model, placement, [CPU, SECOND])
        with pytest.raises(RuntimeError, match="two devices"):
            model(input_ids=torch.ones(2, 8, dtype=torch.int64))


# --- training ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(SUB_BLOCK_MAPS))
def test_three_updates_equal_the_plain_loop(family: str) -> None:
    problem = Problem(family)
    strategy = build(problem, local_over(device_map=SUB_BLOCK_MAPS[family]))
    assert worst_of(differences(run_updates(strategy, problem), plain_loop(problem)))[1] < TOLERANCE


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_weights_are_read_straight_to_their_devices(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is asked for each tensor's own device; also where it fuses experts, and for a name that the model does not have."""
    config = tiny_config(family)
    facts = inspect_model(config, "causal_lm")
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({**stored, "a.tensor.of.another.model": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    device_map = {"": 0, f"{facts.blocks_path}.*.mlp": 1}
    placement = resolve_device_map(device_map, facts, 2)
    asked: dict[str, int] = {}
    monkeypatch.setattr(Placement, "device_of", lambda self, name, real=Placement.device_of: asked.setdefault(name, real(self, name)))
    strategy = build(Problem(family), local_over(device_map=device_map), tmp_path)
    for name, parameter in strategy.named_parameters().items():
        assert asked[name] == int(".mlp." in name) == placement.homes[name.rpartition(".")[0]], name
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_tied_weights_are_one_parameter_after_the_map() -> None:
    strategy = build(Problem("gpt2"), local_over(device_map=SUB_BLOCK_MAPS["gpt2"]))
    model = strategy.stages[0].model
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    assert "lm_head.weight" not in strategy.named_parameters()


def test_batch_and_labels_go_where_they_are_needed() -> None:
    """Input ids to the embeddings' device, labels to the logits': recorded, since both are the CPU here."""
    problem = Problem("llama")
    strategy = build(problem, local_over(device_map={"": 1, "lm_head": 0}))
    asked: list[int] = []
    original = strategy.context.nth_device
    strategy.context.nth_device = lambda number: asked.append(number) or original(number)  # type: ignore[method-assign, func-returns-value]
    strategy.train_step(make_batches(problem)[0], 1e-3)
    assert asked == [1]
