"""The plan: strategy, stages, replicas and microbatches by arithmetic, and what does not fit named with the way out."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.errors import ConfigError, LaunchError
from mpfinetune.models.adapters import facts_with_adapters
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.plan import Plan, World, describe_span, launch_command, make_plan, plan_rows
from mpfinetune.training.forecast import Forecast
from tests.families import task_of, tiny_config
from tests.multiproc import training_cases


@cache
def facts_of(family: str = "llama", blocks: int = 4) -> ModelFacts:
    return inspect_model(tiny_config(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": blocks}), task_of(family))


def config_of(**changes: Any) -> RunConfig:
    base = {"model": {"path": "x", "task": "causal_lm"}, "data": {"path": "x.txt"}, "run_dir": "x", "batch": {"global_size": 8, "micro_size": 2}}
    return config_from_dict({**base, **changes})


def plan_of(world: World | None = None, family: str = "llama", blocks: int = 4, **changes: Any) -> Plan:
    return make_plan(config_of(**changes), facts_of(family, blocks), world or World("cpu", 2, 2))


FOUR = {"partition": {"rule": "uniform", "num_stages": 4}}
TWO = {"partition": {"rule": "uniform", "num_stages": 2}}


@pytest.mark.parametrize(
    ("changes", "world", "strategy", "ranks", "replicas", "stages"),
    [
        ({}, World("cpu", 1, None), "local", 1, 1, 1),
        ({}, World("cpu", 1, 1), "local", 1, 1, 1),
        ({}, World("cpu", 2, None), "pipeline", 2, 1, 2),
        ({}, World("cpu", 2, 2), "pipeline", 2, 1, 2),
        ({}, World("cuda", 2, None), "pipeline", 2, 1, 2),
        ({"strategy": "local"}, World("cuda", 2, None), "local", 1, 1, 1),
        ({"strategy": "pipeline"}, World("cpu", 1, None), "pipeline", 2, 1, 2),
        (TWO, World("cpu", 2, 4), "pipeline", 2, 2, 2),
        (TWO, World("cuda", 4, None), "pipeline", 2, 2, 2),
        (TWO, World("cuda", 5, None), "pipeline", 2, 2, 2),
        ({"partition": {"num_stages": 1}}, World("cpu", 1, 1), "local", 1, 1, 1),
        ({"partition": {"stages": ["embed, 0", "1-2", "3, head"]}}, World("cpu", 1, 3), "pipeline", 3, 1, 3),
        ({"partition": {"device_map": {"": 0, "model.layers.3": 1, "model.norm": 1, "lm_head": 1}}}, World("cpu", 1, 2), "pipeline", 2, 1, 2),
        ({"schedule": "interleaved_1f1b"}, World("cpu", 2, 2), "pipeline", 2, 1, 4),
        ({"schedule": "zbv"}, World("cpu", 2, 2), "pipeline", 2, 1, 4),
        ({"schedule": "zbv", **FOUR, "batch": {"global_size": 8, "micro_size": 1}}, World("cpu", 4, 4), "pipeline", 2, 2, 4),
    ],
)
def test_strategy_stages_and_replicas(changes: dict[str, Any], world: World, strategy: str, ranks: int, replicas: int, stages: int) -> None:
    plan = plan_of(world, **changes)
    assert (plan.strategy, plan.pipeline_ranks, plan.replicas, plan.num_stages) == (strategy, ranks, replicas, stages)
    assert plan.world_size == ranks * replicas
    assert plan.stages_per_rank * ranks == stages
    assert sum(span.stop - span.start for span in plan.spans) == 4


def test_stages_per_rank() -> None:
    plan = plan_of(blocks=6, schedule="interleaved_1f1b", stages_per_rank=3)
    assert (plan.num_stages, plan.stages_per_rank, [rank.stages for rank in plan.ranks]) == (6, 3, [(0, 2, 4), (1, 3, 5)])
    assert [rank.stages for rank in plan_of(schedule="zbv").ranks] == [(0, 3), (1, 2)]
    with pytest.raises(ConfigError, match="interleaved_1f1b puts 2 stages on each process, but 3 stages are asked for; give a multiple of 2"):
        plan_of(schedule="interleaved_1f1b", partition={"num_stages": 3})


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        (TWO, World("cpu", 2, 3), r"3 processes were started, .* multiple of 2. Start it with: torchrun --nproc_per_node 2 -m mpfinetune train"),
        (TWO, World("cpu", 2, 1), r"1 processes were started, .*torchrun --nproc_per_node 2 -m mpfinetune train"),
        (FOUR, World("cpu", 2, 2), r"the plan has 4 pipeline ranks, .*torchrun --nproc_per_node 4 -m"),
        ({"strategy": "local"}, World("cpu", 2, 2), r"strategy: local runs in one process, but 2 were started; use .*--nproc_per_node 1"),
        (FOUR, World("cuda", 2, None), r"the plan needs 4 cards, but 2 are visible .*strategy: local for one card"),
    ],
)
def test_processes_that_do_not_fit(changes: dict[str, Any], world: World, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan_of(world, **changes)


def test_launch_command() -> None:
    assert launch_command(2, "configs/x.yaml") == "torchrun --nproc_per_node 2 -m mpfinetune train configs/x.yaml"


# --- microbatches -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "world_size", "microbatches"),
    [
        ({**TWO}, 2, 4),
        ({**TWO, "batch": {"global_size": 7, "micro_size": 2}}, 2, 4),
        ({**TWO, "batch": {"global_size": 8, "micro_size": 3}}, 2, 3),
        ({**TWO}, 4, 2),
        ({**TWO, "schedule": "gpipe", "batch": {"global_size": 8, "micro_size": 8}}, 2, 1),
        ({**FOUR, "schedule": "interleaved_1f1b", "batch": {"global_size": 9, "micro_size": 3}}, 2, 4),  # 3, filled to a multiple of the ranks
        ({**FOUR, "schedule": "zbv"}, 2, 4),
        ({"strategy": "local", "batch": {"global_size": 7, "micro_size": 2}}, 1, 4),
    ],
)
def test_microbatches(changes: dict[str, Any], world_size: int, microbatches: int) -> None:
    assert plan_of(World("cpu", 2, world_size), **changes).microbatches == microbatches


@pytest.mark.parametrize(
    ("changes", "world_size", "needed", "largest", "smallest_global"),
    [
        ({**TWO, "batch": {"global_size": 8, "micro_size": 8}}, 2, 2, 4, 16),
        ({**TWO, "batch": {"global_size": 4, "micro_size": 2}}, 4, 2, 1, 8),
        ({**FOUR, "batch": {"global_size": 8, "micro_size": 4}}, 4, 4, 2, 16),
        ({**FOUR, "schedule": "zbv", "batch": {"global_size": 6, "micro_size": 2}}, 2, 4, 1, 8),
        ({**FOUR, "schedule": "interleaved_1f1b", "batch": {"global_size": 2, "micro_size": 2}}, 2, 2, 1, 4),
    ],
)
def test_too_few_microbatches(changes: dict[str, Any], world_size: int, needed: int, largest: int, smallest_global: int) -> None:
    world = World("cpu", 2, world_size)
    with pytest.raises(ConfigError, match=f"needs at least {needed}; set batch.micro_size to at most {largest} .*at least {smallest_global}$"):
        plan_of(world, **changes)
    for batch in ({**changes["batch"], "micro_size": largest}, {**changes["batch"], "global_size": smallest_global}):
        assert plan_of(world, **{**changes, "batch": batch}).microbatches >= needed  # the advice holds


@pytest.mark.parametrize(
    ("changes", "world_size", "expected"),
    [
        (TWO, 2, {8: 8, 7: 8, 5: 6, 3: 4, 1: 4}),  # whole microbatches of 2, at least 2 of them
        (TWO, 4, {8: 8, 7: 8, 5: 8, 1: 8}),
        ({**TWO, "schedule": "gpipe"}, 2, {8: 8, 5: 6, 1: 2}),
        ({**FOUR, "schedule": "interleaved_1f1b"}, 2, {8: 8, 5: 8, 1: 4}),
        ({**FOUR, "schedule": "zbv"}, 2, {8: 8, 1: 8}),
        ({"strategy": "local"}, 1, {8: 8, 7: 7, 1: 1}),
    ],
)
def test_padded_rows(changes: dict[str, Any], world_size: int, expected: dict[int, int]) -> None:
    plan = plan_of(World("cpu", 2, world_size), **changes)
    assert {rows: plan.padded_rows(rows) for rows in expected} == expected


def test_bubble() -> None:
    assert plan_of(**TWO).bubble == pytest.approx(1 / 5)
    assert plan_of(schedule="zbv").bubble == pytest.approx(1 / 9)
    assert plan_of(World("cpu", 1, 1), strategy="local").bubble == 0


# --- bytes and text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "optimizer", "weight", "optimizer_bytes"),
    [
        ("fp32", {"name": "adamw"}, 4, 8),
        ("bf16", {"name": "adamw"}, 2, 12),
        ("fp32", {"name": "sgd"}, 4, 0),
        ("fp32", {"name": "sgd", "momentum": 0.9}, 4, 4),
        ("bf16", {"name": "sgd"}, 2, 4),
    ],
)
def test_bytes(precision: str, optimizer: dict[str, Any], weight: int, optimizer_bytes: int) -> None:
    facts = facts_of()
    plan = plan_of(precision=precision, optimizer=optimizer, **TWO)
    assert sum(rank.parameters for rank in plan.ranks) == plan.total_parameters == facts.numel(facts.parameters)
    for rank in plan.ranks:
        assert (rank.weight_bytes, rank.gradient_bytes) == (weight * rank.parameters, 4 * rank.parameters)
        assert rank.optimizer_bytes == optimizer_bytes * rank.parameters
        assert rank.total_bytes == (weight + 4 + optimizer_bytes) * rank.parameters


def test_a_tied_copy_weighs_on_its_rank_and_not_in_the_total() -> None:
    facts = facts_of("gpt2")
    table = facts.parameters["lm_head.weight"].numel
    plan = plan_of(family="gpt2", **TWO)
    assert plan.total_parameters == facts.numel(facts.parameters)
    assert sum(rank.parameters for rank in plan.ranks) == plan.total_parameters + table
    # V-shaped: both ends are on one rank, so the table is there once.
    assert sum(rank.parameters for rank in plan_of(family="gpt2", schedule="zbv").ranks) == plan.total_parameters


def test_json() -> None:
    plan = plan_of(**TWO)
    content = json.loads(plan.to_json())
    assert content["spans"] == [
        {"start": 0, "stop": 2, "has_prologue": True, "has_epilogue": False}, {"start": 2, "stop": 4, "has_prologue": False, "has_epilogue": True},
    ]  # fmt: skip
    assert (content["world_size"], content["num_stages"], content["rule"], content["schedule"]) == (2, 2, "uniform", "1f1b")
    spans = tuple(StageSpan(**span) for span in content["spans"])
    ranks = [{**rank, "stages": tuple(rank["stages"])} for rank in content["ranks"]]
    assert spans == plan.spans and ranks == [vars(rank) for rank in plan.ranks]
    assert {key for key in content} >= {key for key in vars(plan)}


def test_the_same_input_gives_the_same_plan() -> None:
    assert plan_of(**TWO) == plan_of(**TWO)


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (StageSpan(0, 3, True, False), "embed, 0-2"),
        (StageSpan(3, 4, False, True), "3, head"),
        (StageSpan(0, 0, True, False), "embed"),
        (StageSpan(4, 4, False, True), "head"),
        (StageSpan(0, 4, True, True), "embed, 0-3, head"),
    ],
)
def test_spans_are_written_as_the_user_would(span: StageSpan, text: str) -> None:
    assert describe_span(span) == text


def test_rows_of_the_table() -> None:
    first = plan_rows(plan_of(**TWO))[0]
    assert first[:3] == (0, "0", "embed, 0-1") and len(first) == 8
    mib = [float(text) for text in first[4:]]
    assert mib[3] == pytest.approx(sum(mib[:3]), abs=0.2)


# --- the size of a microbatch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "world", "rows", "start", "largest"),
    [
        ({"strategy": "local"}, World("cpu", 1), 16, 4, 16),
        ({"strategy": "local"}, World("cpu", 1), 3, 3, 3),
        (TWO, World("cpu", 2, 2), 16, 4, 8),
        (TWO, World("cpu", 2, 2), 5, 2, 2),
        (TWO, World("cpu", 4, 4), 16, 4, 4),
        ({**TWO, "schedule": "gpipe"}, World("cpu", 2, 2), 16, 4, 16),
        ({**FOUR, "schedule": "zbv"}, World("cpu", 2, 2), 16, 4, 4),
        ({**FOUR, "schedule": "interleaved_1f1b"}, World("cpu", 2, 2), 6, 3, 3),
        ({"strategy": "zero", "zero": {"stage": 1}}, World("cpu", 2, 2), 7, 4, 4),
    ],
)
def test_auto_begins_small_and_ends_where_the_schedule_does(changes: dict[str, Any], world: World, rows: int, start: int, largest: int) -> None:
    plan = plan_of(world, **changes, batch={"global_size": rows, "micro_size": "auto"})
    assert (plan.micro_size, plan.largest_micro_size) == (start, largest)
    assert plan.with_micro_size(largest).micro_size == largest


def test_another_size_is_the_plan_that_the_config_would_have_given() -> None:
    for size in (1, 2, 4):
        batch = {"global_size": 8, "micro_size": size}
        assert plan_of(**TWO).with_micro_size(size) == plan_of(**TWO, batch=batch)
    with pytest.raises(ConfigError, match=r"1f1b over 2 ranks needs at least 2; set batch.micro_size to at most 4"):
        plan_of(**TWO).with_micro_size(8)


@pytest.mark.parametrize("stage", [2, 3])
def test_auto_is_refused_where_a_probe_could_not_go_on(stage: int) -> None:
    changes = {"strategy": "zero", "zero": {"stage": stage}, "batch": {"global_size": 8, "micro_size": "auto"}}
    assert plan_of(World("cpu", 1, 1), **changes).micro_size == 4
    with pytest.raises(ConfigError, match=rf"batch.micro_size: auto given with zero.stage: {stage} over 2 processes.*set zero.stage: 1"):
        plan_of(World("cpu", 2, 2), **changes)


def test_adapters_beside_a_head_in_bf16_are_not_given_to_an_engine() -> None:
    changes = {"strategy": "pipeline", "offload": {"optimizer": "cpu"}, "precision": "bf16"}
    problem = training_cases.adapter_problem("bert")
    config = training_cases.run_config(problem, **changes)
    with pytest.raises(ConfigError, match=r"offload.optimizer: cpu given with adapters in fp32, while classifier.bias, .* learns in bf16"):
        make_plan(config, training_cases.facts_of(problem, config), World("cpu", 2))
    config = training_cases.run_config(problem, strategy="zero", partition={}, precision="bf16")
    with pytest.raises(ConfigError, match=r"strategy: zero given with adapters in fp32, while .* take strategy: pipeline with offload"):
        make_plan(config, training_cases.facts_of(problem, config), World("cpu", 2))
    config = training_cases.run_config(problem, **{**changes, "precision": "fp32"})
    assert make_plan(config, training_cases.facts_of(problem, config), World("cpu", 2)).offload_optimizer == "cpu"


@pytest.mark.parametrize(("changes", "blocks_beside_the_embedding"), [({}, 2), ({"quantize": "nf4", "adapter": {"type": "lora", "rank": 2}}, 1)])
def test_parameters_balances_the_bytes_that_the_run_holds(changes: dict[str, Any], blocks_beside_the_embedding: int) -> None:
    """A quantised block weighs an eighth of what it did, the embedding all of it."""
    hf_config = tiny_config("llama", vocab_size=2000, hidden_size=64, intermediate_size=128, num_hidden_layers=8)
    base = inspect_model(hf_config, "sequence_classification")

    def cut(**partition: Any) -> Plan:
        model, data = {"path": "x", "task": "sequence_classification"}, {"task": "mrpc", "path": "x"}
        config = config_of(model=model, data=data, strategy="pipeline", partition=partition, **changes)
        facts, world = facts_with_adapters(base, config.adapter), World("cpu", 2, 2)
        return make_plan(config, facts, world, Forecast(config, hf_config, facts, world, 2).knowledge())

    by_rule = cut(rule="parameters", num_stages=2)
    by_hand = [cut(stages=[f"embed, 0-{last}", f"{last + 1}-7, head"]) for last in range(7)]
    fullest = [max(row.weight_bytes for row in plan.ranks) for plan in (by_rule, *by_hand)]
    assert fullest[0] == min(fullest) and by_rule.spans[0].stop == blocks_beside_the_embedding


@pytest.mark.parametrize(
    "partition", [{"stages": ["embed, 0-1", "2-3, head"]}, {"num_stages": 2}, {"num_stages": 1}, {"num_stages": 2, "local_overlap": True}]
)
def test_stages_that_one_process_does_not_use_are_said(partition: dict[str, Any]) -> None:
    plan = plan_of(World("cpu", 2), strategy="local", partition=partition)
    unused = len(plan.spans) == 1 and partition != {"num_stages": 1}
    assert [note.startswith("partition: the 2 stages are not used") for note in plan.notes] == [True] * unused
