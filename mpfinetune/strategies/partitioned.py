"""Parameters that ZeRO-3 has split over the replicas, whose own tensor is empty, and what of them and of their states is on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Of a parameter that may be partitioned, whose own shape is then (0,)."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def gathered(parameter: nn.Parameter, writes: bool = False) -> Any:
    """A context in which a partitioned parameter is whole; ``writes``: what every rank puts in it is kept."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if writes else None, enabled=hasattr(parameter, "ds_id"))


@contextmanager
def in_memory(zero: Any, sub_group: int) -> Iterator[None]:
    """A context in which a sub-group's master and moments are not on the disk; what is made of them in it goes there, too."""
    on_disk = hasattr(zero, "_swappable_optimizer_subgroup") and zero._swappable_optimizer_subgroup(sub_group)
    if on_disk:
        zero._optimizer_states_and_gradient_swap_in(sub_group)
    yield
    if on_disk:
        zero._optimizer_states_and_gradient_swap_out(sub_group)


def own_bytes(parameter: nn.Parameter) -> int:
    """Of this rank's part, wherever it is: of one that is on the disk the tensor in memory has one element, in fp16."""
    part: Tensor | None = getattr(parameter, "ds_tensor", None)
    return parameter.nbytes if part is None else int(part.ds_numel) * parameter.element_size()  # type: ignore[attr-defined]


def swapped_optimizer_bytes(zero: Any, moments: Sequence[str]) -> int:
    """Of an engine's optimizer what is on the disk between updates: the masters, their gradients and the moments that are made already."""
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None:
        return 0
    total = 0
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        if flat.numel() == 0:  # in memory it has none while it is on the disk
            states = zero.optimizer.state.get(flat, {})
            total += 4 * int(zero.fp16_partitioned_groups_flat_numel[index]) * (2 + sum(key in states for key in moments))
    return total
