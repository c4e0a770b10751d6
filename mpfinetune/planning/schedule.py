"""In which order a rank runs the forward and backward passes of its microbatches: pure data, one row per schedule.

The order is executed by torch.distributed.pipelining's action runtime, which posts a receive before the compute that precedes its
use. torch's own ``Schedule1F1B`` waits for each exchange before it computes, so 1F1B is written here as the list of its actions
(Narayanan et al., https://arxiv.org/abs/2104.04473) and runs on the same runtime as the looped schedules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# (stage, "F" or "B", microbatch): forward or full backward. torch's zero-bubble orders have "I" and "W", the halves of a split backward pass.
Action = tuple[int, str, int]


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule that a user can name.

    ``torch_class`` names the class of torch.distributed.pipelining that makes the order, or None where ``order`` does.
    ``v_shaped``: rank r of p holds the stages r and 2p-1-r, otherwise r, r+p, ...
    """

    torch_class: str | None
    order: Callable[[int, int, int], list[Action]] | None
    stages_per_rank: int
    v_shaped: bool = False
    zero_bubble: bool = False


def gpipe_order(rank: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """All forward passes, then all backward passes (Huang et al., https://arxiv.org/abs/1811.06965)."""
    forward = [(rank, "F", index) for index in range(num_microbatches)]
    return forward + [(rank, "B", index) for index in range(num_microbatches)]


def one_f_one_b_order(rank: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Stage s of p runs p - s forward passes ahead, then one backward and one forward in turn: it keeps min(m, p - s) activations."""
    ahead = min(num_microbatches, num_stages - rank)
    actions = [(rank, "F", index) for index in range(ahead)]
    for index in range(num_microbatches):
        actions.append((rank, "B", index))
        if ahead + index < num_microbatches:
            actions.append((rank, "F", ahead + index))
    return actions


def forward_order(rank_stages: list[int], num_microbatches: int) -> list[Action]:
    """Evaluation: each of the rank's stages in turn, all microbatches through it."""
    return [(stage, "F", index) for stage in rank_stages for index in range(num_microbatches)]


SCHEDULES: dict[str, ScheduleRow] = {
    "gpipe": ScheduleRow(None, gpipe_order, 1),
    "1f1b": ScheduleRow(None, one_f_one_b_order, 1),
    "interleaved_1f1b": ScheduleRow("ScheduleInterleaved1F1B", None, 2),
    "interleaved_zero_bubble": ScheduleRow("ScheduleInterleavedZeroBubble", None, 2, zero_bubble=True),
    "zbv": ScheduleRow("ScheduleZBVZeroBubble", None, 2, v_shaped=True, zero_bubble=True),
}


def stages_of_rank(schedule: str, rank: int, num_ranks: int, stages_per_rank: int) -> list[int]:
    """The stages that pipeline rank ``rank`` of ``num_ranks`` holds, ascending."""
    if SCHEDULES[schedule].v_shaped:
        return [rank, 2 * num_ranks - 1 - rank]
    return [rank + chunk * num_ranks for chunk in range(stages_per_rank)]


def microbatch_multiple(schedule: str, num_ranks: int) -> int:
    """The number of microbatches must be a multiple of this; what is missing is filled with rows that carry no loss."""
    return num_ranks if schedule.startswith("interleaved") else 1


def min_microbatches(schedule: str, num_ranks: int) -> int:
    """Fewest microbatches the schedule runs with."""
    if schedule == "gpipe":
        return 1
    return 2 * num_ranks if SCHEDULES[schedule].v_shaped else num_ranks
