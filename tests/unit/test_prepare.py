"""Before a run starts: the devices that it is planned for (of ``hardware``, or those that are here), and a folder that can be made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.errors import ConfigError
from mpfinetune.training import prepare

GIB = 2**30


@pytest.fixture
def two_present_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "visible_cards", lambda config: [("NVIDIA GeForce RTX 3060", (8, 6), 11 * GIB)] * 2)
    monkeypatch.setattr(prepare, "device_type", lambda config: "cuda")
    monkeypatch.setattr(prepare, "visible_devices", lambda config: 2)


def config_of(**changes: Any) -> RunConfig:
    return config_from_dict({"model": {"path": "x", "task": "causal_lm"}, "data": {"path": "x.txt"}, "run_dir": "x", **changes})


@pytest.mark.usefixtures("two_present_cards")
def test_train_plans_for_the_cards_that_are_here_and_plan_for_those_of_hardware() -> None:
    config = config_of(hardware=[{"gpu": "h100"}] * 2)
    assert [card.memory_bytes for card in prepare._world(config, None, for_hardware=False).cards] == [11 * GIB] * 2
    assert [card.memory_bytes for card in prepare._world(config, None, for_hardware=True).cards] == [round(79.1 * GIB)] * 2
    assert [card.memory_bytes for card in prepare._world(config_of(), None, for_hardware=True).cards] == [11 * GIB] * 2


@pytest.mark.usefixtures("two_present_cards")
@pytest.mark.parametrize(("on_this_host", "cards"), [(4, 2), (2, 0)])
def test_over_several_hosts_no_rank_plans_by_the_cards_of_its_own(monkeypatch: pytest.MonkeyPatch, on_this_host: int, cards: int) -> None:
    monkeypatch.setattr(prepare, "processes_per_host", lambda: on_this_host)
    world = prepare._world(config_of(), 4, for_hardware=False)
    assert (len(world.cards), world.processes_per_host) == (cards, on_this_host)


def test_a_run_s_folder_is_no_file_and_under_none(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.write_text("")
    prepare.refuse_run_dir_under_a_file(str(tmp_path))
    prepare.refuse_run_dir_under_a_file(str(tmp_path / "new" / "run"))
    with pytest.raises(ConfigError, match=r"run_dir: '.*taken' is a file, but must be a folder"):
        prepare.refuse_run_dir_under_a_file(str(file))
    with pytest.raises(ConfigError, match=r"run_dir: '.*taken/a/b' lies under '.*taken', which is a file"):
        prepare.refuse_run_dir_under_a_file(str(file / "a" / "b"))
