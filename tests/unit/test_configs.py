"""Every YAML in configs/ loads, and plans a tiny model of the family it is written for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpfinetune.config import load_config
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
    assert sum(row.total_bytes for row in planned.plan.ranks) > 0
