"""AdamW and SGD over named parameters, with fp32 master weights where the weights themselves are narrower.

A new optimizer is one builder and one row in ``BUILDERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpfinetune.config import OptimizerConfig


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices: norms' weights (one dimension) and biases, also those of experts [E, F], are left out."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def _adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.betas[0], settings.betas[1]), eps=settings.eps)


def _sgd(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)


BUILDERS: dict[str, Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]] = {"adamw": _adamw, "sgd": _sgd}


class NamedOptimizer:
    """torch's optimizer over this rank's parameters, its state addressed by parameter name."""

    def __init__(self, named_parameters: dict[str, nn.Parameter], settings: OptimizerConfig) -> None:
        self.parameters = {name: parameter for name, parameter in named_parameters.items() if parameter.requires_grad}
        self.masters = {name: self._master(parameter) for name, parameter in self.parameters.items()}
        groups = [
            {"params": [self.masters[name] for name, p in self.parameters.items() if decays(name, p) is decayed], "weight_decay": decay}
            for decayed, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        self.optimizer = BUILDERS[settings.name]([group for group in groups if group["params"]], settings)

    @staticmethod
    def _master(parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        # Sums of many microbatches in bf16 would lose what is smaller than 1/256 of the sum.
        parameter.grad_dtype = torch.float32
        return parameter.detach().float().requires_grad_()

    @torch.no_grad()
    def step(self, lr: float, gradient_factor: float) -> None:
        """One update with the gradients multiplied by ``gradient_factor`` (clipping)."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if gradient_factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, gradient_factor)
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.grad = self.parameters[name].grad
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._copy_masters_back()

    def zero_grad(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    @torch.no_grad()
    def _copy_masters_back(self) -> None:
        narrow = [name for name, master in self.masters.items() if master is not self.parameters[name]]
        if narrow:
            torch._foreach_copy_([self.parameters[name] for name in narrow], [self.masters[name] for name in narrow])

    def state_tensors(self) -> dict[str, Tensor]:
        """``name/state`` to tensor, for example ``model.norm.weight/exp_avg``; the live tensors, not copies."""
        return {
            f"{name}/{key}": value
            for name, master in self.masters.items()
            for key, value in self.optimizer.state.get(master, {}).items()
            if isinstance(value, Tensor)
        }

    def weight_tensors(self) -> dict[str, Tensor]:
        """The weights in full precision: the masters where there are any."""
        return {name: master.detach() for name, master in self.masters.items()}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        """Put back what ``weight_tensors`` and ``state_tensors`` gave, for the names of this rank."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
            found = {key.rpartition("/")[2]: value for key, value in states.items() if key.rpartition("/")[0] == name}
            if found:
                self.optimizer.state[master] = {key: self._placed(value, master) for key, value in found.items()}
        self._copy_masters_back()

    @staticmethod
    def _placed(value: Tensor, master: Tensor) -> Tensor:
        # torch keeps AdamW's step counter on the CPU; the moments live beside their master.
        return value.clone() if value.ndim == 0 else value.to(master.device, copy=True)
