"""One card where two were meant: what the run does instead, decided from what is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mpfinetune.config import RunConfig
from mpfinetune.errors import LaunchError

_GIB = 2**30
# (ZeRO's stage, place of the optimizer, place of the weights) -> predicted peak of the one card, in bytes
NeededBytes = Callable[[int, str, str], int]


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


def fall_back(
    config: RunConfig, meant: int, device_type: str, device_bytes: int | None, needed: NeededBytes | None, learns_in_two_types: bool
) -> OneCard:
    """The decision for a run meant for ``meant`` cards.

    Args:
        device_bytes: memory of the card; None: not known.
        needed: asked only where the card's memory is known; None: the plan predicts no memory.
        learns_in_two_types: as fp32 adapters beside a head in bf16 do.

    Raises:
        LaunchError: ``fallback: never``.
    """
    found = f"the run is meant for {meant} cards, and one is visible" + (" (devices: 1)" if config.devices == 1 else " (CUDA_VISIBLE_DEVICES)")
    if config.fallback == "never":
        raise LaunchError(
            f"{found}, and fallback: never forbids to go on with one. Make {meant} visible and start it with: torchrun --nproc_per_node {meant} "
            "-m mpfinetune train CONFIG; or start it on this one with: mpfinetune train CONFIG fallback=auto"
        )
    local = OneCard("local", 0, "none", "none", f"{found}: going on there with strategy local, with the same global batch and numbers")
    # The engine knows one update rule and one type of what learns, and would split no quantised weights; DeepSpeed has no fp16 on the CPU.
    adapted = config.adapter.type != "none"
    if config.optimizer.name != "adamw" or config.quantize != "none" or learns_in_two_types:
        return local
    if config.precision == "fp16" and (adapted or device_type == "cpu"):
        return local
    stage, optimizer, weights = _offload_for(config, device_bytes, needed)
    if adapted and (device_bytes is None or needed is None or (optimizer, weights) == ("none", "none")):
        return local  # an adapter has hardly an optimizer to offload; the engine is for a base that does not fit
    where = {"none": "on the card", "cpu": "in host memory", "nvme": "on disk"}
    size = "" if device_bytes is None else f"; the card has {device_bytes / _GIB:.1f} GiB"
    note = (
        f"{found}: going on there with strategy zero (stage {stage}; optimizer {where[optimizer]}, weights {where[weights]}{size}), "
        "with the same global batch and the same numbers. fallback: never turns this off."
    )
    return OneCard("zero", stage, optimizer, weights, note)


def _offload_for(config: RunConfig, device_bytes: int | None, needed: NeededBytes | None) -> tuple[int, str, str]:
    """(stage, optimizer, weights): as much on the card as fits there, the optimizer leaving first, then the weights; if nothing fits, the smallest.

    Stage 3 is not always that: of a model below a billion parameters DeepSpeed keeps all that it has gathered.
    """
    wished = config.offload.optimizer
    outside = wished if wished != "none" else "cpu"
    ways = [(2, wished, "none"), (2, outside, "none"), (3, outside, "cpu")]
    if device_bytes is None or needed is None:
        return ways[1]
    predicted = {way: needed(*way) for way in ways}
    return next((way for way in ways if predicted[way] <= device_bytes), min(ways, key=predicted.__getitem__))
