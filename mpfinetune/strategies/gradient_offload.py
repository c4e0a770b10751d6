"""Gradients that leave the card as soon as they are computed, for a stage whose optimizer is a ZeRO engine on the host.

DeepSpeed does this in its ZeRO-2, whose hooks count backward passes of their own, exchange gradients in them, and add microbatches up in
the weights' precision; under a pipeline's runtime they give wrong sums. Here each gradient is added in fp32 to where CPUAdam reads it: to the
engine's gradient of its flat master, which is in host memory in any case. The card holds one gradient at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class HostGradients:
    """The sums of an update's gradients, on the host.

    Args:
        zero: DeepSpeed's optimizer of stage 1 with its states on the host, of one replica (so that its flat partitions are whole).
        parameters: {name: parameter} of those whose gradients leave the card.
    """

    def __init__(self, zero: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self._zero = zero
        self._parameters = dict(parameters)
        self._sums = {name: self._place_of(parameter) for name, parameter in self._parameters.items()}
        self._begun: set[str] = set()
        self._staging: dict[torch.dtype, Tensor] = {}
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))

    def hand_over(self) -> None:
        """Make the sums the engine's, as if it had copied them there itself: with their norms and its mark of an overflow."""
        for name, parameter in self._parameters.items():
            total = self._sums[name]
            if name not in self._begun:
                total.zero_()  # no microbatch has reached it; the last update's sum is still there
            norm = torch.linalg.vector_norm(total, dtype=torch.float64)
            self._zero.norm_for_param_grads[self._zero.get_param_id(parameter)] = norm
            self._zero.local_overflow |= not bool(norm.isfinite())
        self._begun.clear()

    def drop(self) -> None:
        """Forget what the passes since the last update have left."""
        self._begun.clear()

    def _place_of(self, parameter: nn.Parameter) -> Tensor:
        """A view of the flat master's gradient, [numel] in fp32."""
        group, source_offset, offset, count = self._zero.grad_position[self._zero.get_param_id(parameter)]
        assert source_offset == 0 and count == parameter.numel(), "the engine has split a parameter over replicas"
        place: Tensor = self._zero.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset, count)
        return place

    def _take(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        flat = gradient.reshape(-1)
        if name in self._begun:
            self._sums[name].add_(self._on_host(flat))
        else:
            self._sums[name].copy_(self._on_host(flat))
            self._begun.add(name)

    def _on_host(self, flat: Tensor) -> Tensor:
        """By way of pinned memory, which a card fills two to three times as fast; the copy is done when this returns."""
        if flat.device.type == "cpu":
            return flat
        if flat.dtype not in self._staging:
            largest = max(parameter.numel() for parameter in self._parameters.values())
            self._staging[flat.dtype] = torch.empty(largest, dtype=flat.dtype, pin_memory=True)
        return self._staging[flat.dtype].narrow(0, 0, flat.numel()).copy_(flat)
