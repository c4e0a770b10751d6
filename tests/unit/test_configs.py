"""Every YAML in configs/ loads, and plans a tiny model of the family it is written for."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from mpfinetune.config import load_config
from mpfinetune.errors import ConfigError
from mpfinetune.training.prepare import plan_run
from tests.families import tiny_config

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))


def number_of_blocks(device_map: dict[str, int]) -> int:
    """As many as a pasted map names; the other maps are written for MiniLM's six."""
    return max((int(name.rpartition("layers.")[2]) + 1 for name in device_map if name.rpartition("layers.")[2].isdigit()), default=6)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_plans_a_tiny_model(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    family = "bert" if config.model.task == "sequence_classification" else "llama"
    # width 64: rows of a multiple of 64 are what NF4 packs
    blocks = number_of_blocks(config.partition.device_map)
    tiny_config(family, num_hidden_layers=blocks, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    planned = plan_run(replace(config, model=replace(config.model, path=str(tmp_path)), device="cpu"), None)
    assert planned.plan.to_json().startswith("{")
    assert planned.plan.world_size == (2 if config.strategy == "pipeline" else 1)
    assert sum(row.total_bytes + row.offloaded_bytes for row in planned.plan.ranks) > 0


def overrides_of_one_gpu() -> list[str]:
    """What launch/one_gpu.sh sets, before the user's own overrides, which come last and win."""
    script = (CONFIGS[0].parents[1] / "launch" / "one_gpu.sh").read_text(encoding="utf-8")
    words = shlex.split(script[script.index("exec ") :].replace("\\\n", " "))
    assert words[:6] == ["exec", "$PY", "-m", "mpfinetune", "train", "$config"] and words[-1] == "$@"
    return words[6:-1]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_one_gpu_takes_every_config_unsplit(path: Path, tmp_path: Path) -> None:
    config = load_config(path, overrides_of_one_gpu())
    family = "bert" if config.model.task == "sequence_classification" else "llama"
    tiny_config(family, num_hidden_layers=6, hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    plan = plan_run(replace(config, model=replace(config.model, path=str(tmp_path)), device="cpu"), None).plan
    assert (plan.strategy, plan.world_size, plan.num_stages, plan.placement) == ("local", 1, 1, None)
    assert load_config(path, [*overrides_of_one_gpu(), "devices=2"]).devices == 2


def test_one_gpu_takes_a_config_with_overlap(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    text = "{model: {path: x}, data: {task: mrpc}, strategy: local, devices: 2, partition: {local_overlap: true, num_stages: 2}, run_dir: r}"
    path.write_text(text, encoding="utf-8")
    assert load_config(path).partition.local_overlap and not load_config(path, overrides_of_one_gpu()).partition.local_overlap


def test_the_unequal_cards_get_unequal_shares_of_a_13b_model(tmp_path: Path) -> None:
    """The faster and larger card gets more blocks, both cards hold theirs, and the step is shorter than with the even cut."""
    shape = {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40}
    tiny_config("llama", vocab_size=32000, max_position_embeddings=4096, **shape).save_pretrained(tmp_path)
    config = load_config(CONFIGS[0].parent / "unequal_cards.yaml", [f"model.path={tmp_path}"])
    plans = {}
    for rule in ("time", "uniform"):
        changed = replace(config, partition=replace(config.partition, rule=rule))
        plans[rule] = plan_run(changed, None, with_memory=True, for_hardware=True).plan
    large, small = (span.stop - span.start for span in plans["time"].spans)
    assert large > 25 > 15 > small >= 1
    memory = plans["time"].memory
    assert memory is not None and all(card.fits for card in memory.cards)
    assert [card.card_bytes for card in memory.cards] == [round(23.6 * 2**30), round(10.5 * 2**30)]
    predictions = {rule: plan.prediction for rule, plan in plans.items()}
    assert predictions["time"] is not None and predictions["uniform"] is not None
    assert predictions["time"].step_seconds < 0.8 * predictions["uniform"].step_seconds
    assert max(predictions["time"].idle_shares) < max(predictions["uniform"].idle_shares)


def test_three_billion_parameters_learn_on_two_12gb_cards_since_their_gradients_leave(tmp_path: Path) -> None:
    shape = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8}
    tied = {"vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    tiny_config("llama", **shape, **tied).save_pretrained(tmp_path)
    path = CONFIGS[0].parent / "full_3b_two_12gb.yaml"
    plan = plan_run(load_config(path, [f"model.path={tmp_path}"]), None, with_memory=True, for_hardware=True).plan
    assert plan.memory is not None and all(card.fits for card in plan.memory.cards) and plan.total_parameters > 3.2e9
    needs = [round(card.needed_bytes / 2**30, 1) for card in plan.memory.cards]
    assert (needs, round(plan.memory.fullest_host_bytes / 2**30)) == ([7.7, 8.0], 77), "as docs/memory.md and the config say"
    with pytest.raises(ConfigError, match=r"no split over 2 cards fits"):
        plan_run(load_config(path, [f"model.path={tmp_path}", "offload.gradients=none"]), None, with_memory=True, for_hardware=True)


@pytest.mark.parametrize("rule", ["time", "memory"])
def test_cards_too_small_for_one_block_are_told_what_is_missing(rule: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16}
    tiny_config("llama", vocab_size=1000, max_position_embeddings=1024, **shape).save_pretrained(tmp_path)
    small = "hardware=[{gpu: gtx1080, memory_gib: 8}, {gpu: gtx1080, memory_gib: 0.6}]"
    overrides = [f"model.path={tmp_path}", small, f"partition.rule={rule}", "quantize=none", "adapter.type=none", "optimizer.name=adamw"]
    config = load_config(CONFIGS[0].parent / "unequal_cards.yaml", overrides)
    with pytest.raises(ConfigError, match=r"no split over 2 cards fits; .* lacks \d+\.\d\d GiB on card 1 \(gtx1080, 0\.6 GiB\) with one block"):
        plan_run(config, None, for_hardware=True)
