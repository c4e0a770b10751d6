"""The picture of a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpfinetune.config import load_config
from mpfinetune.errors import ConfigError
from mpfinetune.planning.plan import Plan
from mpfinetune.training.prepare import plan_run
from mpfinetune.training.show import picture_of
from tests.families import tiny_config

UNEQUAL_CARDS = Path(__file__).resolve().parents[2] / "configs" / "unequal_cards.yaml"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Of a tiny llama over the two unlike cards, with memory and time."""
    folder = tmp_path_factory.mktemp("model")
    tiny_config("llama", num_hidden_layers=6, hidden_size=64, intermediate_size=128, max_position_embeddings=512).save_pretrained(folder)
    config = load_config(UNEQUAL_CARDS)
    planned = plan_run(replace(config, model=replace(config.model, path=str(folder))), None, with_memory=True, for_hardware=True)
    assert planned.plan.memory is not None and planned.plan.prediction is not None
    return planned.plan


def test_memory_and_schedule_are_drawn_into_a_png(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    picture_of(plan, file)
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 10_000


def test_a_file_that_cannot_be_written_is_named(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--picture: '.*nowhere/plan\.png' cannot be written"):
        picture_of(plan, tmp_path / "nowhere" / "plan.png")
