"""8-bit optimizers: states of the types asked for, resumed exactly, without what bitsandbytes keeps per process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpfinetune.config import OptimizerConfig
from mpfinetune.errors import CheckpointError
from mpfinetune.planning.tensor_bytes import eight_bit_state_bytes
from mpfinetune.training.checkpoint import RunState, check_identity, save_checkpoint
from mpfinetune.training.optim import NamedOptimizer

NAMES = ["adamw_8bit", "paged_adamw_8bit"]
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"embed.weight": (96, 64), "layer.weight": (128, 128), "layer.bias": (128,), "odd.weight": (65, 67)}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def optimizer(named: dict[str, nn.Parameter], name: str = "adamw_8bit", **settings: Any) -> NamedOptimizer:
    return NamedOptimizer(named, OptimizerConfig(name=name, lr=1e-2, **settings), {"embed.weight"})  # type: ignore[arg-type]


def updates(built: NamedOptimizer, first: int, last: int) -> None:
    for update in range(first, last):
        generator = torch.Generator().manual_seed(update)
        for parameter in built.parameters.values():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient
        built.step(1e-2, 0.5)
        built.zero_grad()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_three_and_three_updates_are_six(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    whole = optimizer(parameters(dtype), name)
    updates(whole, 0, 6)
    first = optimizer(parameters(dtype), name)
    updates(first, 0, 3)
    save_file({key: value.detach().contiguous() for key, value in first.state_tensors().items()}, tmp_path / "states")
    save_file({key: value.clone() for key, value in first.weight_tensors().items()}, tmp_path / "weights")
    second = optimizer(parameters(dtype), name)
    second.load(load_file(tmp_path / "weights"), load_file(tmp_path / "states"))
    updates(second, 3, 6)
    for key, value in whole.state_tensors().items():
        other = second.state_tensors()[key]
        assert other.dtype == value.dtype and torch.equal(other, value), key
    for key, weight in whole.weight_tensors().items():
        assert torch.equal(second.weight_tensors()[key], weight)
        assert torch.equal(second.parameters[key], whole.parameters[key])


@pytest.mark.parametrize("stable", [True, False])
def test_states_have_the_types_asked_for(stable: bool) -> None:
    built = optimizer(parameters(), stable_embedding=stable)
    updates(built, 0, 1)
    types = {key: value.dtype for key, value in built.state_tensors().items() if key.endswith(("state1", "state2"))}
    assert types["layer.weight/state1"] == types["odd.weight/state2"] == torch.uint8
    assert types["layer.bias/state1"] == torch.float32  # fewer than 4096 elements
    assert types["embed.weight/state1"] == types["embed.weight/state2"] == (torch.float32 if stable else torch.uint8)


@pytest.mark.parametrize("stable", [True, False])
def test_planned_bytes_are_the_held_ones(stable: bool) -> None:
    built = optimizer(parameters(), stable_embedding=stable)
    updates(built, 0, 1)
    for name, parameter in built.parameters.items():
        held = {k: v for k, v in built.state_tensors().items() if k.startswith(f"{name}/") and "qmap" not in k and "step" not in k}
        wide = stable and name == "embed.weight"
        assert sum(t.numel() * t.element_size() for t in held.values()) == eight_bit_state_bytes(parameter.numel(), wide), name


def test_a_state_of_another_type_than_asked_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    built = optimizer(parameters())
    assert built.optimizer is not None
    monkeypatch.setattr(built.optimizer.args, "optim_bits", 32)  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match=r"layer.weight: state1 is torch.float32, wanted torch.uint8"):
        updates(built, 0, 1)


def test_a_second_optimizer_does_not_inherit_the_overrides() -> None:
    updates(optimizer(parameters()), 0, 1)
    second = NamedOptimizer(parameters(), OptimizerConfig(name="adamw_8bit"))
    updates(second, 0, 1)
    assert second.state_tensors()["embed.weight/state1"].dtype == torch.uint8


def test_eight_bit_stays_near_32_bit() -> None:
    """The update is that of AdamW with rounded moments: within a small share of the steps taken."""
    exact, rounded = optimizer(parameters(), "adamw"), optimizer(parameters())
    updates(exact, 0, 6)
    updates(rounded, 0, 6)
    for name, weight in exact.weight_tensors().items():
        assert (weight - rounded.weight_tensors()[name]).abs().mean() < 0.1 * 6e-2, name


def test_states_of_another_setting_are_refused() -> None:
    first = optimizer(parameters(), stable_embedding=False)
    updates(first, 0, 1)
    with pytest.raises(CheckpointError, match=r"state1 of embed.weight is torch.uint8 .* torch.float32 here; put optimizer.name"):
        optimizer(parameters()).load(first.weight_tensors(), first.state_tensors())


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    from mpfinetune.dist import DistContext

    saved = save_checkpoint(
        tmp_path, RunState(identity={"optimizer.name": "adamw_8bit"}), {"weights": [], "optimizer": []}, DistContext(0, 1, torch.device("cpu"))
    )
    with pytest.raises(CheckpointError, match=r"optimizer.name was 'adamw_8bit' and is 'adamw'"):
        check_identity(saved, {"optimizer.name": "adamw"})


def test_a_rank_without_anything_to_learn_has_an_empty_update() -> None:
    named = parameters()
    for parameter in named.values():
        parameter.requires_grad_(False)
    for name in ("adamw", "sgd", *NAMES):
        empty = optimizer(named, name)
        empty.step(1e-2, 1.0)
        empty.load({}, {})
        assert empty.state_tensors() == {} == empty.weight_tensors()
