"""Who this process is among the others: rank, world size, device, process groups.

The ranks of a pipeline are far apart and the replicas of a stage are near (rank = pipeline rank x replicas + replica): on several
hosts the gradients, many bytes, stay within a host and the hidden states, few bytes, cross.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpfinetune.config import RunConfig
from mpfinetune.errors import EXIT_FAILURE, LaunchError, OwnLaunchError

_BUCKET_ELEMENTS = 8 * 2**20
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class DistContext:
    """This process's place. Without groups (one process, or a test of planning) every collective is the identity."""

    rank: int
    world_size: int
    device: torch.device
    pipeline_ranks: int = 1
    pipeline_group: Any = None
    replica_group: Any = None
    timeout: timedelta = field(default_factory=lambda: timedelta(seconds=600))
    devices: tuple[torch.device, ...] = ()  # where one process uses several, those by number; empty: the kind of ``device``, counted from 0

    @property
    def replicas(self) -> int:
        return self.world_size // self.pipeline_ranks

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.replicas

    @property
    def replica(self) -> int:
        return self.rank % self.replicas

    def global_rank(self, pipeline_rank: int, replica: int) -> int:
        return pipeline_rank * self.replicas + replica

    def nth_device(self, number: int) -> torch.device:
        """The device of a number in a map of ``strategy: local``. On the CPU all are the CPU."""
        if self.devices:
            return self.devices[number]
        return torch.device(self.device.type, number) if self.device.type != "cpu" else self.device

    def sum_over_world(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over all ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather_objects(self, value: Any) -> list[Any]:
        """One object per rank, on every rank."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


def is_met() -> bool:
    """Whether the processes have met."""
    return dist.is_available() and dist.is_initialized()


def is_silent_rank() -> bool:
    """Whether the first process of this host says for this one, too, what all of the host find alike.

    Of each host, not of the run: on another host the files, the cards or the folder may be others. With half of the launcher's variables,
    or a number that is none, there is no first process.
    """
    local_rank = os.environ.get("LOCAL_RANK", "0")
    return local_rank.isdigit() and int(local_rank) > 0 and all(name in os.environ for name in _LAUNCHER_VARIABLES)


def launched_by_torchrun() -> bool:
    """Whether the launcher's variables are set.

    Raises:
        LaunchError: some are set and some are not (a process started by hand).
    """
    present = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    if "RANK" not in present and "WORLD_SIZE" not in present:
        return False
    if len(present) < len(_LAUNCHER_VARIABLES):
        missing = [name for name in _LAUNCHER_VARIABLES if name not in present]
        raise LaunchError(
            f"the environment has {', '.join(present)} but not {', '.join(missing)}; start the run with torchrun or with `mpfinetune train CONFIG`"
        )
    return True


def environment_int(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise LaunchError(f"the environment variable {name} is '{os.environ[name]}', must be a whole number") from error


def device_type(config: RunConfig) -> str:
    """``cuda`` or ``cpu``, by the config and by what is there.

    Raises:
        LaunchError: ``device: cuda`` without a usable card.
    """
    if config.device == "cpu":
        return "cpu"
    available = torch.cuda.is_available() and torch.cuda.device_count() > 0
    if config.device == "cuda" and not available:
        raise LaunchError("device: cuda was asked for, but no CUDA card is visible (CUDA_VISIBLE_DEVICES, driver); set device: auto or cpu")
    return "cuda" if available else "cpu"


def visible_devices(config: RunConfig) -> int:
    """How many devices the run may use; on the CPU as many as ``devices`` says."""
    if device_type(config) == "cpu":
        return config.devices or 1
    return min(config.devices or torch.cuda.device_count(), torch.cuda.device_count())


def visible_cards(config: RunConfig) -> list[tuple[str, tuple[int, int], int]]:
    """(name, compute capability, bytes of memory) of the CUDA cards that the run may use; empty on the CPU."""
    if device_type(config) == "cpu":
        return []
    cards = [torch.cuda.get_device_properties(index) for index in range(visible_devices(config))]
    return [(card.name, (card.major, card.minor), card.total_memory) for card in cards]


def host_memory_bytes() -> int:
    """Memory of this host, or of the container if that has less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for file in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        limit = file.read_text().strip() if file.is_file() else ""
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def processes_per_host() -> int | None:
    """How many processes torchrun has started on this host; None before the launch."""
    return environment_int("LOCAL_WORLD_SIZE") if launched_by_torchrun() and "LOCAL_WORLD_SIZE" in os.environ else None


def choose_backend(device: str) -> str:
    """NCCL for CUDA cards where torch has it (not on Windows), else gloo."""
    return "nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"


def init_distributed(config: RunConfig, pipeline_ranks: int) -> DistContext:
    """Join the process group that torchrun's variables describe, or stand alone without them.

    Raises:
        LaunchError: more processes on this host than visible cards, or the meeting failed.
    """
    kind = device_type(config)
    timeout = timedelta(seconds=config.dist.timeout_seconds)
    if not launched_by_torchrun():
        return DistContext(0, 1, torch.device(kind, 0) if kind == "cuda" else torch.device(kind), timeout=timeout)
    local_rank, world_size = environment_int("LOCAL_RANK"), environment_int("WORLD_SIZE")
    if kind == "cuda":
        if local_rank >= visible_devices(config):
            # The processes before this one have cards and wait for it; of those without, the first speaks.
            kind_of_error = OwnLaunchError if local_rank == visible_devices(config) else LaunchError
            raise kind_of_error(
                f"process {local_rank} of this host has no card: {visible_devices(config)} are visible "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); start at most that many processes"
            )
        torch.cuda.set_device(local_rank)
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    try:
        dist.init_process_group(choose_backend(kind), timeout=timeout)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(f"the processes could not meet ({os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}): {error}") from error
    return make_context(environment_int("RANK"), world_size, device, pipeline_ranks, timeout)


def make_context(rank: int, world_size: int, device: torch.device, pipeline_ranks: int, timeout: timedelta) -> DistContext:
    """The context with its groups; every rank of the default group must call it, in the same order."""
    context = DistContext(rank, world_size, device, pipeline_ranks, timeout=timeout)
    if world_size == 1:
        return context
    replicas = world_size // pipeline_ranks
    for replica in range(replicas):
        ranks = [context.global_rank(pipeline_rank, replica) for pipeline_rank in range(pipeline_ranks)]
        group = dist.new_group(ranks, timeout=timeout)
        context.pipeline_group = group if rank in ranks else context.pipeline_group
    for pipeline_rank in range(pipeline_ranks):
        ranks = [context.global_rank(pipeline_rank, replica) for replica in range(replicas)]
        group = dist.new_group(ranks, timeout=timeout) if replicas > 1 else None
        context.replica_group = group if rank in ranks else context.replica_group
    return context


def first_failure(exit_code: int) -> int | None:
    """Note that this rank fails, once the processes have met.

    Returns:
        None on the first rank that does, whose error is the cause; else that rank's exit code: the others fail alike, or for want of it.
    """
    if not is_met():
        return None
    claim = f"{dist.get_rank()} {exit_code}"
    try:
        # The launcher keeps the store, so it outlives the ranks; an exchange between them could wait for one that is gone.
        first = dist.distributed_c10d._get_default_store().compare_set("mpfinetune/first_failure", "", claim).decode()
    except (dist.DistError, RuntimeError):  # the store is gone, and so is the rank that was first
        return EXIT_FAILURE
    return None if first == claim else int(first.split()[1])


def all_reduce_buckets(tensors: Iterable[Tensor], group: Any) -> None:
    """Sum tensors of one type over a group, in place, in buckets of at most 8 Mi elements: few messages, little extra memory."""
    _in_buckets(tensors, lambda flat: dist.all_reduce(flat, group=group))


def broadcast_buckets(tensors: Iterable[Tensor], source: int, group: Any) -> None:
    """Copy tensors from the global rank ``source`` to the rest of the group, in place."""
    _in_buckets(tensors, lambda flat: dist.broadcast(flat, src=source, group=group))


def _in_buckets(tensors: Iterable[Tensor], collective: Callable[[Tensor], Any]) -> None:
    bucket: list[Tensor] = []
    elements = 0

    def flush() -> None:
        if not bucket:
            return
        if len(bucket) == 1 and bucket[0].is_contiguous():  # an embedding, of which a copy may be a gigabyte
            collective(bucket[0].view(-1))
            bucket.clear()
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        collective(flat)
        for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(values.view_as(tensor))
        bucket.clear()

    for tensor in tensors:
        if bucket and (elements + tensor.numel() > _BUCKET_ELEMENTS or tensor.dtype != bucket[0].dtype):
            flush()
            elements = 0
        bucket.append(tensor)
        elements += tensor.numel()
    flush()
