"""Predicted bytes of a rank's process in the host's memory: what is offloaded, the engine's buffers, and what comes and goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpfinetune.config import RunConfig
from mpfinetune.models.facts import ModelFacts
from mpfinetune.planning.engines import engine_precision
from mpfinetune.planning.memory_plan import CHECKPOINT_BYTES_AT_ONCE, GIB, MIB, CardMemory
from mpfinetune.planning.plan import Plan, RankPlan
from mpfinetune.planning.swap import swap_buffer_bytes
from mpfinetune.planning.tensor_bytes import TYPE_BYTES, learning_names, weight_bytes

# Resident bytes of a process that has imported torch, transformers and its data, before the model (500 to 560 MiB on Linux with torch 2.13);
# CUDA's libraries come on top.
PROCESS_BYTES = {"cpu": 550 * MIB, "cuda": 2 * GIB}


@dataclass(frozen=True)
class HostNeeds:
    """Of one pipeline rank; on the CPU without the "card" itself."""

    pinned: int
    pageable: int
    saving: int  # besides, while a checkpoint is written, which the first of a rank's replicas does


def host_needs(config: RunConfig, facts: ModelFacts, plan: Plan, row: RankPlan, cards: Sequence[CardMemory]) -> HostNeeds:
    """What the process of a rank needs; ``cards`` are its own."""
    largest = max((part.numel for part in facts.parameters.values()), default=0)
    leaving = max(_learning_elements(config, facts, plan, row), default=0)
    offloaded = row.host_bytes + row.host_buffer_bytes + swap_buffer_bytes(config, facts, plan)
    inputs = _offloaded_inputs(config, facts, plan, row, {stage: count for card in cards for stage, count in card.in_flight})
    saving = _saved_at_once(config, facts, plan, row)
    if plan.device_type == "cpu":
        # There what is copied takes the room that activations and gradients have left.
        room = sum(card.peak.total_bytes - card.phase("save").total_bytes for card in cards)
        saving = max(0, saving - room)
        return HostNeeds(0, PROCESS_BYTES["cpu"] + offloaded + inputs, saving)
    moving = TYPE_BYTES[engine_precision(facts, plan.precision)] * leaving if plan.offload_optimizer != "none" else 0
    moments = _host_moments(config, facts, plan, row)
    pinned = offloaded - moments + moving + sum(rounded_up(size) - size for size in _pinned_tensors(config, facts, plan, row))
    # A weight is read, cast and quantised one by one; on the CPU there is room for it before gradients and states come.
    loading = largest * (4 + TYPE_BYTES[config.precision])
    return HostNeeds(pinned, PROCESS_BYTES["cuda"] + loading + inputs + moments, saving)


def rounded_up(size: int) -> int:
    """What torch's caching allocator takes for a pinned tensor: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def _held_names(facts: ModelFacts, plan: Plan, row: RankPlan) -> set[str]:
    return {facts.canonical_name(name) for stage in row.stages for name in plan.spans[stage].parameter_names(facts)}


def _learning_elements(config: RunConfig, facts: ModelFacts, plan: Plan, row: RankPlan) -> list[int]:
    """Of each parameter of the rank that learns."""
    return [facts.parameters[name].numel for name in _held_names(facts, plan, row) & learning_names(config, facts)]


def _host_moments(config: RunConfig, facts: ModelFacts, plan: Plan, row: RankPlan) -> int:
    """Bytes of CPUAdam's two moments in fp32, which it does not pin, unlike the masters and gradients that the engine gives it."""
    on_host = plan.offload_optimizer == "cpu" or (plan.offload_optimizer == "nvme" and plan.zero_stage in (1, 2))
    return 8 * (sum(_learning_elements(config, facts, plan, row)) // plan.replicas) if on_host else 0


def _pinned_tensors(config: RunConfig, facts: ModelFacts, plan: Plan, row: RankPlan) -> list[int]:
    """Bytes of the large tensors that the engine pins one by one.

    The master, its gradient and the updated weights on their way to the card are one tensor for all that decays and one for the rest, which is
    so small (norms and biases) that it is taken to be among the first.
    """
    if plan.offload_optimizer == "none":
        return []
    elements = _learning_elements(config, facts, plan, row)
    own = sum(elements) // plan.replicas
    if plan.zero_stage == 3:
        return [4 * own] * (1 if plan.offload_optimizer == "nvme" else 2)  # the microbatches' sum, and the master's gradient
    size = row.learning_bytes // max(1, sum(elements))
    # Stage 2 adds up each parameter's gradient in a tensor of its own.
    sums = [size * count for count in elements] if plan.strategy == "zero" and plan.zero_stage == 2 else []
    return [4 * own, 4 * own, row.learning_bytes // plan.replicas, *sums]


def _saved_at_once(config: RunConfig, facts: ModelFacts, plan: Plan, row: RankPlan) -> int:
    """Copies in host memory while a checkpoint is written: tensors on their way and the next one, unless they are written from where they are."""
    on_host = plan.device_type == "cpu" or plan.offload_optimizer != "none"
    if on_host and (not plan.zero_stage or (plan.replicas == 1 and plan.zero_stage < 3)):
        return 0
    copied = learning = _held_names(facts, plan, row) & learning_names(config, facts)
    states = 8 * facts.numel(learning) if plan.zero_stage else row.optimizer_bytes - row.master_bytes
    weights = 4 * facts.numel(learning)
    if plan.zero_stage == 3 and not facts.adapted:  # what does not learn is in parts, too; of an adapter run it is not saved
        copied = _held_names(facts, plan, row)
        weights += weight_bytes(config, facts, copied - learning)
    largest = max((facts.parameters[name].numel for name in copied), default=0)
    return min(max(weights, states), CHECKPOINT_BYTES_AT_ONCE + 4 * largest)  # one file after the other


def _offloaded_inputs(config: RunConfig, facts: ModelFacts, plan: Plan, row: RankPlan, in_flight: Mapping[int, int]) -> int:
    """With ``recompute: offload`` the blocks' inputs of every microbatch in flight, or of the most that any schedule has."""
    if config.recompute != "offload":
        return 0
    hidden = plan.micro_size * config.data.max_length * facts.hidden_size * TYPE_BYTES[config.precision]
    most = min(plan.microbatches, plan.num_stages)
    spans = {stage: plan.spans[stage] for stage in row.stages}
    return sum((span.stop - span.start) * hidden * in_flight.get(stage, most) for stage, span in spans.items())
