"""The update rule by parameter name: what decays, fp32 masters beside bf16 weights, and a state that goes through a checkpoint bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpfinetune.config import OptimizerConfig
from mpfinetune.training.optim import NamedOptimizer, decays

SETTINGS = {
    "adamw": OptimizerConfig(name="adamw", weight_decay=0.1),
    "sgd": OptimizerConfig(name="sgd", momentum=0.9, weight_decay=0.1),
    "plain_sgd": OptimizerConfig(name="sgd", momentum=0.0, weight_decay=0.0),
}


def parameters_of(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"layer.weight": (4, 3), "layer.bias": (4,), "norm.weight": (3,), "experts.down_proj_bias": (2, 3)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def give_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    """Through autograd, so that ``grad_dtype`` has its say."""
    generator = torch.Generator().manual_seed(100 + step)
    sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in parameters.values()).backward()  # type: ignore[union-attr]


def run(optimizer: NamedOptimizer, steps: range, factor: float = 1.0) -> None:
    for step in steps:
        give_gradients(optimizer.parameters, step)
        optimizer.step(1e-2 / (1 + step), factor)
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.0.mlp.up_proj.weight", (4, 4), True),
        ("model.embed_tokens.weight", (9, 4), True),
        ("experts.gate_up_proj", (2, 4, 8), True),
        ("encoder.relative_attention_bias.weight", (32, 4), True),
        ("model.norm.weight", (4,), False),
        ("layer.bias", (4,), False),
        ("experts.down_proj_bias", (2, 4), False),
        ("scale", (), False),
    ],
)
def test_what_decays(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert decays(name, shape) is expected


def test_decay_alone_moves_the_matrices_only() -> None:
    parameters = parameters_of()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = NamedOptimizer(parameters, SETTINGS["adamw"])
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5, 1.0)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.5 * 0.1 if name == "layer.weight" else 1.0))


@pytest.mark.parametrize("name", SETTINGS)
def test_equals_torchs_optimizer(name: str) -> None:
    settings, mine, plain = SETTINGS[name], parameters_of(), parameters_of()
    groups: list[dict[str, Any]] = [
        {"params": [plain["layer.weight"]], "weight_decay": settings.weight_decay},
        {"params": [p for key, p in plain.items() if key != "layer.weight"], "weight_decay": 0.0},
    ]
    reference: torch.optim.Optimizer = (
        torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=settings.eps) if name == "adamw" else torch.optim.SGD(groups, momentum=settings.momentum)
    )
    optimizer = NamedOptimizer(mine, settings)
    for step in range(3):
        for group in reference.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        give_gradients(plain, step)
        for parameter in plain.values():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        reference.step()
        reference.zero_grad()
        run(optimizer, range(step, step + 1), factor=0.5)
    assert all(torch.equal(mine[key], plain[key]) for key in mine)


def test_frozen_parameters_are_left_out() -> None:
    parameters = parameters_of()
    parameters["layer.weight"].requires_grad_(False)
    optimizer = NamedOptimizer(parameters, SETTINGS["adamw"])
    assert "layer.weight" not in optimizer.parameters and "layer.weight" not in optimizer.weight_tensors()


def test_nothing_to_train_but_norms() -> None:
    norm = nn.Parameter(torch.ones(3))
    optimizer = NamedOptimizer({"norm.weight": norm}, SETTINGS["adamw"])
    run(optimizer, range(1))
    assert not torch.equal(norm, torch.ones(3))


# --- bf16 -------------------------------------------------------------------------------------------------------------------------


def test_small_steps_add_up_in_the_masters() -> None:
    """A step of 1e-3 on a weight of 1 is lost in bf16, whose next number below 1 is 1 - 1/256."""
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = NamedOptimizer({"weight": weight}, SETTINGS["plain_sgd"])
    for step in range(100):
        weight.grad = torch.ones(2, 2)
        optimizer.step(1e-3, 1.0)
        optimizer.zero_grad()
        assert step > 0 or bool((weight == 1).all())
    assert weight.dtype == torch.bfloat16
    torch.testing.assert_close(optimizer.weight_tensors()["weight"], torch.full((2, 2), 0.9))
    torch.testing.assert_close(weight.detach().float(), torch.full((2, 2), 0.9), atol=4e-3, rtol=0)


def test_gradients_of_many_microbatches_are_summed_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    NamedOptimizer({"weight": weight}, SETTINGS["adamw"])
    for _ in range(1000):
        weight.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert weight.grad.tolist() == [1000.0, 1000.0]  # in bf16 the sum stays at 256


@pytest.mark.parametrize("name", SETTINGS)
def test_the_masters_take_the_steps_of_fp32(name: str) -> None:
    narrow = parameters_of(torch.bfloat16)
    wide = {key: nn.Parameter(p.detach().float()) for key, p in narrow.items()}
    optimizers = [NamedOptimizer(parameters, SETTINGS[name]) for parameters in (narrow, wide)]
    for step in range(3):
        give_gradients(narrow, step)
        for key, parameter in wide.items():
            gradient = narrow[key].grad
            parameter.grad = None if gradient is None else gradient.clone()
        for optimizer in optimizers:
            optimizer.step(1e-2, 1.0)
            optimizer.zero_grad()
    for key, master in optimizers[0].weight_tensors().items():
        assert master.dtype == torch.float32 and torch.equal(master, wide[key])
        assert torch.equal(narrow[key], master.bfloat16())


def test_zero_grad_frees_the_gradients_of_weights_and_masters() -> None:
    parameters = parameters_of(torch.bfloat16)
    optimizer = NamedOptimizer(parameters, SETTINGS["adamw"])
    run(optimizer, range(1))
    assert all(tensor.grad is None for tensor in (*parameters.values(), *optimizer.masters.values()))


# --- state ------------------------------------------------------------------------------------------------------------------------


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_loaded_run_goes_on_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    whole = NamedOptimizer(parameters_of(dtype), SETTINGS[name])
    run(whole, range(5))
    first = NamedOptimizer(parameters_of(dtype), SETTINGS[name])
    run(first, range(2))
    weights, states = copied(first.weight_tensors()), copied(first.state_tensors())
    second = NamedOptimizer({key: nn.Parameter(torch.zeros_like(p)) for key, p in parameters_of(dtype).items()}, SETTINGS[name])
    second.load(weights, states)
    assert copied(second.state_tensors()).keys() == states.keys()
    assert all(torch.equal(p, first.parameters[key]) for key, p in second.parameters.items())
    run(second, range(2, 5))
    for key, value in whole.weight_tensors().items():
        assert torch.equal(second.weight_tensors()[key], value)
        assert torch.equal(second.parameters[key], whole.parameters[key])
    assert all(torch.equal(second.state_tensors()[key], value) for key, value in whole.state_tensors().items())


def test_loading_copies() -> None:
    """The tensors given may be views of a file; a step after loading must not write there."""
    first = NamedOptimizer(parameters_of(), SETTINGS["adamw"])
    run(first, range(1))
    weights, states = copied(first.weight_tensors()), copied(first.state_tensors())
    kept = copied(states)
    second = NamedOptimizer(parameters_of(), SETTINGS["adamw"])
    second.load(weights, states)
    run(second, range(1, 3))
    assert all(torch.equal(states[key], value) for key, value in kept.items())


def test_state_names() -> None:
    optimizer = NamedOptimizer(parameters_of(), SETTINGS["adamw"])
    assert optimizer.state_tensors() == {}
    run(optimizer, range(1))
    assert set(optimizer.state_tensors()) == {f"{name}/{key}" for name in optimizer.parameters for key in ("step", "exp_avg", "exp_avg_sq")}


def test_another_parameters_state_is_not_taken() -> None:
    """Names that begin alike: layer.weight and layer.weight_2."""
    pair = {"a.weight": nn.Parameter(torch.ones(2, 2)), "a.weight_2": nn.Parameter(torch.ones(3, 3))}
    optimizer = NamedOptimizer(pair, SETTINGS["adamw"])
    run(optimizer, range(1))
    again = NamedOptimizer({key: nn.Parameter(torch.zeros_like(p)) for key, p in pair.items()}, SETTINGS["adamw"])
    again.load(copied(optimizer.weight_tensors()), copied(optimizer.state_tensors()))
    assert again.state_tensors()["a.weight/exp_avg"].shape == (2, 2)
