"""What is left to the plan: the fastest of what fits, the reasons, and the way out where nothing does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.errors import ConfigError
from mpfinetune.planning.cards import CARDS
from mpfinetune.planning.hardware import PlanCard
from mpfinetune.planning.plan import Plan, World
from mpfinetune.training.choose import changed, choose, leaves_open, missing_bytes
from mpfinetune.training.prepare import plan_run
from tests.families import tiny_config

SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 120M parameters: 0.2 GiB of bf16 weights, 1.9 GiB with gradients, masters and moments."""
    path = tmp_path_factory.mktemp("model")
    tiny_config("llama", vocab_size=32000, max_position_embeddings=1024, **SHAPE).save_pretrained(path)
    return path


TWO_CARDS = World("cuda", 2, cards=(PlanCard("rtx3060", 12 * 2**30, CARDS["rtx3060"]),) * 2)


def config_of(folder: Path, memory_gib: float, cards: int = 2, **changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"path": str(folder), "task": "causal_lm"},
        "data": {"path": "x.txt", "max_length": 1024},
        "batch": {"global_size": 16, "micro_size": 2},
        "precision": "bf16",
        "hardware": [{"gpu": "rtx3060", "memory_gib": memory_gib}] * cards,
        "run_dir": "x",
    }
    return config_from_dict({**base, **changes})


def plan_of(config: RunConfig) -> tuple[RunConfig, Plan]:
    planned = plan_run(config, None, with_memory=True, for_hardware=True)
    return planned.config, planned.plan


def test_with_room_nothing_is_recomputed_or_moved(folder: Path) -> None:
    config, plan = plan_of(config_of(folder, 12, strategy="pipeline", recompute="auto", offload={"optimizer": "auto"}))
    assert (config.recompute, config.offload.optimizer, config.offload.parameters) == ("none", "none", "none")
    assert missing_bytes(plan) == 0
    chosen, runners_up = [note for note in plan.notes if note.startswith("auto:")]
    assert "recompute: none, offload.optimizer: none" in chosen and "the fastest that fits of 9 combinations" in chosen
    assert runners_up.startswith("auto: runners-up: ") and "s a step" in runners_up


def test_less_memory_is_answered_by_offload_then_by_recompute(folder: Path) -> None:
    """The cheapest sacrifice first; and what was too large is said."""
    wishes = {"strategy": "pipeline", "recompute": "auto", "offload": {"optimizer": "auto"}}
    seconds, kept = [], []
    for memory_gib in (12, 2.3, 2.0, 1.8):
        config, plan = plan_of(config_of(folder, memory_gib, **wishes))
        assert missing_bytes(plan) == 0 and plan.prediction is not None and plan.memory is not None
        seconds.append(plan.prediction.step_seconds)
        kept.append((config.recompute, config.offload.optimizer, config.offload.gradients))
    assert seconds == sorted(seconds)
    assert kept == [("none", "none", "none"), ("none", "cpu", "none"), ("none", "cpu", "cpu"), ("full", "cpu", "cpu")]
    assert any("auto: too large: " in note for note in plan.notes)


def test_strategy_by_time_where_the_cards_are_known(folder: Path) -> None:
    config, plan = plan_of(config_of(folder, 12))
    assert config.strategy == plan.strategy != "auto"
    assert any("the fastest that fits of 5 combinations" in note for note in plan.notes)
    pipeline = plan_of(config_of(folder, 12, strategy="pipeline"))[1].prediction
    assert plan.prediction is not None and pipeline is not None and plan.prediction.step_seconds <= pipeline.step_seconds
    # A map means a pipeline; without known cards the number of devices decides, as ever.
    assert not leaves_open(config_of(folder, 12, partition={"stages": ["embed, 0-1", "2-3, head"]}), has_cards=True)
    assert not leaves_open(config_of(folder, 12), has_cards=False)


@pytest.mark.parametrize(
    ("changes", "tried", "strategy"),
    [({}, 5, "zero"), ({"quantize": "nf4"}, 4, "zero"), ({"precision": "fp16"}, 2, "pipeline")],
    ids=["lora", "nf4 is not gathered by stage 3", "fp16 is not scaled by an engine"],
)
def test_of_an_adapter_run_all_is_tried_but_what_an_engine_cannot_do(folder: Path, changes: dict[str, Any], tried: int, strategy: str) -> None:
    config, plan = plan_of(config_of(folder, 12, adapter={"type": "lora", "rank": 8}, **changes))
    assert config.strategy == strategy and any(f"the fastest that fits of {tried} combinations" in note for note in plan.notes)


@pytest.mark.parametrize("partition", [{"num_stages": 2}, {"stages": ["embed, 0-1", "2-3, head"]}])
def test_a_strategy_that_follows_from_the_map_offloads_like_the_same_strategy_named(folder: Path, partition: dict[str, Any]) -> None:
    """It is not for the plan to choose, and the rules on offload want it named: every way to offload was refused unseen."""
    wishes: dict[str, Any] = {"partition": partition, "offload": {"optimizer": "auto"}}
    found = {}
    for strategy in ("auto", "pipeline"):
        config, plan = plan_of(config_of(folder, 2.3, strategy=strategy, **wishes))
        assert missing_bytes(plan) == 0 and plan.strategy == "pipeline"
        found[strategy] = (config.strategy, config.offload.optimizer, config.offload.gradients)
    assert found["auto"] == found["pipeline"] == ("pipeline", "cpu", "none")


def test_replicas_are_judged_by_the_smallest_and_the_slowest_of_their_cards(folder: Path) -> None:
    """Every card of strategy zero holds and computes the same; the first card's memory and rates are not the others'."""
    large, small = {"gpu": "rtx3090"}, {"gpu": "gtx1080ti", "memory_gib": 1.5}

    def planned(hardware: list[dict[str, Any]], **changes: Any) -> Plan:
        return plan_of(config_of(folder, 12, precision="fp16", hardware=hardware, **changes))[1]

    zero: dict[str, Any] = {"strategy": "zero", "zero": {"stage": 1}}
    mixed, slow, fast = (planned(cards, **zero) for cards in ([large, small], [small, small], [large, large]))
    assert mixed.memory is not None and mixed.memory.cards[0].card_bytes == 1.5 * 2**30 and missing_bytes(mixed) == missing_bytes(slow) > 0
    assert mixed.prediction is not None and slow.prediction is not None and fast.prediction is not None
    assert mixed.prediction.step_seconds == slow.prediction.step_seconds > 1.5 * fast.prediction.step_seconds
    chosen = planned([large, small])
    assert missing_bytes(chosen) == 0 and (chosen.strategy, chosen.zero_stage) != ("zero", 1)
    # A pipeline of two ranks with two replicas each: the second card of a pair is the one that decides.
    pairs = planned(
        [large, {**small, "memory_gib": 7}, large, {**small, "memory_gib": 9}], strategy="pipeline", partition={"num_stages": 2, "rule": "time"}
    )
    assert pairs.memory is not None and [card.card_bytes for card in pairs.memory.cards] == [7 * 2**30, 9 * 2**30]


def test_nothing_fits(folder: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of(config_of(folder, 0.7, cards=1, strategy="zero", recompute="auto"))
    (problem,) = raised.value.problems
    assert "nothing fits the cards. recompute: full" in problem and "GiB over all cards" in problem
    advice = r"The single change that comes closest: quantize: nf4, adapter.type: lora, which (fits|still lacks \d+\.\d\d GiB)\."
    assert re.search(advice, problem), problem


def test_rows_of_a_microbatch(folder: Path) -> None:
    """Found by the plan where the cards are known: more rows are fewer crossings and more bubble, and the faster of both is taken."""
    given = config_of(folder, 12, strategy="pipeline", batch={"global_size": 4, "micro_size": 1})
    rows: Any = "auto"
    given = replace(given, batch=replace(given.batch, micro_size=rows))
    assert leaves_open(given, has_cards=True) and not leaves_open(given, has_cards=False)
    planned: dict[int, Plan] = {}

    def plan_with(config: RunConfig) -> Plan:
        planned[config.batch.micro_size] = plan_of(config)[1]
        return planned[config.batch.micro_size]

    config, plan = choose(given, TWO_CARDS, plan_with)
    fitting = {rows: other for rows, other in planned.items() if not missing_bytes(other)}
    assert set(planned) == {1, 2}, "4 rows would leave a rank without a microbatch"
    seconds = {rows: other.prediction.step_seconds for rows, other in fitting.items() if other.prediction is not None}
    assert config.batch.micro_size == min(seconds, key=lambda rows: seconds[rows]) and plan.micro_size == config.batch.micro_size


def test_changing_copies() -> None:
    config = config_of(Path("x"), 12)
    other = changed(config, (("offload.optimizer", "cpu"), ("recompute", "full")))
    assert (other.offload.optimizer, other.recompute) == ("cpu", "full") and (config.offload.optimizer, config.recompute) == ("none", "none")
