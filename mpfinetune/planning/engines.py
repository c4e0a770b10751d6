"""Which DeepSpeed engine a plan uses, if any: what ZeRO splits and where optimizer and weights live; and what one card does for two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mpfinetune.config import RunConfig
from mpfinetune.errors import ConfigError, LaunchError
from mpfinetune.models.facts import ModelFacts
from mpfinetune.planning.fallback import NeededBytes, fall_back, one_card_only
from mpfinetune.planning.tensor_bytes import learning_names

if TYPE_CHECKING:
    from mpfinetune.planning.plan import Plan, RankPlan, World


@dataclass(frozen=True)
class EngineChoice:
    """The strategy with its engine; ``zero_stage`` 0 is none. ``notes`` are said when the plan is shown."""

    strategy: str
    zero_stage: int = 0
    offload_optimizer: str = "none"
    offload_parameters: str = "none"
    offload_gradients: str = "none"
    notes: tuple[str, ...] = ()


def choose_engine(config: RunConfig, facts: ModelFacts, world: World, strategy: str, cards: int, needed: NeededBytes | None = None) -> EngineChoice:
    """From the strategy that is wished for, meant for ``cards`` cards, to what is done here; ``needed`` is asked if one card must do.

    Raises:
        ConfigError: the engine cannot do what the config asks for.
        LaunchError: more processes on this host than cards, or one card where ``fallback: never`` wants two.
    """
    one_card = one_card_only(world.device_type, world.visible_devices, config.devices)
    here = world.processes_per_host if world.processes_per_host is not None else world.world_size
    if one_card and here is not None and here > 1:
        raise LaunchError(
            f"{here} processes were started on this host, but one card is visible (CUDA_VISIBLE_DEVICES, devices). Make {here} visible, or start "
            "one process, which goes on with strategy zero: torchrun --nproc_per_node 1 -m mpfinetune train CONFIG"
        )
    if strategy == "pipeline" and cards > 1 and one_card and world.world_size in (None, 1):
        found = fall_back(config, cards, world.device_type, world.device_bytes, needed, bool(_narrow_beside_adapters(config, facts)))
        choice = EngineChoice(found.strategy, found.zero_stage, found.offload_optimizer, found.offload_parameters, notes=(found.note,))
    elif strategy == "zero":
        choice = EngineChoice("zero", config.zero.stage, config.offload.optimizer, config.offload.parameters)
    elif strategy == "pipeline" and config.offload.optimizer != "none":
        choice = EngineChoice("pipeline", 1, config.offload.optimizer, offload_gradients=config.offload.gradients)
    else:
        choice = EngineChoice(strategy, notes=_unused_stages(config))
    _check(choice, config, world)
    if choice.zero_stage:
        _check_all_learn_in_fp32(choice, config, facts)
    return choice


def engine_precision(facts: ModelFacts, precision: str) -> str:
    """Of an engine in a run of this precision: that of all that learns. Adapters are fp32, and beside them nothing may learn in less.

    Of the run, not of what one rank holds: ranks with other engines would not meet in the same exchanges.
    """
    return "fp32" if facts.adapted else precision


def _unused_stages(config: RunConfig) -> tuple[str, ...]:
    """Said where a config for a pipeline runs whole, as the reference of its split."""
    stages = len(config.partition.stages) or config.partition.num_stages or 1
    if config.strategy != "local" or config.partition.local_overlap or stages == 1:
        return ()
    return (
        f"partition: the {stages} stages are not used: strategy local holds the whole model on one device. For several devices set "
        "partition.local_overlap: true (a stage each), write partition.device_map, or take strategy: pipeline",
    )


def _narrow_beside_adapters(config: RunConfig, facts: ModelFacts) -> list[str]:
    """What learns in less than fp32 beside adapters, which an engine with its one type for all that learns would round."""
    if config.adapter.type == "none" or config.precision == "fp32":
        return []
    return sorted(learning_names(config, facts) - facts.adapter_names)


def _check_all_learn_in_fp32(choice: EngineChoice, config: RunConfig, facts: ModelFacts) -> None:
    rest = _narrow_beside_adapters(config, facts)
    if rest:
        asked = "strategy: zero" if choice.strategy == "zero" else "offload.optimizer: cpu"
        raise ConfigError(
            f"{asked} given with adapters in fp32, while {', '.join(rest[:3])} learns in {config.precision}: DeepSpeed's engine "
            "would round the adapters; set precision: fp32, freeze it (frozen), or take strategy: pipeline with offload.optimizer: none"
        )


def _check(choice: EngineChoice, config: RunConfig, world: World) -> None:
    if choice.zero_stage and config.precision == "fp16" and world.device_type == "cpu":
        raise ConfigError(
            "precision: fp16 given, but DeepSpeed refuses fp16 on the CPU (strategy: zero, offload.optimizer); set precision: bf16 or fp32, "
            "or run on a CUDA card"
        )
    if choice.offload_optimizer == "nvme" and (world.world_size or world.visible_devices) > 1:
        raise ConfigError(
            "offload.optimizer: nvme given with more than one process, where DeepSpeed 0.19 computes wrong numbers without an error (right with "
            "one); set offload.optimizer: cpu, or devices: 1"
        )


def rank_bytes(row: RankPlan, choice: EngineChoice, replicas: int) -> RankPlan:
    """A rank's row with what ZeRO splits over the replicas, and with what is offloaded moved to ``host_bytes`` and ``disk_bytes``."""
    share = {stage: replicas if choice.zero_stage >= stage else 1 for stage in (1, 2, 3)}
    # The engine keeps an fp32 master of all that learns (as large as its gradient), also of what is fp32 already.
    copies = row.gradient_bytes - row.master_bytes if choice.zero_stage else 0
    states, masters = row.optimizer_bytes + copies, row.master_bytes + copies
    weights, gradients, optimizer = row.weight_bytes // share[3], row.gradient_bytes // share[2], states // share[1]
    leaving = row.gradient_bytes - row.shared_gradient_bytes if choice.offload_gradients != "none" else 0
    host, buffers = 0, 0
    if choice.offload_optimizer != "none" and choice.zero_stage in (1, 2):
        buffers = row.learning_bytes // replicas  # the updated weights in their own type, on their way to the card
    if choice.offload_optimizer != "none" and choice.strategy == "zero" and choice.zero_stage >= 2:
        # Each microbatch's gradients go to the host as they come. Stage 2 adds them up there in the weights' type, stage 3 in fp32.
        buffers += (row.learning_bytes if choice.zero_stage == 2 else row.gradient_bytes) // replicas
        leaving = gradients
    disk, offloaded = 0, 0
    if choice.offload_optimizer != "none":
        # CPUAdam has a gradient of each master beside it. Stages 1 and 2 know no disk: DeepSpeed keeps in memory what is meant for it.
        states = optimizer + row.gradient_bytes // share[1]
        on_disk = choice.offload_optimizer == "nvme" and choice.zero_stage == 3
        host, disk, optimizer = host + states * (not on_disk), disk + states * on_disk, 0
    if choice.offload_parameters != "none":
        on_disk = choice.offload_parameters == "nvme"
        host, disk, offloaded, weights = host + weights * (not on_disk), disk + weights * on_disk, weights, 0
    return replace(
        row,
        weight_bytes=weights,
        gradient_bytes=gradients - leaving,
        leaving_gradient_bytes=leaving,
        optimizer_bytes=optimizer,
        host_bytes=host,
        disk_bytes=disk,
        offloaded_weight_bytes=offloaded,
        host_buffer_bytes=buffers,
        master_bytes=masters // share[1],
    )


def engine_lines(plan: Plan) -> list[str]:
    """What the engine does, for people; nothing where there is none."""
    if not plan.zero_stage:
        return []
    split = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and weights")[plan.zero_stage - 1]
    where = {"cpu": "in host memory", "nvme": "on disk"}
    parts = (
        ("optimizer states and fp32 masters", plan.offload_optimizer),
        ("gradients", plan.offload_gradients),
        ("weights", plan.offload_parameters),
    )
    moved = [f"{what} {where[device]}" for what, device in parts if device != "none"]
    away = sum(row.offloaded_bytes for row in plan.ranks) / 2**20
    return [
        f"DeepSpeed ZeRO-{plan.zero_stage}: {split} split over {plan.replicas} replica(s)"
        + (f"; {', '.join(moved)} ({away:.1f} MiB over one replica's ranks)" if moved else "")
    ]
