"""Predicted bytes of every card and of the host, phase by phase: pure arithmetic on the plan, the model's facts and its measured costs.

Weights, gradients and optimizer states are counted tensor by tensor. Activations come from the fake run (``models.costs``) and from the order in
which a rank acts. What no run of ours can tell before it starts is a stated constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpfinetune.config import RunConfig
from mpfinetune.models.costs import ModelCosts
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.recompute import recomputed_blocks
from mpfinetune.planning.activations import StageCost, StepPeak, stage_cost, step_peak
from mpfinetune.planning.engines import engine_precision
from mpfinetune.planning.host_memory import host_needs
from mpfinetune.planning.memory_plan import MIB, CardMemory, MemoryPlan, PhaseMemory
from mpfinetune.planning.plan import Plan, World
from mpfinetune.planning.schedule import Action
from mpfinetune.planning.tensor_bytes import TYPE_BYTES, learning_names, optimizer_bytes, precision_bytes, shared_names, weight_bytes

# CUDA's context with torch's kernels and cuBLAS' workspace: 300 to 600 MiB on cards of the last ten years.
CUDA_CONTEXT_BYTES = 450 * MIB
# Share of what comes and goes that the caching allocator cannot reuse.
FRAGMENTATION = 0.05
# torch's pipeline keeps receive buffers of other lengths for later (strategies/pipeline.py drops the oldest beyond this).
CACHED_BUFFER_BYTES = 256 * MIB
# DeepSpeed's buckets as strategies/deepspeed_config.py sets them: elements in fp32.
BUCKET_BYTES = 4 * 16 * MIB
# DeepSpeed's stage 3 keeps at most so many gathered elements (stage3_max_live_parameters).
LIVE_PARAMETERS = 10**9


@dataclass(frozen=True)
class _Static:
    """What a card holds besides activations."""

    weights: int
    gradients: int
    optimizer: int
    masters: int  # of the optimizer's bytes, those that are there before the first update
    largest: int  # elements of the largest parameter that learns
    learning: int  # of the weights, those that learn


def predict_memory(
    config: RunConfig,
    facts: ModelFacts,
    plan: Plan,
    world: World,
    costs: ModelCosts | None,
    orders: Mapping[int, Sequence[Action]],
    card_bytes: Sequence[int] = (),
    host_total_bytes: int | None = None,
) -> MemoryPlan:
    """The memory of one replica's cards and of the fullest host.

    Args:
        costs: of a microbatch at its full length; None where the model cannot be measured: activations are then left out, and said to be.
        orders: each pipeline rank's actions.
        card_bytes: memory of each card, in rank order; empty: not known.
    """
    cards = tuple(
        card_memory(config, facts, plan, costs, orders, rank, device, card_bytes)
        for rank in range(plan.pipeline_ranks)
        for device in range(_devices(plan))
    )
    per_host = world.processes_per_host or plan.world_size
    on_cpu = plan.device_type == "cpu"
    of_rank = [[card for card in cards if card.rank == row.rank] for row in plan.ranks]
    needs = [host_needs(config, facts, plan, row, own) for row, own in zip(plan.ranks, of_rank, strict=True)]
    on_cards = [sum(card.peak.total_bytes for card in own) if on_cpu else 0 for own in of_rank]
    everywhere = []
    for need, on_card in zip(needs, on_cards, strict=True):
        held = need.pinned + need.pageable + on_card
        everywhere += [held + need.saving, *[held] * (plan.replicas - 1)]  # one replica of each rank writes
    everywhere.sort(reverse=True)
    return MemoryPlan(
        cards=cards,
        host_pinned_bytes=tuple(need.pinned for need in needs),
        host_pageable_bytes=tuple(need.pageable + need.saving for need in needs),
        fullest_host_bytes=sum(everywhere[:per_host]),
        host_total_bytes=host_total_bytes,
        activations_known=costs is not None,
    )


def whole_model_order(microbatches: int, at_once: bool) -> list[Action]:
    """One process: each microbatch forward and backward in turn, or all forward passes first (``at_once``)."""
    if at_once:
        return [(0, "F", index) for index in range(microbatches)] + [(0, "B", index) for index in range(microbatches)]
    return [(0, kind, index) for index in range(microbatches) for kind in "FB"]


def _devices(plan: Plan) -> int:
    """Devices of one process."""
    if plan.placement is not None:
        return max(plan.placement.homes.values()) + 1
    return plan.num_stages if plan.strategy == "local" else 1


def card_memory(
    config: RunConfig,
    facts: ModelFacts,
    plan: Plan,
    costs: ModelCosts | None,
    orders: Mapping[int, Sequence[Action]],
    rank: int,
    device: int,
    card_bytes: Sequence[int],
) -> CardMemory:
    """One card of one rank; of ``plan.ranks`` only that rank's row is read."""
    stages = plan.stages_of(rank) if _devices(plan) == 1 else [device if plan.placement is None else 0]
    static = _static(config, facts, plan, rank, device)
    step, evaluation, buffers = StepPeak(), 0, 0
    if costs is not None:
        stage_costs = {stage: _stage_cost(config, facts, plan, costs, stage, stages) for stage in stages}
        if plan.strategy == "pipeline":
            step, buffers = step_peak(orders[rank], stage_costs), _buffers(config, plan, costs, stages)
        else:
            order = whole_model_order(plan.microbatches, at_once=plan.num_stages > 1)
            step = step_peak([(stages[0], kind, index) for _, kind, index in order], stage_costs)
        if plan.placement is not None:
            step = _share_of(step, facts, plan, device)
        evaluation = max(cost.evaluation_peak_bytes for cost in stage_costs.values())
        if plan.strategy == "pipeline":
            # torch's runtime keeps every microbatch's output to the end.
            evaluation += sum(_leaving(plan, costs, stage) * plan.microbatches for stage in stages)
    known = card_bytes[rank * _devices(plan) + device] if len(card_bytes) > rank * _devices(plan) + device else None
    on_card = plan.device_type == "cuda"
    phases = _phases(plan, static, step, evaluation, buffers, _engine_bytes(config, facts, plan, static))
    moving = max(phase.activation_bytes + phase.workspace_bytes for phase in phases)
    return CardMemory(
        rank=rank,
        device=device,
        phases=phases,
        in_flight=step.in_flight,
        saved_bytes=step.most_saved_bytes,
        context_bytes=CUDA_CONTEXT_BYTES if on_card else 0,
        fragmentation_bytes=round(FRAGMENTATION * moving) if on_card else 0,
        card_bytes=known,
    )


def _static(config: RunConfig, facts: ModelFacts, plan: Plan, rank: int, device: int) -> _Static:
    row = plan.ranks[rank]
    names = {facts.canonical_name(name) for stage in plan.stages_of(rank) for name in plan.spans[stage].parameter_names(facts)}
    if plan.placement is not None:
        names = {name for name in names if plan.placement.device_of(name) == device}
    elif _devices(plan) > 1:
        names = {facts.canonical_name(name) for name in plan.spans[device].parameter_names(facts)}
    learning = names & learning_names(config, facts)
    largest = max((facts.parameters[name].numel for name in learning), default=0)
    masters = 0 if plan.offload_optimizer != "none" else row.master_bytes
    if _devices(plan) == 1:
        return _Static(row.weight_bytes, row.gradient_bytes, row.optimizer_bytes, masters, largest, row.learning_bytes)
    narrow = sum(4 * facts.parameters[name].numel for name in learning if precision_bytes(config, facts, name) < 4)
    optimizer = sum(optimizer_bytes(config, facts, name) for name in learning)
    return _Static(weight_bytes(config, facts, names), facts.numel(learning) * 4, optimizer, narrow, largest, weight_bytes(config, facts, learning))


def _stage_cost(config: RunConfig, facts: ModelFacts, plan: Plan, costs: ModelCosts, stage: int, stages: Sequence[int]) -> StageCost:
    """One of the ``stages`` of a card, for one microbatch."""
    span = plan.spans[stage]
    learning = learning_names(config, facts)
    gradients = _gradients_by_part(facts, plan, learning, stage, stages)
    if plan.strategy == "zero" and plan.zero_stage >= 2 and plan.offload_optimizer != "none":
        gradients = {}  # on the host
    elif plan.zero_stage >= 2:
        gradients = {name: size // plan.replicas for name, size in gradients.items()}
    waiting = 0
    if span.has_prologue and span.has_epilogue:
        tied = {names[0] for names in facts.tied_names} & learning
        waiting = sum(facts.parameters[name].numel * precision_bytes(config, facts, name) for name in tied)
    policy = config.recompute
    return stage_cost(costs, span, recomputed_blocks(policy, facts.num_blocks), policy == "offload", gradients, waiting)


def _gradients_by_part(facts: ModelFacts, plan: Plan, learning: frozenset[str], stage: int, stages: Sequence[int]) -> dict[str, int]:
    """Bytes of the fp32 sums of gradients that come into being in a stage, by the part after whose backward pass they are there."""
    span = plan.spans[stage]
    names = {index: plan.spans[index].parameter_names(facts) for index in stages}
    # What two stages of a card hold has one sum, which is there from the later stage's backward pass on, since that is the earlier one.
    counted = {facts.canonical_name(name) for index in stages if index > stage for name in names[index]}
    staying = learning if plan.offload_gradients == "none" else learning & shared_names(facts, itertools.chain.from_iterable(names.values()))
    gradients: dict[str, int] = {}
    for name in names[stage]:
        canonical, part = facts.canonical_name(name), facts.parameters[name]
        if canonical in counted or canonical not in staying:
            continue
        counted.add(canonical)
        if part.block is not None:
            where = f"block {part.block}"
        elif part.part == "epilogue" or (span.start == span.stop and not span.has_prologue):
            where = "epilogue"
        else:  # what every stage holds is complete when the stage's first block is through
            where = "prologue" if span.has_prologue else f"block {span.start}"
        gradients[where] = gradients.get(where, 0) + 4 * part.numel
    return gradients


def _leaving(plan: Plan, costs: ModelCosts, stage: int) -> int:
    """Bytes of the hidden states that leave a stage."""
    span = plan.spans[stage]
    return 0 if span.has_epilogue else costs.parts[span.stop].boundary_bytes


def _buffers(config: RunConfig, plan: Plan, costs: ModelCosts, stages: list[int]) -> int:
    """Receive buffers: hidden states and gradients of every microbatch of the update, hidden states of an evaluation, and those of other lengths."""
    hidden = sum(_leaving(plan, costs, stage - 1) for stage in stages if stage > 0)
    gradients = sum(_leaving(plan, costs, stage) for stage in stages)
    own = plan.microbatches * (2 * hidden + gradients)
    if config.data.padding == "fixed":
        return own
    lengths = max(0, costs.tokens // config.data.pad_to_multiple_of - 1)
    return own + min(lengths * own // 2, CACHED_BUFFER_BYTES)


def _phases(plan: Plan, static: _Static, step: StepPeak, evaluation: int, buffers: int, engine: int) -> tuple[PhaseMemory, ...]:
    kept = min(step.most_kept_bytes, step.activation_bytes + step.workspace_bytes)
    passing = step.activation_bytes + step.workspace_bytes - kept
    # torch's AdamW over lists of tensors makes one copy of their size, on the CPU one of the largest tensor's.
    update = 0
    if plan.offload_optimizer == "none":
        update = 4 * static.largest if plan.device_type == "cpu" else static.gradients
    in_pass = min(step.gradient_bytes, static.gradients) if step.total_bytes else static.gradients
    # The engine of stages 1 and 2 copies what learns once more before its masters leave.
    cloned = static.learning if plan.zero_stage in (1, 2) and plan.offload_optimizer != "none" else 0
    first = PhaseMemory("first step", static.weights, in_pass, static.masters, kept, passing + engine, buffers)
    steady = replace(first, name="step", optimizer_bytes=static.optimizer)
    return (
        PhaseMemory("load", static.weights, workspace_bytes=cloned),
        first,
        steady,
        PhaseMemory("update", static.weights, static.gradients, static.optimizer, 0, update + engine, buffers),
        PhaseMemory("evaluation", static.weights, 0, static.optimizer, 0, evaluation + engine, buffers),
        PhaseMemory("save", static.weights, 0, static.optimizer, 0, engine, buffers),
    )


def _engine_bytes(config: RunConfig, facts: ModelFacts, plan: Plan, static: _Static) -> int:
    """DeepSpeed's own buffers on the card: the bucket that gradients go through, the largest gradient on its way to the host, gathered weights."""
    if not plan.zero_stage:
        return 0
    moving = TYPE_BYTES[engine_precision(facts, plan.precision)] * static.largest if plan.offload_optimizer != "none" else 0
    gathered = 0
    if plan.zero_stage == 3:
        gathered = min(weight_bytes(config, facts, {*map(facts.canonical_name, facts.parameters)}), TYPE_BYTES[plan.precision] * LIVE_PARAMETERS)
    return BUCKET_BYTES + moving + gathered


def _share_of(step: StepPeak, facts: ModelFacts, plan: Plan, device: int) -> StepPeak:
    """A map puts modules on devices by name; activations follow the parameters, by the blocks' share on each device."""
    placement = plan.placement
    assert placement is not None
    numel = {name: part.numel for name, part in facts.parameters.items() if part.part == "block"} or {n: p.numel for n, p in facts.parameters.items()}
    here = sum(size for name, size in numel.items() if placement.device_of(name) == device)
    whole = max(1, sum(numel.values()))

    def part(number: int) -> int:
        return number * here // whole

    return StepPeak(
        activation_bytes=part(step.activation_bytes),
        workspace_bytes=part(step.workspace_bytes),
        gradient_bytes=part(step.gradient_bytes),
        most_kept_bytes=part(step.most_kept_bytes),
        most_saved_bytes=part(step.most_saved_bytes),
        in_flight=step.in_flight,
    )
