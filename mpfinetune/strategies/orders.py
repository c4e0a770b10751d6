"""The order in which each rank of a schedule acts, as it is executed: our own lists, or what torch's schedule classes make.

torch's classes want stages with a process group. Their orders follow from four numbers alone, so a stand-in with these numbers is enough,
and a plan can be made where no group is.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.distributed import pipelining

from mpfinetune.planning.schedule import SCHEDULES, Action, stages_of_rank

_COMPUTE = ("F", "B", "I", "W")


class _StandIn:
    """What torch's schedules ask of a stage when they make their order."""

    submod = None
    has_backward = True

    def __init__(self, index: int, num_stages: int, group_size: int) -> None:
        self.stage_index = index
        self.num_stages = num_stages
        self.group_size = group_size
        self.group_rank = 0
        self.is_first, self.is_last = index == 0, index == num_stages - 1


@cache  # a search for a split asks for the same ones many times; nobody changes them
def schedule_orders(schedule: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> dict[int, list[Action]]:
    """For each pipeline rank its actions (stage, "F" | "B" | "I" | "W", microbatch) in order; I and W are a split backward pass."""
    row = SCHEDULES[schedule]
    num_stages = num_ranks * stages_per_rank
    if row.order is not None:
        return {rank: row.order(rank, num_stages, num_microbatches) for rank in range(num_ranks)}
    assert row.torch_class is not None
    stages: list[Any] = [_StandIn(index, num_stages, num_ranks) for index in stages_of_rank(schedule, 0, num_ranks, stages_per_rank)]
    made = getattr(pipelining, row.torch_class)(stages, num_microbatches, loss_fn=lambda output, target: output, scale_grads=False)
    return {
        rank: [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in actions if a.computation_type.value in _COMPUTE]
        for rank, actions in made.pipeline_order_with_comms.items()
    }
