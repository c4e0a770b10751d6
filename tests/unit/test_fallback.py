"""One card where two were meant; and what a plan with a DeepSpeed engine refuses before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.errors import ConfigError, LaunchError
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.planning.fallback import OneCard, fall_back
from mpfinetune.planning.plan import Plan, RankPlan, World, make_plan
from mpfinetune.strategies.deepspeed_config import engine_config
from mpfinetune.training.forecast import Forecast
from tests.families import tiny_config

GIB = 2**30
ONE_CARD = World("cuda", 1, device_bytes=24 * GIB)


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return inspect_model(tiny_config("llama"), "causal_lm")


def config_of(**changes: Any) -> RunConfig:
    base = {"model": {"path": "x", "task": "causal_lm"}, "data": {"path": "y"}, "batch": {"global_size": 8, "micro_size": 2}, "run_dir": "r"}
    return config_from_dict({**base, "strategy": "pipeline", **changes})


def plan(facts: ModelFacts, world: World, **changes: Any) -> Plan:
    return make_plan(config_of(**changes), facts, world)


def engine(made: Plan) -> tuple[str, int, str, str]:
    return made.strategy, made.zero_stage, made.offload_optimizer, made.offload_parameters


@pytest.mark.parametrize("world_size", [None, 1])
def test_one_card_goes_on_with_zero_and_the_same_global_batch(facts: ModelFacts, world_size: int | None) -> None:
    made = plan(facts, World("cuda", 1, world_size, device_bytes=24 * GIB))
    assert made.strategy == "zero" and made.world_size == 1 and made.global_size == 8 and made.microbatches == 4
    (note,) = made.notes
    assert note.startswith("the run is meant for 2 cards, and one is visible (CUDA_VISIBLE_DEVICES): going on there with strategy zero")


@pytest.mark.parametrize("changes", [{}, {"recompute": "full", "precision": "bf16"}], ids=["fp32", "bf16-recompute"])
def test_as_much_stays_on_the_card_as_is_predicted_to_fit(changes: dict[str, Any]) -> None:
    """The optimizer leaves first, then the weights: a card of the predicted bytes of a way takes it, one of a byte less the next."""
    large = tiny_config("llama", hidden_size=4096, intermediate_size=16384, num_hidden_layers=6)
    facts = inspect_model(large, "causal_lm")
    forecasts: list[Forecast] = []  # one measurement serves all

    def forecast_of(config: RunConfig, world: World) -> Forecast:
        forecasts.append(Forecast(config, large, facts, world, 2, forecasts[-1:]))
        return forecasts[-1]

    def planned(card_bytes: int, **more: Any) -> Plan:
        world = World("cuda", 1, None, device_bytes=card_bytes)
        config = config_of(**changes, **more)
        return make_plan(config, facts, world, forecast_of(config, world).knowledge())

    def needed(stage: int, optimizer: str, parameters: str) -> int:
        way = {"strategy": "zero", "zero": {"stage": stage}, "offload": {"optimizer": optimizer, "parameters": parameters}}
        config, world = config_of(**changes, **way), World("cuda", 1, 1)
        return forecast_of(config, world).needed_bytes(make_plan(config, facts, world), 0, 0)

    ways = [(2, "none", "none"), (2, "cpu", "none"), (3, "cpu", "cpu")]
    sizes = [needed(*way) for way in ways]
    assert sizes == sorted(sizes, reverse=True)
    for index, way in enumerate(ways):
        assert engine(planned(sizes[index])) == ("zero", *way)
        assert engine(planned(sizes[index] - 1)) == ("zero", *ways[min(index + 1, 2)])  # the smallest, where nothing fits
    assert engine(planned(sizes[0], offload={"optimizer": "cpu"})) == ("zero", *ways[1])


def test_all_offloaded_the_host_holds_everything(facts: ModelFacts) -> None:
    count = facts.numel(facts.parameters)
    row = plan(facts, World("cuda", 1, 1), strategy="zero", zero={"stage": 3}, offload={"optimizer": "cpu", "parameters": "cpu"}).ranks[0]
    # weights, two moments, masters and the masters' gradients
    assert (row.weight_bytes, row.optimizer_bytes, row.host_bytes) == (0, 0, 20 * count)


@pytest.mark.parametrize(("stage", "on_card", "buffers"), [(1, 4, 2), (2, 0, 4), (3, 0, 4)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_from_stage_2_on_an_offloaded_optimizer_has_the_gradients_on_the_host(
    facts: ModelFacts, stage: int, on_card: int, buffers: int, replicas: int
) -> None:
    """DeepSpeed moves each of them there as it comes; in stage 2 it adds them up in the weights' type, in stage 3 in fp32.

    Stages 1 and 2 have the updated weights beside the masters, in their own type, on their way to the card.
    """
    changes: dict[str, Any] = {"strategy": "zero", "zero": {"stage": stage}, "offload": {"optimizer": "cpu"}, "precision": "bf16"}
    row = plan(facts, World("cuda", replicas, replicas), **changes).ranks[0]
    count = facts.numel(facts.parameters)
    # masters, two moments and the masters' gradients are counted apart
    assert row.gradient_bytes + row.leaving_gradient_bytes == 4 * count // (replicas if stage > 1 else 1)
    assert (row.gradient_bytes, row.host_buffer_bytes, row.host_bytes) == (on_card * count, buffers * count // replicas, 16 * count // replicas)


def test_what_is_on_the_disk_is_not_in_the_host_s_memory(facts: ModelFacts) -> None:
    """But stages 1 and 2 keep in memory what is meant for the disk."""
    count = facts.numel(facts.parameters)

    def row(stage: int, optimizer: str, parameters: str = "none") -> RankPlan:
        offload = {"optimizer": optimizer, "parameters": parameters, "nvme_path": "/x"}
        return plan(facts, World("cuda", 1, 1), strategy="zero", zero={"stage": stage}, offload=offload).ranks[0]

    found = {(stage, *where): row(stage, *where) for stage, *where in [(3, "nvme", "nvme"), (3, "cpu", "nvme"), (3, "nvme", "cpu"), (2, "nvme")]}
    assert {way: (made.host_bytes // count, made.disk_bytes // count) for way, made in found.items()} == {
        (3, "nvme", "nvme"): (0, 20), (3, "cpu", "nvme"): (16, 4), (3, "nvme", "cpu"): (4, 16), (2, "nvme"): (16, 0),
    }  # fmt: skip
    assert found[3, "nvme", "nvme"].offloaded_bytes == 20 * count


def test_offload_that_was_asked_for_stays(facts: ModelFacts) -> None:
    assert engine(plan(facts, ONE_CARD, offload={"optimizer": "cpu"})) == ("zero", 2, "cpu", "none")


def test_an_explicit_map_for_two_falls_back_too_and_auto_with_it(facts: ModelFacts) -> None:
    for strategy in ("auto", "pipeline"):
        assert plan(facts, ONE_CARD, strategy=strategy, partition={"stages": ["embed, 0-1", "2-3, head"]}).strategy == "zero"


LORA: dict[str, Any] = {"adapter": {"type": "lora"}}


@pytest.mark.parametrize("changes", [{"optimizer": {"name": "sgd"}}, LORA])
def test_what_the_engine_does_not_know_or_does_not_better_goes_on_with_local(facts: ModelFacts, changes: dict[str, Any]) -> None:
    made = plan(facts, ONE_CARD, **changes)
    assert engine(made) == ("local", 0, "none", "none") and "strategy local" in made.notes[0]


@pytest.mark.parametrize(
    ("changes", "two_types", "way"),
    [
        ({}, False, ("zero", 3, "cpu", "cpu")),
        ({"precision": "bf16"}, False, ("zero", 3, "cpu", "cpu")),
        ({"precision": "bf16"}, True, ("local", 0, "none", "none")),
        ({"precision": "fp16"}, False, ("local", 0, "none", "none")),
        ({"quantize": "nf4"}, False, ("local", 0, "none", "none")),
    ],
)
def test_a_base_under_adapters_leaves_a_card_that_it_does_not_fit(changes: dict[str, Any], two_types: bool, way: tuple[str, int, str, str]) -> None:
    def fallen(card_bytes: int) -> OneCard:
        """Of a base of 10 GiB with an adapter's optimizer of nearly nothing."""
        return fall_back(
            config_of(**LORA, **changes), 2, "cuda", card_bytes, lambda stage, optimizer, weights: GIB * (2 if stage == 3 else 10), two_types
        )

    small = fallen(4 * GIB)
    assert (small.strategy, small.zero_stage, small.offload_optimizer, small.offload_parameters) == way
    assert fallen(12 * GIB).strategy == "local"


def test_a_pipeline_s_map_is_no_map_of_devices_on_the_one_card(facts: ModelFacts) -> None:
    """All is on that card; read as a map of devices it would name one that is not there."""
    stages = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.layers.2": 1, "model.layers.3": 1, "model.norm": 1}
    partition = {"device_map": {**stages, "lm_head": 1, "model.rotary_emb": 0}}
    for strategy in ("auto", "pipeline"):
        made = plan(facts, ONE_CARD, strategy=strategy, partition=partition, optimizer={"name": "sgd"})
        assert engine(made) == ("local", 0, "none", "none") and made.placement is None and made.num_stages == 1
    with pytest.raises(ConfigError, match="is given device 1, but the run uses 1 device"):
        plan(facts, ONE_CARD, strategy="local", partition=partition)


def test_fallback_never_names_the_command(facts: ModelFacts) -> None:
    with pytest.raises(LaunchError, match=r"fallback: never forbids .* torchrun --nproc_per_node 2 -m mpfinetune train CONFIG; .*fallback=auto"):
        plan(facts, ONE_CARD, fallback="never")


def test_two_processes_on_one_card_are_told_which_command_to_use(facts: ModelFacts) -> None:
    with pytest.raises(LaunchError, match=r"2 processes were started on this host, but one card is visible .*torchrun --nproc_per_node 1"):
        plan(facts, World("cuda", 1, 2, 2))


def test_two_hosts_with_one_card_each_are_a_pipeline(facts: ModelFacts) -> None:
    made = plan(facts, World("cuda", 1, 2, processes_per_host=1))
    assert made.strategy == "pipeline" and made.world_size == 2 and not made.notes


def test_the_cpu_pretends_only_where_devices_says_so(facts: ModelFacts) -> None:
    assert plan(facts, World("cpu", 1, 2, 2)).strategy == "pipeline"
    made = plan(facts, World("cpu", 1, None), devices=1)
    assert engine(made) == ("zero", 2, "cpu", "none") and "(devices: 1)" in made.notes[0]
    with pytest.raises(LaunchError, match="--nproc_per_node 1"):
        plan(facts, World("cpu", 1, 2, 2), devices=1)


def test_plan_of_zero_counts_rows_and_bytes(facts: ModelFacts) -> None:
    whole = facts.numel(facts.parameters) * 4
    states = 3 * whole // 2  # two moments and a master of each parameter
    shares = {1: (whole, whole, states), 2: (whole, whole // 2, states), 3: (whole // 2, whole // 2, states)}
    for stage, (weights, gradients, optimizer) in shares.items():
        made = plan(facts, World("cpu", 2, 2), strategy="zero", zero={"stage": stage})
        row = made.ranks[0]
        assert (made.pipeline_ranks, made.replicas, made.microbatches, made.padded_rows(5)) == (1, 2, 2, 8)
        assert (row.weight_bytes, row.gradient_bytes, row.optimizer_bytes) == (weights, gradients, optimizer)


REFUSED: list[tuple[str, dict[str, Any], World]] = [
    ("DeepSpeed refuses fp16 on the CPU", {"precision": "fp16", "offload": {"optimizer": "cpu"}}, World("cpu", 2, 2)),
    ("DeepSpeed refuses fp16 on the CPU", {"precision": "fp16", "strategy": "zero"}, World("cpu", 1, 1)),
    ("wrong numbers without an error", {"strategy": "zero", "offload": {"optimizer": "nvme", "nvme_path": "/x"}}, World("cuda", 2, 2)),
]


def test_gradients_leave_one_replica_only_and_come_back_to_no_card(facts: ModelFacts) -> None:
    changes = {"offload": {"optimizer": "cpu", "gradients": "cpu"}}
    made = plan(facts, World("cuda", 2, device_bytes=24 * GIB), **changes)
    whole = facts.numel(facts.parameters) * 4
    assert [row.gradient_bytes for row in made.ranks] == [0, 0] and sum(row.leaving_gradient_bytes for row in made.ranks) == whole
    assert sum(row.host_bytes for row in made.ranks) == 4 * whole  # masters, two moments, the masters' gradients
    with pytest.raises(ConfigError, match=r"offload.gradients: cpu given with 2 replicas, .* start 2 processes \(devices: 2\)"):
        plan(facts, World("cuda", 4), partition={"num_stages": 2}, **changes)
    assert plan(facts, ONE_CARD, **changes).offload_gradients == "none"  # ZeRO-2 moves them itself


def test_the_gradient_of_tied_weights_stays_for_the_sum_over_their_copies() -> None:
    tied = inspect_model(tiny_config("gpt2"), "causal_lm")
    made = plan(tied, World("cpu", 2, 2), offload={"optimizer": "cpu", "gradients": "cpu"})
    table = tied.parameters["transformer.wte.weight"].numel * 4
    assert [row.gradient_bytes for row in made.ranks] == [table, table]


@pytest.mark.parametrize(("reason", "changes", "world"), REFUSED)
def test_what_an_engine_cannot_do_is_refused_with_the_reason(facts: ModelFacts, reason: str, changes: dict[str, Any], world: World) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(facts, world, **changes)


# --- DeepSpeed's JSON ---------------------------------------------------------------------------------------------------------------


def json_of(facts: ModelFacts, deepspeed: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = config_of(strategy="zero", deepspeed=deepspeed, **changes)
    return engine_config(config, facts, make_plan(config, facts, World("cpu", 2, 2)))


def test_json_comes_from_the_config(facts: ModelFacts) -> None:
    made = json_of(facts, {}, zero={"stage": 3}, offload={"optimizer": "cpu", "parameters": "cpu"}, train={"clip_norm": None}, precision="bf16")
    assert made["zero_optimization"]["stage"] == 3 and made["zero_optimization"]["offload_param"]["device"] == "cpu"
    assert made["gradient_clipping"] == 0.0 and made["bf16"] == {"enabled": True} and "gradient_allreduce_op" not in made
    assert json_of(facts, {})["gradient_allreduce_op"] == "sum"


def test_expert_keys_pass_through(facts: ModelFacts) -> None:
    given = {"zero_optimization": {"reduce_bucket_size": 1000, "round_robin_gradients": True}, "wall_clock_breakdown": True, "gradient_clipping": 1.0}
    made = json_of(facts, given, offload={"optimizer": "cpu"})
    assert made["zero_optimization"] == {
        **json_of(facts, {}, offload={"optimizer": "cpu"})["zero_optimization"],
        "reduce_bucket_size": 1000,
        "round_robin_gradients": True,
    }
    assert made["wall_clock_breakdown"] is True


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"gradient_clipping": 5.0}, r"deepspeed.gradient_clipping: 5.0 \(float\) given, but train.clip_norm of this config .* makes it 1.0"),
    ({"train_micro_batch_size_per_gpu": "2"}, r"'2' \(str\) given, but batch.micro_size .* makes it 2 \(int\)"),
    ({"gradient_accumulation_steps": 3}, r"deepspeed.gradient_accumulation_steps: 3 .* makes it 2"),
    ({"train_batch_size": 16}, r"deepspeed.train_batch_size: 16 .*batch.global_size .* makes it 8"),
    ({"zero_optimization": {"stage": 3}}, r"deepspeed.zero_optimization.stage: 3 .* zero.stage .* makes it 2"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, r"offload_optimizer.device: 'cpu' .*offload.optimizer"),
    ({"bf16": {"enabled": True}}, r"deepspeed.bf16: .* precision of this config"),
    ({"optimizer": {"type": "Adam"}}, r"deepspeed.optimizer: .* optimizer of this config"),
    ({"zero_optimization": {"reduce_bucket_size": "auto"}}, r"deepspeed.zero_optimization.reduce_bucket_size: 'auto' given"),
]


@pytest.mark.parametrize(("given", "message"), CONTRADICTIONS)
def test_expert_keys_that_contradict_are_refused_naming_both(facts: ModelFacts, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        json_of(facts, given)


def test_all_contradictions_are_told_at_once(facts: ModelFacts) -> None:
    with pytest.raises(ConfigError) as raised:
        json_of(facts, {"gradient_clipping": 5.0, "train_batch_size": 16})
    assert "gradient_clipping" in str(raised.value) and "train_batch_size" in str(raised.value)
