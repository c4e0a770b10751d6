"""Cases that test the pool itself."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist


def who_am_i() -> dict[str, Any]:
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "env": (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]),
    }


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """values: [n]; returns rank 0's values + rank 1's values, where rank r's are values * (r + 1)."""
    mine = values * (dist.get_rank() + 1)
    dist.all_reduce(mine)
    return mine


def send_to_next(value: float) -> float:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    received = torch.empty(1)
    request = dist.irecv(received, src=(rank - 1) % world_size)
    dist.send(torch.tensor([value + rank]), dst=(rank + 1) % world_size)
    assert request is not None
    request.wait()
    return float(received)


def fail_on_rank_while_others_wait(failing_rank: int) -> None:
    print(f"a line printed by rank {dist.get_rank()}")
    if dist.get_rank() == failing_rank:
        raise ValueError("wrong on purpose")
    dist.barrier()


def fail_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()} cannot")


def hang_in_collective() -> None:
    """Rank 0 waits for a collective that rank 1 never enters."""
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        time.sleep(3600)


def die_on_rank(dying_rank: int) -> None:
    if dist.get_rank() == dying_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_state_behind() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def state() -> tuple[torch.dtype, bool]:
    return torch.get_default_dtype(), torch.is_grad_enabled()


def return_something_unpicklable() -> Any:
    return lambda: None
