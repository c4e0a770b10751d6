"""The learning rate as a pure function of the number of updates made; the shapes are those of transformers' schedules of the same names."""

from __future__ import annotations

import math

from mpfinetune.config import TrainConfig


def warmup_updates(settings: TrainConfig, total_updates: int) -> int:
    """Number of updates over which the rate rises from 0."""
    if settings.warmup_steps is not None:
        return settings.warmup_steps
    return math.ceil(round(settings.warmup_ratio * total_updates, 6))  # rounded first: 0.1 of 30 is 3.0000000000000004 in floating point


def learning_rate(settings: TrainConfig, peak: float, applied_updates: int, total_updates: int) -> float:
    """The rate of the next update. Skipped updates do not count, so that they do not shorten the schedule."""
    warmup = warmup_updates(settings, total_updates)
    if applied_updates < warmup:
        return peak * applied_updates / warmup
    progress = (applied_updates - warmup) / max(1, total_updates - warmup)
    if settings.scheduler == "linear":
        return peak * max(0.0, 1.0 - progress)
    if settings.scheduler == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak
