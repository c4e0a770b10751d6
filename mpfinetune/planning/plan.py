"""The plan of a run: pure arithmetic on the config and the model's facts, made before any process starts or weight is read."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from mpfinetune.config import PartitionConfig, RunConfig, ZeroConfig
from mpfinetune.errors import ConfigError, LaunchError
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.recompute import recomputed_blocks
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.device_map import Placement, resolve_device_map
from mpfinetune.planning.engines import EngineChoice, choose_engine, rank_bytes
from mpfinetune.planning.fallback import NeededBytes
from mpfinetune.planning.hardware import PlanCard, cards_of_ranks, smallest_card
from mpfinetune.planning.memory_plan import MemoryPlan
from mpfinetune.planning.micro_size import largest_micro_size, microbatch_count, rows_to_measure
from mpfinetune.planning.partition import SplitJudge, effective_rule, partition, refuse_what_cannot_be_cut
from mpfinetune.planning.predict import Knowledge, Layout, StepPrediction, Stopwatch
from mpfinetune.planning.schedule import microbatch_multiple, min_microbatches, stages_of_rank
from mpfinetune.planning.strategy import default_stages_per_rank, strategy_and_stages
from mpfinetune.planning.tensor_bytes import code_table_bytes, learning_names, master_bytes, optimizer_bytes, shared_names, weight_bytes


@dataclass(frozen=True)
class World:
    """What the plan may use: the processes that run already (None before the launch) and the devices that are there."""

    device_type: str
    visible_devices: int
    world_size: int | None = None
    processes_per_host: int | None = None  # None: as world_size
    device_bytes: int | None = None  # memory of the smallest visible card; None: not known
    cards: tuple[PlanCard, ...] = ()  # those that the plan is made for; empty: nothing is known of them


@dataclass(frozen=True)
class RankPlan:
    """What one pipeline rank holds; bytes are those of the tensors, without activations and workspace."""

    rank: int
    stages: tuple[int, ...]
    holds: str
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0  # what is offloaded from the card to the host's memory
    disk_bytes: int = 0  # what is offloaded to the disk
    offloaded_weight_bytes: int = 0  # of the two before, the weights
    shared_gradient_bytes: int = 0  # of the parameters that learn, those of which another rank holds a copy
    leaving_gradient_bytes: int = 0  # summed on the host, in fp32; not among gradient_bytes
    learning_bytes: int = 0  # of the weights that learn, in their own type, before ZeRO splits them
    host_buffer_bytes: int = 0  # of the engine on the host besides what is offloaded
    master_bytes: int = 0  # of the optimizer's bytes, fp32 copies of narrow weights: there before the first update

    @property
    def offloaded_bytes(self) -> int:
        """What the card lets go, wherever it is."""
        return self.host_bytes + self.disk_bytes

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Plan:
    """Everything the ranks have to agree on."""

    strategy: str
    schedule: str
    device_type: str
    rule: str
    spans: tuple[StageSpan, ...]
    pipeline_ranks: int
    stages_per_rank: int
    replicas: int
    global_size: int
    micro_size: int
    microbatches: int
    precision: str
    total_parameters: int
    ranks: tuple[RankPlan, ...]
    zero_stage: int = 0  # of the DeepSpeed engine; 0: there is none
    offload_optimizer: str = "none"
    offload_parameters: str = "none"
    offload_gradients: str = "none"
    notes: tuple[str, ...] = ()  # what the plan found and did about it
    placement: Placement | None = None  # the modules' devices, for a map of strategy local
    memory: MemoryPlan | None = None  # predicted bytes, phase by phase; None: not asked for
    prediction: StepPrediction | None = None  # the predicted step; None: not asked for, or no rate is known

    @property
    def world_size(self) -> int:
        return self.pipeline_ranks * self.replicas

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    @property
    def bubble(self) -> float:
        """Idle share of a rank by the textbook formula (p - 1) / (v * m + p - 1), equal stages assumed."""
        if self.strategy == "local":  # one process, GPipe over its devices
            return (self.num_stages - 1) / (self.microbatches + self.num_stages - 1)
        return (self.pipeline_ranks - 1) / (self.stages_per_rank * self.microbatches + self.pipeline_ranks - 1)

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The stages that a pipeline rank holds, ascending."""
        if self.strategy == "local" or self.num_stages == 1:
            return list(range(self.num_stages))
        return stages_of_rank(self.schedule, pipeline_rank, self.pipeline_ranks, self.stages_per_rank)

    def padded_rows(self, rows: int) -> int:
        """Rows of an update with the fill rows that make whole microbatches, as many as the schedule wants on every replica."""
        if self.strategy == "local":
            return rows
        if self.strategy == "zero":
            return math.ceil(rows / (self.micro_size * self.replicas)) * self.micro_size * self.replicas
        multiple = self.micro_size * self.replicas * microbatch_multiple(self.schedule, self.pipeline_ranks)
        fewest = self.micro_size * self.replicas * min_microbatches(self.schedule, self.pipeline_ranks)
        return max(fewest, math.ceil(rows / multiple) * multiple)

    @property
    def largest_micro_size(self) -> int:
        """Most rows in one forward pass that strategy and schedule allow."""
        return largest_micro_size(self.strategy, self.schedule, self.pipeline_ranks, self.replicas, self.global_size)

    def with_micro_size(self, rows: int) -> Plan:
        """The plan with other rows in one forward pass, and as many microbatches as that makes.

        Raises:
            ConfigError: more than ``largest_micro_size``.
        """
        count = microbatch_count(self.strategy, self.schedule, self.pipeline_ranks, self.replicas, self.global_size, rows)
        return dataclasses.replace(self, micro_size=rows, microbatches=count)

    def to_json(self) -> str:
        content = {**dataclasses.asdict(self), "world_size": self.world_size, "num_stages": self.num_stages, "bubble": self.bubble}
        return json.dumps(content, indent=2, default=sorted) + "\n"  # sets of names as lists


def make_plan(config: RunConfig, facts: ModelFacts, world: World, knowledge: Knowledge | None = None) -> Plan:
    """Decide strategy, stages, replicas and microbatches.

    Args:
        knowledge: for a split by time or memory, and for one card that must do for several; not asked otherwise.

    Raises:
        ConfigError: stages, map, schedule and batch do not fit the model or each other.
        LaunchError: the number of processes does not fit the plan.
    """
    strategy, num_stages = strategy_and_stages(config, world)
    cards = math.ceil(num_stages / default_stages_per_rank(config))
    engine = choose_engine(config, facts, world, strategy, cards, _needed_on_one_card(knowledge, config, facts, world))
    strategy, num_stages = engine.strategy, num_stages if engine.strategy == strategy else 1
    stages_per_rank = num_stages if strategy in ("local", "zero") else default_stages_per_rank(config)
    if num_stages % stages_per_rank:
        raise ConfigError(
            f"schedule: {config.schedule} puts {stages_per_rank} stages on each process, but {num_stages} stages are asked for; "
            f"give a multiple of {stages_per_rank} (partition.num_stages or the entries of the map)"
        )
    pipeline_ranks = num_stages // stages_per_rank
    is_cut = strategy == "pipeline" or num_stages > 1
    if is_cut:
        refuse_what_cannot_be_cut(config.partition, facts, num_stages)
    placement = _placement(config, strategy, facts, world)
    replicas = _replicas(config, strategy, pipeline_ranks, world, engine)
    schedule = config.schedule if strategy == "pipeline" else "none"
    micro_size = _first_micro_size(config, strategy, engine.zero_stage, pipeline_ranks, replicas)
    microbatches = microbatch_count(strategy, schedule, pipeline_ranks, replicas, config.batch.global_size, micro_size)
    whole = (StageSpan(0, facts.num_blocks, True, True),)
    draft = Plan(
        **vars(engine),  # strategy, ZeRO's stage, what is offloaded, notes
        schedule=schedule,
        device_type=world.device_type,
        rule=effective_rule(config.partition) if is_cut else "manual" if placement else "whole model",
        spans=whole,
        pipeline_ranks=pipeline_ranks,
        stages_per_rank=stages_per_rank,
        replicas=replicas,
        global_size=config.batch.global_size,
        micro_size=micro_size,
        microbatches=microbatches,
        precision=config.precision,
        total_parameters=facts.numel(facts.parameters),
        ranks=(),
        placement=placement,
    )

    def with_spans(spans: tuple[StageSpan, ...], ranks: Iterable[int]) -> Plan:
        rows = (_rank_plan(rank, config, facts, spans, pipeline_ranks, stages_per_rank) for rank in ranks)
        return replace(draft, spans=spans, ranks=tuple(rank_bytes(row, engine, replicas) for row in rows))

    if not is_cut:
        return with_spans(whole, range(pipeline_ranks))
    judge = None if knowledge is None else _judge(knowledge, config, facts, world, replace(draft, spans=whole * num_stages), with_spans)
    return with_spans(partition(config.partition, facts, num_stages, judge), range(pipeline_ranks))


def _needed_on_one_card(knowledge: Knowledge | None, config: RunConfig, facts: ModelFacts, world: World) -> NeededBytes | None:
    """What one card would have to hold of the whole run with ZeRO."""
    if knowledge is None:
        return None

    def needed_bytes(stage: Any, optimizer: Any, parameters: Any) -> int:  # literals of the config
        offload = replace(config.offload, optimizer=optimizer, parameters=parameters)
        alone = replace(config, strategy="zero", partition=PartitionConfig(), zero=ZeroConfig(stage), offload=offload)
        return knowledge.needed_bytes(make_plan(alone, facts, replace(world, world_size=1, processes_per_host=1)), 0, 0)

    return needed_bytes


def _first_micro_size(config: RunConfig, strategy: str, zero_stage: int, pipeline_ranks: int, replicas: int) -> int:
    """The rows that are given, or those with which probing begins."""
    if config.batch.micro_size == "auto" and strategy == "zero" and zero_stage > 1 and replicas > 1:
        raise ConfigError(
            f"batch.micro_size: auto given with zero.stage: {zero_stage} over {replicas} processes, which cannot go on after one of them has "
            "run out of memory, so no size can be probed; give a number, or set zero.stage: 1"
        )
    rows = rows_to_measure(config)
    largest = largest_micro_size(strategy, config.schedule, pipeline_ranks, replicas, config.batch.global_size)
    return min(rows, largest) if config.batch.micro_size == "auto" else rows


def layout_of(config: RunConfig, facts: ModelFacts, strategy: str, num_stages: int, stages_per_rank: int, microbatches: int) -> Layout:
    """The schedule that a plan's step follows. One process with several stages is a GPipe over its devices."""
    recomputed = recomputed_blocks(config.recompute, facts.num_blocks)
    if strategy == "pipeline":
        return Layout(config.schedule, num_stages // stages_per_rank, stages_per_rank, microbatches, recomputed)
    return Layout("gpipe" if num_stages > 1 else "1f1b", num_stages, 1, microbatches, recomputed)


def with_prediction(plan: Plan, config: RunConfig, facts: ModelFacts, knowledge: Knowledge) -> Plan:
    """The plan with its predicted step."""
    layout = layout_of(config, facts, plan.strategy, plan.num_stages, plan.stages_per_rank, plan.microbatches)
    stopwatch = _stopwatch(knowledge, plan.micro_size, layout, plan.replicas)
    return replace(plan, prediction=stopwatch.predict(plan, knowledge.tokens_per_row))


def _stopwatch(knowledge: Knowledge, micro_size: int, layout: Layout, replicas: int) -> Stopwatch:
    orders = knowledge.orders(layout.schedule, layout.ranks, layout.stages_per_rank, layout.microbatches)
    return Stopwatch(layout, knowledge.times_of(micro_size, layout.ranks, replicas), orders)


def _judge(
    knowledge: Knowledge,
    config: RunConfig,
    facts: ModelFacts,
    world: World,
    draft: Plan,
    with_spans: Callable[[tuple[StageSpan, ...], Iterable[int]], Plan],
) -> SplitJudge:
    """What the rules time and memory may ask; nothing is measured before they do."""
    layout = layout_of(config, facts, draft.strategy, draft.num_stages, draft.stages_per_rank, draft.microbatches)

    def needed_bytes(stage: int, span: StageSpan) -> int:
        # The other stages are not looked at.
        spans = tuple(span if index == stage else other for index, other in enumerate(draft.spans))
        if draft.strategy == "local":  # one process, a device for each stage
            return knowledge.needed_bytes(with_spans(spans, [0]), 0, stage)
        row = with_spans(spans, [stage]).ranks[0]
        empty = [replace(row, rank=rank) for rank in range(draft.pipeline_ranks)]
        return knowledge.needed_bytes(replace(draft, spans=spans, ranks=tuple(empty)), stage, 0)

    smallest = [smallest_card(group) for group in cards_of_ranks(world.cards, draft.replicas)]
    budgets = [card.memory_bytes for card in smallest][: draft.num_stages]
    return SplitJudge(
        stopwatch=lambda: _stopwatch(knowledge, draft.micro_size, layout, draft.replicas),
        layout=layout,
        needed_bytes=needed_bytes,
        budgets=tuple(budgets) if len(budgets) == draft.num_stages and draft.stages_per_rank == 1 else None,
        card_names=tuple(card.name for card in smallest),
        kinds=tuple(knowledge.block_kinds()) if effective_rule(config.partition) in ("time", "memory") else (),
        weight_bytes=lambda names: weight_bytes(config, facts, {facts.canonical_name(name) for name in names}),
    )


def launch_command(world_size: int, config_path: str = "CONFIG") -> str:
    """The torchrun command of a run with this many processes."""
    return f"torchrun --nproc_per_node {world_size} -m mpfinetune train {config_path}"


def _placement(config: RunConfig, strategy: str, facts: ModelFacts, world: World) -> Placement | None:
    # A pipeline that goes on in one process (one card where two were meant) has a map of stages, not of devices.
    if strategy != "local" or config.strategy != "local" or config.partition.local_overlap or not config.partition.device_map:
        return None
    return resolve_device_map(config.partition.device_map, facts, world.visible_devices)


def _replicas(config: RunConfig, strategy: str, pipeline_ranks: int, world: World, engine: EngineChoice) -> int:
    if world.world_size is None:
        replicas = 1 if strategy == "local" else max(1, world.visible_devices // pipeline_ranks)
    elif strategy == "local":
        if world.world_size != 1:
            raise LaunchError(
                f"strategy: local runs in one process, but {world.world_size} were started; "
                "use `mpfinetune train CONFIG` or torchrun --nproc_per_node 1, or set strategy: pipeline"
            )
        replicas = 1
    else:
        replicas, rest = divmod(world.world_size, pipeline_ranks)
        if rest or not replicas:
            raise LaunchError(
                f"{world.world_size} processes were started, but the plan has {pipeline_ranks} pipeline ranks, and every replica needs all of "
                f"them: the number of processes must be a multiple of {pipeline_ranks}. Start it with: {launch_command(pipeline_ranks)}"
            )
    if world.device_type == "cuda" and world.world_size is None and pipeline_ranks * replicas > world.visible_devices:
        raise LaunchError(
            f"the plan needs {pipeline_ranks} cards, but {world.visible_devices} are visible (CUDA_VISIBLE_DEVICES, devices); "
            "take fewer stages, or strategy: local for one card"
        )
    if engine.offload_gradients != "none" and replicas > 1:
        raise ConfigError(
            f"offload.gradients: cpu given with {replicas} replicas, whose gradients would have to come back to the cards to be summed; start "
            f"{pipeline_ranks} processes (devices: {pipeline_ranks}), or set offload.gradients: none"
        )
    return replicas


def _rank_plan(rank: int, config: RunConfig, facts: ModelFacts, spans: tuple[StageSpan, ...], ranks: int, stages_per_rank: int) -> RankPlan:
    one_process = ranks == 1  # of several stages: strategy local, or a looped schedule on one rank
    stages = list(range(len(spans))) if one_process else stages_of_rank(config.schedule, rank, ranks, stages_per_rank)
    names = [name for stage in stages for name in spans[stage].parameter_names(facts)]
    held = {facts.canonical_name(name) for name in names}
    learning = held & learning_names(config, facts)
    recomputed_blocks(config.recompute, facts.num_blocks)  # a block that the model does not have is said now, not on the ranks
    return RankPlan(
        rank=rank,
        stages=tuple(stages),
        holds="; ".join(describe_span(spans[stage]) for stage in stages),
        parameters=facts.numel(names),
        weight_bytes=weight_bytes(config, facts, held),
        gradient_bytes=facts.numel(learning) * 4,  # accumulated in fp32, whatever the weights' type
        optimizer_bytes=sum(optimizer_bytes(config, facts, name) for name in learning) + code_table_bytes(config, facts, learning),
        master_bytes=sum(master_bytes(config, facts, name) for name in learning),
        learning_bytes=weight_bytes(config, facts, learning),
        shared_gradient_bytes=facts.numel(learning & shared_names(facts, names)) * 4,
    )


def describe_span(span: StageSpan) -> str:
    """A span as the user would write it in ``partition.stages``."""
    parts = ["embed"] if span.has_prologue else []
    if span.stop - span.start == 1:
        parts.append(str(span.start))
    elif span.stop > span.start:
        parts.append(f"{span.start}-{span.stop - 1}")
    return ", ".join(parts + (["head"] if span.has_epilogue else []))


def plan_rows(plan: Plan) -> list[tuple[Any, ...]]:
    """One row per pipeline rank, for a table: rank, stages, what it holds, parameters, MiB of weights, gradients, optimizer, sum."""
    mib = 2.0**20
    return [
        (
            row.rank,
            ",".join(map(str, row.stages)),
            row.holds,
            f"{row.parameters:,}",
            *(f"{size / mib:.1f}" for size in (row.weight_bytes, row.gradient_bytes, row.optimizer_bytes, row.total_bytes)),
        )
        for row in plan.ranks
    ]
