"""The buffers through which DeepSpeed swaps to and from a disk: their sizes, which its JSON is given, and the host memory they take.

DeepSpeed's own are 5 buffers of 1e8 elements for weights and, since it makes one sub-group of up to 1e9 elements, four of a whole billion
for the optimizer. Swapped is what has at least 1 MiB; the rest, as norms and biases, stays in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from mpfinetune.config import RunConfig
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.trainable import decays
from mpfinetune.planning.tensor_bytes import TYPE_BYTES, learning_names

if TYPE_CHECKING:
    from mpfinetune.planning.plan import Plan

# Elements of the optimizer that are in memory at once while it steps: 256 MiB each of masters, gradients and both moments.
SUB_GROUP_ELEMENTS = 64 * 2**20
WEIGHT_BUFFERS, OPTIMIZER_BUFFERS = 5, 4  # DeepSpeed's buffer_count of either
SMALLEST_SWAPPED_BYTES = 2**20
_ALIGNED_BYTES = 1024


def part_elements(facts: ModelFacts, name: str, replicas: int) -> int:
    """Of a parameter, what each replica holds under ZeRO-3."""
    return -(-facts.parameters[name].numel // replicas)


def weight_buffer_elements(config: RunConfig, facts: ModelFacts, replicas: int) -> int:
    """The largest part of a parameter that is swapped, for which each buffer must have room."""
    return max((_aligned(part_elements(facts, name, replicas), TYPE_BYTES[config.precision]) for name in facts.parameters), default=0)


def swap_buffer_bytes(config: RunConfig, facts: ModelFacts, plan: Plan) -> int:
    """Host memory that each process has for swapping, pinned where there is a card; 0 without a disk."""
    total = 0
    size = TYPE_BYTES[config.precision]
    groups = list(_sub_groups(config, facts, plan.replicas)) if plan.zero_stage == 3 else []
    if plan.offload_parameters == "nvme":
        total += WEIGHT_BUFFERS * weight_buffer_elements(config, facts, plan.replicas) * size
        # The updated weights of a sub-group on their way back to the disk, each aligned.
        total += max((sum(_aligned(part, size) for part in group) for group in groups), default=0) * size
    if plan.offload_optimizer == "nvme":
        total += OPTIMIZER_BUFFERS * 4 * _aligned(max((sum(group) for group in groups), default=0), 4)
    return total


def _sub_groups(config: RunConfig, facts: ModelFacts, replicas: int) -> Iterator[list[int]]:
    """DeepSpeed's, as elements of parts: it closes one when it has reached the size, so the last parameter may go beyond."""
    learning = learning_names(config, facts)
    for decayed in (True, False):
        names = (name for name in facts.parameters if name in learning and decays(name, facts.parameters[name].shape) is decayed)
        yield from _filled(part_elements(facts, name, replicas) for name in names)


def _filled(parts: Iterable[int]) -> Iterator[list[int]]:
    group: list[int] = []
    for part in parts:
        group.append(part)
        if sum(group) >= SUB_GROUP_ELEMENTS:
            yield group
            group = []
    if group:
        yield group


def _aligned(elements: int, element_bytes: int) -> int:
    step = _ALIGNED_BYTES // element_bytes
    return -(-elements // step) * step
