"""How many rows go through the model at once, and how many microbatches that makes of an update."""

from __future__ import annotations

import math

from mpfinetune.config import RunConfig
from mpfinetune.errors import ConfigError
from mpfinetune.planning.schedule import microbatch_multiple, min_microbatches

# Where probing begins that was not given a size: doubled while it fits, halved until it does.
PROBE_START_ROWS = 4


def microbatch_count(strategy: str, schedule: str, pipeline_ranks: int, replicas: int, global_size: int, micro_size: int) -> int:
    """Microbatches of one replica in one full update.

    Raises:
        ConfigError: fewer than the schedule needs.
    """
    if strategy == "local":
        return math.ceil(global_size / micro_size)
    microbatches = math.ceil(math.ceil(global_size / replicas) / micro_size)
    if strategy == "zero":
        return microbatches
    needed = min_microbatches(schedule, pipeline_ranks)
    if microbatches < needed:
        raise ConfigError(
            f"batch.micro_size: {global_size} rows per update / {replicas} replicas / {micro_size} rows make {microbatches} microbatches, but "
            f"{schedule} over {pipeline_ranks} ranks needs at least {needed}; set batch.micro_size to at most "
            f"{largest_micro_size(strategy, schedule, pipeline_ranks, replicas, global_size)} or batch.global_size to at least "
            f"{micro_size * replicas * needed}"
        )
    multiple = microbatch_multiple(schedule, pipeline_ranks)
    return math.ceil(microbatches / multiple) * multiple


def rows_to_measure(config: RunConfig) -> int:
    """Rows in one forward pass to measure a model with: those of the run, or those with which probing begins."""
    rows = config.batch.micro_size
    return PROBE_START_ROWS if rows == "auto" else rows


def largest_micro_size(strategy: str, schedule: str, pipeline_ranks: int, replicas: int, global_size: int) -> int:
    """Most rows in one forward pass: those of one update on one replica, in as many microbatches as the schedule needs at least."""
    if strategy == "pipeline":
        return max(1, global_size // (replicas * min_microbatches(schedule, pipeline_ranks)))
    return math.ceil(global_size / replicas)
