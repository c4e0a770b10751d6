"""From the config and the devices to the strategy and the number of stages, before the model is looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpfinetune.config import LOOPED_SCHEDULES, RunConfig
from mpfinetune.errors import ConfigError

if TYPE_CHECKING:
    from mpfinetune.planning.plan import World


def default_stages_per_rank(config: RunConfig) -> int:
    """Stages of each process of a pipeline."""
    return config.stages_per_rank or (2 if config.schedule in LOOPED_SCHEDULES else 1)


def strategy_and_stages(config: RunConfig, world: World) -> tuple[str, int]:
    """What ``strategy: auto`` means here, by the map or the number of processes and devices; and the stages of the whole model.

    Raises:
        ConfigError: an overlap within one process that has too few stages or devices for it.
    """
    wish = config.partition
    mapped = len(wish.stages) or (max(wish.device_map.values(), default=-1) + 1) or wish.num_stages
    if config.strategy == "local":
        return "local", _local_stages(mapped, world) if wish.local_overlap else 1
    if config.strategy == "zero":
        return "zero", 1
    if mapped is None:
        processes = world.world_size or world.visible_devices
        if config.strategy == "auto" and processes == 1:
            return "local", 1
        mapped = max(2, min(processes, world.visible_devices)) * default_stages_per_rank(config)
    if config.strategy == "auto" and mapped == 1:
        return "local", 1
    return "pipeline", mapped


def _local_stages(mapped: int | None, world: World) -> int:
    """One stage a device, for microbatches in flight in one process."""
    stages = mapped or world.visible_devices
    if stages < 2:
        raise ConfigError(
            f"partition.local_overlap: true given, but there is {stages} stage for {world.visible_devices} visible device(s); it needs at least "
            "2 of each (devices, CUDA_VISIBLE_DEVICES, partition.stages or partition.num_stages)"
        )
    if stages > world.visible_devices:
        raise ConfigError(
            f"partition.local_overlap: {stages} stages are asked for, one a device, but {world.visible_devices} device(s) are visible; take fewer "
            "stages (partition.stages, partition.num_stages, partition.device_map) or more devices"
        )
    return stages
