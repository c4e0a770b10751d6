"""The memory prediction without processes: what is measured, what is derived from it, what is refused, what a person reads."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.errors import LaunchError, ModelError
from mpfinetune.models.costs import CostMeter, CostQuestion, ModelCosts, PartCost
from mpfinetune.models.facts import ModelFacts, ParameterFacts, inspect_model
from mpfinetune.models.fake_kernels import CudaAttention
from mpfinetune.models.fake_run import Ledger
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning import host_memory
from mpfinetune.planning.activations import stage_cost, step_peak
from mpfinetune.planning.engines import engine_lines
from mpfinetune.planning.host_memory import rounded_up
from mpfinetune.planning.memory import _stage_cost, predict_memory
from mpfinetune.planning.memory_plan import GIB, MEMORY_COLUMNS, MIB, MemoryPlan, host_line, memory_rows
from mpfinetune.planning.plan import Plan, World, make_plan
from mpfinetune.planning.predict import StepPrediction
from mpfinetune.planning.schedule import one_f_one_b_order
from mpfinetune.planning.swap import SUB_GROUP_ELEMENTS, swap_buffer_bytes, weight_buffer_elements
from mpfinetune.strategies.orders import schedule_orders
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.memory import (
    MeasuredMemory,
    compare,
    comparison_rows,
    plan_with_memory,
    refuse_disk_that_cannot_swap,
    refuse_what_cannot_fit,
)
from tests.families import task_of, tiny_config

ROWS, TOKENS = 2, 16


@cache
def facts_of(family: str) -> ModelFacts:
    return inspect_model(tiny_config(family), task_of(family))


def meter_of(family: str, **changes: Any) -> CostMeter:
    facts = facts_of(family)
    names = frozenset(facts.canonical_name(name) for name in facts.parameters)
    asked = {"task": task_of(family), "attention": "auto", "dtype": torch.float32, "learning": names, **changes}
    return CostMeter(tiny_config(family), facts, CostQuestion(**asked), loss_sum_for(task_of(family), 2))


@cache
def costs_of(family: str) -> ModelCosts:
    return meter_of(family).measure(ROWS, TOKENS)


def config_of(**changes: Any) -> RunConfig:
    base = {"model": {"path": "x", "task": "causal_lm"}, "data": {"path": "x.txt", "max_length": TOKENS}, "run_dir": "x"}
    return config_from_dict({**base, "batch": {"global_size": 8, "micro_size": ROWS}, **changes})


def planned(world: World | None = None, family: str = "llama", host: int | None = None, cards: tuple[int, ...] = (), **changes: Any) -> Plan:
    """A plan with its memory for cards and a host of given sizes."""
    config, facts, world = config_of(**changes), facts_of(family), world or World("cpu", 2, 2)
    plan = make_plan(config, facts, world)
    costs = costs_of(family)
    orders = schedule_orders(plan.schedule, plan.pipeline_ranks, plan.stages_per_rank, plan.microbatches) if plan.strategy == "pipeline" else {}
    return replace(plan, memory=predict_memory(config, facts, plan, world, costs, orders, cards, host))


def memory_of(plan: Plan) -> MemoryPlan:
    assert plan.memory is not None
    return plan.memory


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_what_is_kept_grows_along_a_straight_line_and_a_size_is_run_once(family: str) -> None:
    meter = meter_of(family)
    two, four, six = (meter.measure(rows, TOKENS).saved_bytes for rows in (2, 4, 6))
    assert six - four == four - two > 0
    assert meter.measure(2, TOKENS) is meter.measure(2, TOKENS)


def test_blocks_of_the_same_build_are_measured_once_and_others_apart() -> None:
    assert meter_of("llama")._like == [0, 0, 0, 0]
    assert meter_of("gemma2")._like == [0, 1, 0, 1]  # every other one has a sliding window
    facts = facts_of("llama")
    last = frozenset(name for name in facts.parameters if name.startswith("model.layers.3.") or name == "lm_head.weight")
    meter = meter_of("llama", learning=last)
    assert meter._like == [0, 0, 0, 3]
    costs = meter.measure(ROWS, TOKENS)
    assert [block.saved_bytes > 0 for block in costs.blocks] == [False, False, False, True]
    assert costs.blocks[0].backward_flops == 0 < costs.blocks[3].backward_flops


def test_flops_of_a_block_are_those_of_its_products() -> None:
    block = costs_of("llama").blocks[0]
    width, inner, keys = 32, 48, 16
    products = 2 * ROWS * TOKENS * (2 * width * width + 2 * width * keys + 3 * width * inner)
    attention = 2 * 2 * ROWS * TOKENS * TOKENS * width
    assert block.forward_flops == products + attention
    assert block.backward_flops >= 2 * products + 2 * attention
    assert block.boundary_bytes == 4 * ROWS * TOKENS * width


def test_a_card_with_fused_attention_keeps_no_square_matrix_but_the_mask_and_an_old_one_does() -> None:
    def saved(tokens: int, capability: tuple[int, int] | None = None) -> int:
        return meters[capability].measure(ROWS, tokens).blocks[0].saved_bytes

    meters = {c: meter_of("llama", target="cuda", dtype=torch.bfloat16, capability=c) for c in (None, (7, 5))}
    heads, square = 4, ROWS * 2 * (64 * 64 - 2 * 32 * 32)
    # Every block keeps the mask as numbers to add.
    assert saved(64) - 2 * saved(32) == square
    # bf16 below compute capability 8.0: plain products, with the weights of the attention.
    assert saved(64, (7, 5)) - 2 * saved(32, (7, 5)) >= heads * square


@pytest.mark.parametrize(
    ("dtype", "capability", "grouped", "fused"),
    [
        (torch.bfloat16, (8, 0), True, True), (torch.float16, None, True, True), (torch.float32, (8, 0), False, True),
        (torch.float32, (8, 0), True, False), (torch.float16, (7, 5), False, True), (torch.float16, (6, 1), True, False),
    ],
)  # fmt: skip
def test_attention_kernel_of_a_card(dtype: torch.dtype, capability: tuple[int, int] | None, grouped: bool, fused: bool) -> None:
    with FakeTensorMode():
        query = torch.empty(2, 4, 16, 8, dtype=dtype, requires_grad=True)
        key, value = (torch.empty(2, 2 if grouped else 4, 16, 8, dtype=dtype) for _ in range(2))
        ledger = Ledger(())
        with CudaAttention(ledger, capability):
            output = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        assert output.shape == query.shape
        assert (type(output.grad_fn).__name__ == "_FusedAttentionBackward") == fused
        output.sum().backward()
        assert query.grad is not None and query.grad.shape == query.shape


def test_a_model_without_a_chain_of_blocks_is_one_part() -> None:
    facts = inspect_model(tiny_config("albert"), "sequence_classification")
    names = frozenset(facts.canonical_name(name) for name in facts.parameters)
    question = CostQuestion("sequence_classification", "auto", torch.float32, names)
    costs = CostMeter(tiny_config("albert", num_labels=2), facts, question, loss_sum_for("sequence_classification", 2)).measure(ROWS, TOKENS)
    assert len(costs.parts) == 2 and costs.blocks == () and costs.prologue == replace(PartCost("prologue"), boundary_bytes=0)
    assert costs.epilogue.saved_bytes > 0


MADE_UP = ModelCosts(
    rows=1,
    tokens=1,
    parts=(
        PartCost("prologue", 5, 0, 10, 12, 30, 12),
        *(PartCost(f"block {index}", 100, 10, 10, 120, 150, 40) for index in range(4)),
        PartCost("epilogue", 50, 10, 40, 90, 95, 60),
    ),
    side_input_bytes=7,
    side_saved_bytes=3,
)


def test_a_stage_keeps_what_its_parts_keep() -> None:
    first = stage_cost(MADE_UP, StageSpan(0, 2, True, False), frozenset(), False, {})
    last = stage_cost(MADE_UP, StageSpan(2, 4, False, True), frozenset(), False, {})
    assert first.kept_bytes == 3 + 5 + 110 + 110 + 10  # side, prologue, blocks with their inputs, the output until it is needed no more
    assert last.kept_bytes == 3 + 100 + 110 + 60  # the first input lies in the receive buffer
    assert last.saved_bytes == 3 + 110 + 110 + 60
    recomputed = stage_cost(MADE_UP, StageSpan(0, 2, True, False), frozenset({0, 1}), False, {})
    assert recomputed.kept_bytes == 7 + 5 + 10 + 10 + 10  # side inputs and inputs are given again
    assert recomputed.parts[1].backward_peak_bytes == 7 + 5 + 10 + 150  # what recompute makes again is in the backward peak
    offloaded = stage_cost(MADE_UP, StageSpan(0, 2, True, False), frozenset({0, 1}), True, {})
    assert offloaded.kept_bytes == 7 + 5 + 10


@pytest.mark.parametrize(("rank", "most"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_1f1b_holds_fewer_microbatches_towards_the_end(rank: int, most: int) -> None:
    cost = stage_cost(MADE_UP, StageSpan(rank, rank + 1, rank == 0, rank == 3), frozenset(), False, {})
    peak = step_peak(one_f_one_b_order(rank, 4, 8), {rank: cost})
    assert peak.in_flight == ((rank, most),) and peak.most_kept_bytes == most * cost.kept_bytes
    assert step_peak(one_f_one_b_order(rank, 4, 2), {rank: cost}).in_flight == ((rank, min(most, 2)),)


def test_gradients_count_from_the_first_backward_pass_on() -> None:
    cost = stage_cost(MADE_UP, StageSpan(0, 4, True, True), frozenset(), False, {"epilogue": 1000, "block 3": 500})
    alone = step_peak([(0, "F", 0), (0, "B", 0)], {0: cost})
    assert alone.gradient_bytes == 1500 and alone.workspace_bytes == cost.parts[-3].backward_peak_bytes
    two = step_peak([(0, "F", 0), (0, "B", 0), (0, "F", 1), (0, "B", 1)], {0: cost})
    assert two.total_bytes == 1500 + cost.parts[-1].backward_peak_bytes


def test_a_split_backward_pass_holds_a_microbatch_to_the_weights_half() -> None:
    cost = stage_cost(MADE_UP, StageSpan(3, 4, False, True), frozenset(), False, {})
    order = [(3, kind, index) for index in range(3) for kind in ("F", "I")] + [(3, "W", index) for index in range(3)]
    assert step_peak(order, {3: cost}).in_flight == ((3, 3),)
    assert step_peak([(3, kind, index) for index in range(3) for kind in ("F", "I", "W")], {3: cost}).in_flight == ((3, 1),)


def test_phases_tell_when_each_card_is_fullest() -> None:
    plan = planned()
    for row, card in zip(plan.ranks, memory_of(plan).cards, strict=True):
        steady, update, first = card.phase("step"), card.phase("update"), card.phase("first step")
        assert (update.weight_bytes, update.gradient_bytes, update.optimizer_bytes) == (row.weight_bytes, row.gradient_bytes, row.optimizer_bytes)
        assert first.optimizer_bytes == 0 and first.total_bytes < steady.total_bytes
        assert card.phase("load").total_bytes == row.weight_bytes
        assert card.phase("save").gradient_bytes == card.phase("evaluation").gradient_bytes == 0
        assert card.peak is max(card.phases, key=lambda phase: phase.total_bytes)
        assert steady.activation_bytes > 0 and steady.workspace_bytes > 0 and steady.buffer_bytes > 0
        assert card.context_bytes == 0 and card.fits is None
    bf16 = memory_of(planned(precision="bf16")).cards[0]
    assert bf16.phase("first step").optimizer_bytes == 2 * bf16.phase("load").weight_bytes  # the masters are there from the start


@pytest.mark.parametrize("changes", [{}, {"schedule": "zbv"}, {"strategy": "pipeline", "offload": {"optimizer": "cpu", "gradients": "cpu"}}])
def test_a_step_ends_with_the_gradients_of_all_that_a_card_holds_the_tied_head_among_them(changes: dict[str, Any]) -> None:
    """The last stage knows the matrix by the head's name; where both ends are on one card its gradient is counted once."""
    config, facts = config_of(**changes), facts_of("gpt2")
    plan = planned(family="gpt2", **changes)
    ends = facts.parameters["transformer.wte.weight"].numel * 4
    for row in plan.ranks:
        costs = [_stage_cost(config, facts, plan, costs_of("gpt2"), stage, row.stages) for stage in row.stages]
        assert sum(part.gradient_bytes for cost in costs for part in cost.parts) == row.gradient_bytes
        ended = [cost for cost, stage in zip(costs, row.stages, strict=True) if plan.spans[stage].has_epilogue]
        assert all(cost.parts[-1].gradient_bytes >= ends for cost in ended)
    assert memory_of(plan).cards[-1].phase("step").gradient_bytes == plan.ranks[-1].gradient_bytes


def test_what_every_stage_holds_is_among_each_stage_s_gradients() -> None:
    config, facts, plan = config_of(model={"path": "x", "task": task_of("mpnet")}, data={"task": "mrpc"}), facts_of("mpnet"), planned(family="mpnet")
    for row in plan.ranks:
        cost = _stage_cost(config, facts, plan, costs_of("mpnet"), row.rank, row.stages)
        assert sum(part.gradient_bytes for part in cost.parts) == row.gradient_bytes


def test_recompute_and_fewer_rows_take_less() -> None:
    def activations(**changes: Any) -> int:
        return memory_of(planned(**changes)).cards[0].phase("step").activation_bytes

    assert activations(recompute="full") < activations(recompute="every_2") < activations()
    assert activations(schedule="gpipe") > activations()


def test_offloaded_states_are_the_hosts() -> None:
    changes: dict[str, Any] = {"strategy": "pipeline", "offload": {"optimizer": "cpu"}}
    plain, plan = memory_of(planned()), planned(**changes)
    assert memory_of(plan).cards[0].phase("update").optimizer_bytes == 0
    row = plan.ranks[0]
    learning = row.gradient_bytes // 4
    # masters, their gradients, two moments; the updated weights; a checkpoint is written from where they are
    assert memory_of(plan).host_pageable_bytes[0] - plain.host_pageable_bytes[0] == (16 + 4) * learning > row.host_bytes > 0
    on_cards = planned(World("cuda", 2), precision="bf16", **changes)
    learning = on_cards.ranks[0].gradient_bytes // 4
    rounding = 2 * (rounded_up(4 * learning) - 4 * learning) + rounded_up(2 * learning) - 2 * learning
    largest = max(part.numel for part in facts_of("llama").parameters.values())
    assert memory_of(on_cards).host_pinned_bytes[0] == (8 + 2) * learning + 2 * largest + rounding
    assert memory_of(on_cards).host_pageable_bytes[0] == 8 * learning + 2 * GIB + 6 * largest  # moments are not pinned
    card = memory_of(on_cards).cards[0]
    assert card.context_bytes == 450 * MIB
    assert card.phase("load").total_bytes == 2 * on_cards.ranks[0].weight_bytes  # the engine copies them once while it is built


@pytest.mark.parametrize(("size", "taken"), [(0, 0), (1, 1), (2**20, 2**20), (2**20 + 1, 2**21), (3 * GIB, 4 * GIB)])
def test_pinned_memory_is_taken_in_powers_of_two(size: int, taken: int) -> None:
    assert rounded_up(size) == taken


def test_stage_2_pins_each_parameter_s_sum_and_one_replica_of_a_rank_writes() -> None:
    world = World("cuda", 2, 2)
    plan = planned(world, strategy="zero", zero={"stage": 2}, offload={"optimizer": "cpu"}, precision="bf16")
    sizes = [part.numel for part in facts_of("llama").parameters.values()]
    count, largest = sum(sizes), max(sizes)
    own = count // 2
    pinned_alone = (4 * own, 4 * own, 2 * own, *(2 * size for size in sizes))
    expected = (8 + 2 + 2) * own + 2 * largest + sum(rounded_up(size) - size for size in pinned_alone)
    assert memory_of(plan).host_pinned_bytes == (expected,)
    assert memory_of(plan).fullest_host_bytes == 2 * (expected + 8 * own + 2 * GIB + 6 * largest) + 8 * count


def test_without_an_engine_a_card_s_checkpoint_passes_through_the_host_one_file_at_a_time() -> None:
    plan = planned(World("cuda", 4), partition={"num_stages": 2}, precision="bf16", optimizer={"name": "adamw"})
    sgd = planned(World("cuda", 4), partition={"num_stages": 2}, precision="bf16", optimizer={"name": "sgd"})
    largest = max(part.numel for part in facts_of("llama").parameters.values())
    process = 2 * GIB + 6 * largest
    moments, weights = ([width * row.gradient_bytes // 4 for row in plan.ranks] for width in (8, 4))
    assert plan.replicas == 2 and memory_of(plan).host_pageable_bytes == tuple(process + size for size in moments)
    assert memory_of(plan).fullest_host_bytes == 4 * process + sum(moments)
    assert memory_of(sgd).fullest_host_bytes == 4 * process + sum(weights)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_large_checkpoint_passes_through_the_host_a_piece_at_a_time(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"strategy": "zero", "zero": {"stage": stage}} if stage else {"strategy": "local"}
    world = World("cuda", 2, 2) if stage else World("cuda", 1, 1)
    whole = memory_of(planned(world, **changes)).fullest_host_bytes
    monkeypatch.setattr(host_memory, "CHECKPOINT_BYTES_AT_ONCE", 100)
    pieces = memory_of(planned(world, **changes)).fullest_host_bytes
    sizes = [part.numel for part in facts_of("llama").parameters.values()]
    assert whole - pieces == 8 * sum(sizes) - (100 + 4 * max(sizes))


def test_inputs_that_recompute_offloads_are_those_of_the_schedule_s_microbatches() -> None:
    """GPipe has all of them in flight, 1F1B on the last rank one."""
    hidden = ROWS * TOKENS * facts_of("llama").hidden_size * 4
    for schedule, counts in (("gpipe", (4, 4)), ("1f1b", (2, 1))):
        plan, plain = (memory_of(planned(schedule=schedule, recompute=recompute)) for recompute in ("offload", "full"))
        assert tuple(dict(card.in_flight)[card.rank] for card in plan.cards) == counts
        moved = [with_offload - without for with_offload, without in zip(plan.host_pageable_bytes, plain.host_pageable_bytes, strict=True)]
        assert moved == [2 * hidden * count for count in counts]  # two blocks a rank


def test_what_the_host_adds_up_is_on_no_card() -> None:
    changes: dict[str, Any] = {"strategy": "zero", "zero": {"stage": 2}}
    plan = planned(World("cuda", 1, 1), **changes, offload={"optimizer": "cpu"})
    assert all(phase.gradient_bytes == 0 for phase in memory_of(plan).cards[0].phases)
    kept = memory_of(planned(World("cuda", 1, 1), **changes)).cards[0].phase("step")
    assert 2 * kept.gradient_bytes == plan.ranks[0].host_buffer_bytes > 0  # the sums and the updated weights, here both in fp32
    held = plan.ranks[0].host_bytes + plan.ranks[0].host_buffer_bytes
    assert memory_of(plan).host_pinned_bytes[0] + memory_of(plan).host_pageable_bytes[0] >= held


def test_a_disk_s_bytes_are_not_counted_as_the_host_s_memory() -> None:
    """A run larger than the host's memory was refused, though it had a disk for it."""
    on_host, on_disk = (
        planned(World("cuda", 1, 1), strategy="zero", zero={"stage": 3}, offload={"optimizer": where, "parameters": where, "nvme_path": "/x"})
        for where in ("cpu", "nvme")
    )
    moved = on_host.ranks[0].host_bytes
    assert (on_disk.ranks[0].disk_bytes, on_disk.ranks[0].host_bytes) == (moved, 0)
    own = 4 * facts_of("llama").numel(facts_of("llama").parameters)
    rounding = rounded_up(own) - own  # of the masters' gradient
    buffers = swap_buffer_bytes(config_of(strategy="zero"), facts_of("llama"), on_disk)
    assert memory_of(on_host).fullest_host_bytes - memory_of(on_disk).fullest_host_bytes == moved + rounding - buffers
    assert moved > 0 < buffers
    assert all(f"({moved / MIB:.1f} MiB over one replica's ranks)" in engine_lines(plan)[0] for plan in (on_host, on_disk))


def test_a_disk_that_cannot_take_the_offload_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "swap"
    offload = {"optimizer": "cpu", "parameters": "nvme", "nvme_path": str(folder)}
    plan = planned(World("cpu", 1, 1), strategy="zero", zero={"stage": 3}, offload=offload)
    refuse_disk_that_cannot_swap(plan, str(folder))
    assert list(folder.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"offload\.nvme_path: .*file given, but nothing can be written there"):
        refuse_disk_that_cannot_swap(plan, str(tmp_path / "file"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=plan.ranks[0].disk_bytes - 1))
    with pytest.raises(LaunchError, match=r"GiB free, but .* GiB will be offloaded to it; make room"):
        refuse_disk_that_cannot_swap(plan, str(folder))


def test_the_buffers_of_a_disk_are_as_large_as_what_goes_through_them() -> None:
    """For a model whose optimizer does not fit into one sub-group: the buffers are of a sub-group, not of the model."""
    sizes = {"a.weight": (SUB_GROUP_ELEMENTS // 2, 2), "b.weight": (1000, 3), "c.weight": (SUB_GROUP_ELEMENTS - 3000, 1), "d.bias": (7,)}
    facts = replace(facts_of("llama"), parameters={name: ParameterFacts(shape, "block", 0) for name, shape in sizes.items()}, tied_names=())
    config = config_of(strategy="zero", zero={"stage": 3}, precision="bf16")
    plan = replace(planned(World("cpu", 1, 1), strategy="zero", zero={"stage": 3}), offload_optimizer="nvme", offload_parameters="nvme")
    # Weights in bf16 are aligned to 512 elements: b and c, the second sub-group, are 3072 and the rest.
    assert weight_buffer_elements(config, facts, 1) == SUB_GROUP_ELEMENTS and weight_buffer_elements(config, facts, 2) == SUB_GROUP_ELEMENTS // 2
    weights = 5 * 2 * SUB_GROUP_ELEMENTS + 2 * (3072 + (SUB_GROUP_ELEMENTS - 3000 + 440))
    assert swap_buffer_bytes(config, facts, plan) == weights + 4 * 4 * SUB_GROUP_ELEMENTS
    assert swap_buffer_bytes(config, facts, replace(plan, offload_optimizer="cpu", offload_parameters="cpu")) == 0


def test_what_cannot_fit_is_refused_with_the_keys_to_change() -> None:
    with pytest.raises(LaunchError, match=r"need 1\.\d GiB of host memory, but it has 0\.5 GiB \(device: cpu\); take a smaller model, batch"):
        refuse_what_cannot_fit(planned(host=GIB // 2))
    refuse_what_cannot_fit(planned(host=64 * GIB))
    two_cards = World("cuda", 2)
    with pytest.raises(LaunchError, match=r"rank 0 would hold 0\.4 GiB of weights, gradients and optimizer states on a card of 0\.4 GiB; use more"):
        refuse_what_cannot_fit(planned(two_cards, cards=(450 * MIB, 24 * GIB)))
    # What is estimated is only warned of.
    tight = planned(two_cards, cards=(450 * MIB + 700_000, 24 * GIB), batch={"global_size": 64, "micro_size": 2})
    card = memory_of(tight).cards[0]
    assert card.fits is False and memory_of(tight).cards[1].fits is True
    refuse_what_cannot_fit(tight)
    assert memory_rows(memory_of(tight))[0][-1].endswith("TOO SMALL")


def test_a_person_reads_one_row_per_card_and_the_file_has_all() -> None:
    plan = planned(host=64 * GIB)
    rows = memory_rows(memory_of(plan))
    assert [len(row) for row in rows] == [len(MEMORY_COLUMNS)] * 2 and [row[6] for row in rows] == ["2", "1"]
    assert "of 64.0 GiB here" in host_line(memory_of(plan))
    written = json.loads(plan.to_json())["memory"]
    assert [phase["name"] for phase in written["cards"][0]["phases"]] == ["load", "first step", "step", "update", "evaluation", "save"]


def test_a_model_that_cannot_be_measured_is_planned_without_activations() -> None:
    def fail() -> CostMeter:
        raise ModelError("the model (llama) cannot be measured with fake tensors: because")

    config, facts, world = config_of(), facts_of("llama"), World("cpu", 2, 2)
    plan = plan_with_memory(config, facts, make_plan(config, facts, world), world, fail)
    assert plan.notes == (
        "memory: the model (llama) cannot be measured with fake tensors: because; the prediction is without activations and workspace",
    )
    memory = memory_of(plan)
    assert not memory.activations_known and memory.cards[0].phase("step").activation_bytes == 0 < memory.cards[0].phase("step").weight_bytes


def test_prediction_and_measurement_side_by_side() -> None:
    plan = planned()
    rows = plan.ranks
    measured = [MeasuredMemory(row.weight_bytes, row.gradient_bytes * 2, row.optimizer_bytes, 0, GIB) for row in rows]
    found = compare(plan, measured)
    assert [(entry.rank, entry.what) for entry in found[:4]] == [
        (0, "weights"), (0, "gradients"), (0, "optimizer"), (0, "resident peak of the process"),
    ]  # fmt: skip
    assert [entry.relative_error for entry in found[:3]] == [0.0, -0.5, 0.0]
    assert comparison_rows(found)[1][-1] == "-50.0%" and found[1].as_dict()["unit"] == "bytes"
    assert compare(replace(plan, memory=None), measured) == []
    step = StepPrediction(0.5, 0.4, (0.1,), (0.0,), 0.0, 100.0, "measured", ())
    last = compare(replace(plan, prediction=step), measured, [9.0, 9.0, 0.3, 0.4, 0.6])[-1]
    assert (last.unit, last.measured, round(last.relative_error or 0, 6)) == ("seconds", 0.4, 0.25)
    assert comparison_rows([last])[0][2:5] == ("seconds", "0.500", "0.400")
