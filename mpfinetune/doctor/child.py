"""What the doctor does in processes of its own, since it may hang, crash or leave something behind: ``python -m mpfinetune.doctor.child``.

The last line of the output is a JSON object. A card's copies are checked by their content: on some boards peer-to-peer copies, or those
that NCCL makes, arrive with wrong bytes and no error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

_COPY_BYTES = 64 * 2**20
_LIMIT_SECONDS = 2.0  # of the group whose patience is tried


def bitsandbytes_works(device: str, ranks: int, store: str, rank: int) -> dict[str, Any]:
    """Quantise and dequantise a matrix in NF4."""
    from mpfinetune.models.quantize import nf4_round_trip_error

    return {"error": nf4_round_trip_error(torch.device(device))}


def cpu_adam_works(device: str, ranks: int, store: str, rank: int) -> dict[str, Any]:
    """An update by CPUAdam against torch's AdamW; builds it where the cache does not have it."""
    from mpfinetune.strategies.deepspeed_ops import cpu_adam_error

    return {"error": cpu_adam_error(lambda text: None)}


def libaio_is_here(device: str, ranks: int, store: str, rank: int) -> dict[str, Any]:
    from mpfinetune.errors import LaunchError
    from mpfinetune.strategies.deepspeed_ops import check_async_io, choose_accelerator

    choose_accelerator("cpu")
    try:
        check_async_io()
    except LaunchError:
        return {"here": False}
    return {"here": True}


def ranks_meet(device: str, ranks: int, store: str, rank: int) -> dict[str, Any]:
    """Meet, sum a tensor; then on the CPU rank 0 waits for what is never sent, and must be let go by the group's time limit."""
    import torch.distributed as dist

    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(where)
    kind = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(kind, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    elements = _COPY_BYTES // 4 if device == "cuda" else 2**16
    values = torch.arange(elements, dtype=torch.float32, device=where) % 1024
    expected = values * ranks
    summed = values.clone()
    dist.all_reduce(summed)  # the first one connects
    right = torch.equal(summed, expected)
    seconds = _timed(lambda: dist.all_reduce(values), where)
    found = {"right": right, "gb_per_second": elements * 4 / seconds / 1e9, "version": ".".join(map(str, _nccl_version(device)))}
    if device == "cpu":
        impatient = dist.new_group(list(range(ranks)), timeout=timedelta(seconds=_LIMIT_SECONDS))
        began = time.monotonic()
        if rank == 0:
            try:
                dist.recv(torch.zeros(1), src=1, group=impatient)
                found["limit_kept"] = False
            except RuntimeError:
                found["limit_kept"] = time.monotonic() - began < 5 * _LIMIT_SECONDS
        else:
            time.sleep(_LIMIT_SECONDS + 1.0)
    return found


def peer_copies(device: str, ranks: int, store: str, rank: int) -> dict[str, Any]:
    """Between every two cards, in both directions: are the bytes right, how fast, and do the cards reach each other directly."""
    pairs = []
    for source in range(torch.cuda.device_count()):
        values = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device=torch.device("cuda", source))
        expected = values.cpu()
        for target in range(torch.cuda.device_count()):
            if target == source:
                continue
            copied = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=torch.device("cuda", target))

            def copy(into: torch.Tensor = copied, values: torch.Tensor = values) -> None:
                into.copy_(values, non_blocking=True)

            copy()
            torch.cuda.synchronize(source)
            torch.cuda.synchronize(target)
            right = torch.equal(copied.cpu(), expected)
            seconds = _timed(copy, torch.device("cuda", target), torch.device("cuda", source))
            direct = torch.cuda.can_device_access_peer(target, source)
            pairs.append({"from": source, "to": target, "right": right, "direct": direct, "gb_per_second": _COPY_BYTES / seconds / 1e9})
    return {"pairs": pairs}


def host_copies(device: str, ranks: int, store: str, rank: int) -> dict[str, Any]:
    """Pinned memory, and the bus of each card in both directions."""
    pinned = torch.empty(4 * _COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    rates = []
    for index in range(torch.cuda.device_count()):
        card = torch.device("cuda", index)
        on_card = torch.empty(4 * _COPY_BYTES, dtype=torch.uint8, device=card)

        def up(on_card: torch.Tensor = on_card) -> None:
            on_card.copy_(pinned, non_blocking=True)

        def down(on_card: torch.Tensor = on_card) -> None:
            pinned.copy_(on_card, non_blocking=True)

        up()
        rates.append({"card": index, "to_card": pinned.numel() / _timed(up, card) / 1e9, "to_host": pinned.numel() / _timed(down, card) / 1e9})
    return {"pinned": pinned.is_pinned(), "rates": rates}


def _timed(work: Callable[[], object], *devices: torch.device) -> float:
    """Seconds of one call, the best of three."""
    best = float("inf")
    for _ in range(3):
        _finish(devices)
        began = time.perf_counter()
        work()
        _finish(devices)
        best = min(best, time.perf_counter() - began)
    return best


def _finish(devices: tuple[torch.device, ...]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _nccl_version(device: str) -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version()) if device == "cuda" else ()


TASKS: dict[str, Callable[[str, int, str, int], dict[str, Any]]] = {
    "bitsandbytes": bitsandbytes_works,
    "cpu_adam": cpu_adam_works,
    "libaio": libaio_is_here,
    "ranks": ranks_meet,
    "peers": peer_copies,
    "host": host_copies,
}


if __name__ == "__main__":
    task, kind, world, meeting, number = sys.argv[1:]
    answer = TASKS[task](kind, int(world), meeting, int(number))
    print(json.dumps(answer), flush=True)
    sys.stderr.flush()
    os._exit(0)  # without the interpreter's tear-down: a group whose exchange was given up would wait there
