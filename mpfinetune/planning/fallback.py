"""One card where two were meant: what the run does instead, decided from what is there."""

from __future__ import annotations

from dataclasses import dataclass

from mpfinetune.config import RunConfig
from mpfinetune.errors import LaunchError

_GIB = 2**30
# Activations, workspace and the allocator's slack are not in the bytes of the tensors.
_USABLE_SHARE = 0.75


@dataclass(frozen=True)
class OneCard:
    """How a run goes on with one card: the strategy, ZeRO's stage, where optimizer and parameters live, and what is said about it."""

    strategy: str
    zero_stage: int
    offload_optimizer: str
    offload_parameters: str
    note: str


def one_card_only(device_type: str, visible_devices: int, devices: int | None) -> bool:
    """Whether one device is all there is. Processes may share a CPU, so there one device is what ``devices: 1`` says, and nothing else."""
    return visible_devices == 1 and (device_type == "cuda" or devices == 1)


def fall_back(config: RunConfig, meant: int, parameters: int, learning: int, device_type: str, device_bytes: int | None) -> OneCard:
    """The decision for a run meant for ``meant`` cards.

    Args:
        parameters: of the model. ``learning``: how many of them learn.
        device_bytes: memory of the card; None: not known.

    Raises:
        LaunchError: ``fallback: never``.
    """
    found = f"the run is meant for {meant} cards, and one is visible" + (" (devices: 1)" if config.devices == 1 else " (CUDA_VISIBLE_DEVICES)")
    if config.fallback == "never":
        raise LaunchError(
            f"{found}, and fallback: never forbids to go on with one. Make {meant} visible and start it with: torchrun --nproc_per_node {meant} "
            "-m mpfinetune train CONFIG; or start it on this one with: mpfinetune train CONFIG fallback=auto"
        )
    # The engine knows one update rule and whole weights; an adapter has hardly an optimizer to offload; DeepSpeed has no fp16 on the CPU.
    other = config.optimizer.name != "adamw" or config.quantize != "none" or config.adapter.type != "none"
    if other or (config.precision == "fp16" and device_type == "cpu"):
        return OneCard("local", 0, "none", "none", f"{found}: going on there with strategy local, with the same global batch and numbers")
    stage, optimizer, weights = _offload_for(config, parameters, learning, device_bytes)
    where = {"none": "on the card", "cpu": "in host memory", "nvme": "on disk"}
    size = "" if device_bytes is None else f"; the card has {device_bytes / _GIB:.1f} GiB"
    note = (
        f"{found}: going on there with strategy zero (stage {stage}; optimizer {where[optimizer]}, weights {where[weights]}{size}), "
        "with the same global batch and the same numbers. fallback: never turns this off."
    )
    return OneCard("zero", stage, optimizer, weights, note)


def _offload_for(config: RunConfig, parameters: int, learning: int, device_bytes: int | None) -> tuple[int, str, str]:
    """(stage, optimizer, parameters): as much on the card as fits there, the optimizer leaving first, then the weights."""
    narrow = config.precision != "fp32"
    # Two moments and an fp32 master, which the engine keeps even of fp32 weights.
    weights, gradients, states = parameters * (2 if narrow else 4), learning * 4, learning * 12
    wished = config.offload.optimizer
    if device_bytes is None:
        return 2, wished if wished != "none" else "cpu", "none"
    room = device_bytes * _USABLE_SHARE
    if wished == "none" and weights + gradients + states <= room:
        return 2, "none", "none"
    optimizer = wished if wished != "none" else "cpu"
    return (2, optimizer, "none") if weights + gradients <= room else (3, optimizer, "cpu")
