"""From accumulated gradients to new weights, without an engine: sum over copies and replicas, one norm, clip, one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from mpfinetune.dist import all_reduce_buckets
from mpfinetune.errors import ModelError

if TYPE_CHECKING:
    from mpfinetune.strategies.base import Strategy


class Optimizer(Protocol):
    """The update rule over the named parameters of this rank."""

    def step(self, lr: float, gradient_factor: float) -> None: ...
    def zero_grad(self) -> None: ...
    def held_bytes(self) -> int: ...
    def weight_tensors(self) -> dict[str, Tensor]: ...
    def state_tensors(self) -> dict[str, Tensor]: ...
    def load(self, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None: ...


class Update(Protocol):
    """What a strategy calls after the backward passes; DeepSpeed's engines have one of their own."""

    gradient_bytes: int  # of this rank's gradients at the last update

    @property
    def loss_scale(self) -> float: ...
    @property
    def scale_is_smallest(self) -> bool: ...
    def scale_state(self) -> tuple[float, int] | None: ...
    def load_scale_state(self, value: float, updates_since_change: int) -> None: ...
    def optimizer_bytes(self) -> tuple[int, int]: ...  # states and fp32 masters on the device, and what is offloaded from it
    def apply(self, lr: float) -> tuple[float, bool]: ...
    def drop_gradients(self) -> None: ...
    def weight_stream(self) -> Iterator[tuple[str, Tensor]]: ...  # as a checkpoint holds them; collective over the replicas
    def state_stream(self) -> Iterator[tuple[str, Tensor]]: ...
    def load(self, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None: ...
    def full_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]: ...


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16: halved after an overflow, doubled after 2000 updates without one (torch.amp.GradScaler's rule).

    Not below ``minimum``, as DeepSpeed has it: a gradient that overflows there does so by itself. Gradients below fp16's smallest number
    would vanish; scaled up they do not. All ranks see the same norm, so the scale stays equal.
    """

    value: float = 1.0
    updates_since_change: int = 0
    dynamic: bool = False
    growth_interval: int = 2000
    minimum: float = 1.0

    @classmethod
    def for_precision(cls, precision: str) -> LossScale:
        return cls(value=2.0**16, dynamic=True) if precision == "fp16" else cls()

    def note(self, overflow: bool) -> None:
        """Adapt after an update."""
        if not self.dynamic:
            return
        if overflow:
            self.value, self.updates_since_change = max(self.minimum, self.value / 2), 0
        elif self.updates_since_change + 1 >= self.growth_interval:
            self.value, self.updates_since_change = self.value * 2, 0
        else:
            self.updates_since_change += 1

    @property
    def exhausted(self) -> bool:
        """An overflow at this scale is not a matter of the scale."""
        return not self.dynamic or self.value <= self.minimum


def refuse_unreached(strategy: Strategy, reached: set[str]) -> None:
    """After the first backward pass: what should learn and has no gradient is not reached by the loss and would never move. Collective.

    Args:
        reached: names of this rank's parameters that got one; a shared parameter needs it on some rank only.

    Raises:
        ModelError: on every rank, with the names.
    """
    learning = {name for name, parameter in strategy.named_parameters().items() if parameter.requires_grad}
    gathered = strategy.context.gather_objects((learning, reached))
    missing = sorted(set().union(*(of_rank for of_rank, _ in gathered)) - set().union(*(of_rank for _, of_rank in gathered)))
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise ModelError(
            f"frozen: {shown} should learn, but the loss of the first update gives no gradient there: the model does not use it for this task. "
            "Add it to frozen (names, modules or globs), or narrow trainable."
        )


class PlainUpdate:
    """The update with torch's collectives and a ``NamedOptimizer``."""

    def __init__(self, strategy: Strategy, optimizer: Optimizer, clip_norm: float | None, scale: LossScale | None = None) -> None:
        self.strategy = strategy
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.scale = scale or LossScale()
        self.not_finite: list[str] = []  # this rank's parameters whose gradients spoilt the last update
        self._gradients_are_checked = False
        self.gradient_bytes = 0

    @property
    def loss_scale(self) -> float:
        return self.scale.value

    @property
    def scale_is_smallest(self) -> bool:
        """Whether an overflow now would not be a matter of the scale; true where nothing is scaled."""
        return self.scale.exhausted

    def scale_state(self) -> tuple[float, int] | None:
        """The dynamic loss scale and the updates since its last change; None where nothing is scaled."""
        return (self.scale.value, self.scale.updates_since_change) if self.scale.dynamic else None

    def load_scale_state(self, value: float, updates_since_change: int) -> None:
        """Put back what ``scale_state`` gave; a run in another precision ignores it."""
        if self.scale.dynamic:
            self.scale.value, self.scale.updates_since_change = value, updates_since_change

    def optimizer_bytes(self) -> tuple[int, int]:
        return self.optimizer.held_bytes(), 0

    def apply(self, lr: float) -> tuple[float, bool]:
        """One update; collective over all ranks.

        Returns:
            The norm of the unscaled gradients over all parameters, and whether it was not finite, in which case nothing was changed.

        Raises:
            ModelError: at the first update, on every rank: parameters that should learn have no gradient.
        """
        if not self._gradients_are_checked:
            parameters = self.strategy.named_parameters()
            refuse_unreached(self.strategy, {name for name, parameter in parameters.items() if parameter.grad is not None})
            self._gradients_are_checked = True
        gradients = [p.grad for p in self.strategy.named_parameters().values() if p.grad is not None]
        self.gradient_bytes = sum(gradient.nbytes for gradient in gradients)
        self._reduce_gradients()
        context = self.strategy.context
        squares = context.sum_over_world(self._own_gradient_squares() / context.replicas)
        norm = math.sqrt(float(squares)) / self.scale.value if float(squares) >= 0 else math.nan
        overflow = not math.isfinite(norm)
        self.not_finite = self._names_not_finite() if overflow else []
        if not overflow:
            clip = 1.0 if self.clip_norm is None else min(1.0, self.clip_norm / (norm + 1e-6))
            self.optimizer.step(lr, clip / self.scale.value)
        self.optimizer.zero_grad()
        self.scale.note(overflow)
        return norm, overflow

    def drop_gradients(self) -> None:
        """Forget what the passes since the last update have left."""
        self.optimizer.zero_grad()

    def weight_stream(self) -> Iterator[tuple[str, Tensor]]:
        """The live weights in full precision of what learns, by name."""
        yield from self.optimizer.weight_tensors().items()

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        """The live optimizer states as ``name/state``."""
        yield from self.optimizer.state_tensors().items()

    def load(self, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        self.optimizer.load(weights, states)

    def full_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole weight in fp32) of parameters of this rank that are not quantised: the master where there is one; no copies to change."""
        masters, parameters = self.optimizer.weight_tensors(), self.strategy.named_parameters()
        for name in names:
            yield name, masters.get(name, parameters[name].detach()).float()

    def _reduce_gradients(self) -> None:
        """Sum over the copies of shared parameters, then over the replicas."""
        self.strategy.sum_shared_gradients()
        if self.strategy.context.replicas > 1:
            parameters = self.strategy.named_parameters().values()
            all_reduce_buckets([p.grad for p in parameters if p.grad is not None], self.strategy.context.replica_group)

    def _names_not_finite(self) -> list[str]:
        parameters = self.strategy.named_parameters()
        return [name for name, p in parameters.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]

    def _own_gradient_squares(self) -> Tensor:
        """Sum of squares over the parameters of which this rank is the first holder, in fp64."""
        parameters, own = self.strategy.named_parameters(), self.strategy.first_held_names()
        gradients = [p.grad for name, p in parameters.items() if name in own and p.grad is not None]
        if not gradients:
            return torch.zeros((), dtype=torch.float64, device=self.strategy.context.device)
        # strategy local holds parameters on several devices
        norms = [norm.double().to(self.strategy.context.device) for norm in torch._foreach_norm(gradients)]
        return torch.stack(norms).square().sum()


def zero_gradient(parameter: nn.Parameter) -> Tensor:
    """Zeros of the type that the parameter's gradients accumulate in."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
