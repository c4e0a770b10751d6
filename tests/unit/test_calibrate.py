"""A block's seconds from two stages, also where a busy machine has made nonsense of their difference; and the file of the times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.errors import ConfigError
from mpfinetune.planning.timing import PartSeconds, RankTimes, slowest
from mpfinetune.training.calibrate import _seconds_of_one, calibrate_run
from mpfinetune.training.forecast import CALIBRATION_FILE, read_calibration, write_calibration

TIMES = RankTimes(1, (PartSeconds(0.0, 0.0), PartSeconds(1.0, 2.0), PartSeconds(0.5, 0.5)), 0.1, 1e9, 1e9, source="measured")


@pytest.mark.parametrize(
    ("one", "several", "expected"),
    [
        (1.5, 3.5, 1.0),  # half a second besides the blocks
        (1.0, 3.0, 1.0),  # nothing besides
        (5.0, 3.0, 1.0),  # the short stage was disturbed: the difference would be negative
        (0.5, 3.0, 1.0),  # the long one was: a pass would take less than nothing besides its blocks
    ],
)
def test_a_block_from_stages_of_one_and_of_three(one: float, several: float, expected: float) -> None:
    assert _seconds_of_one(one, several, more=2) == pytest.approx(expected)


def config_of(run_dir: Path, **changes: Any) -> RunConfig:
    return config_from_dict({"model": {"path": "x", "task": "causal_lm"}, "data": {"path": "x.txt"}, "run_dir": str(run_dir), **changes})


def test_times_are_written_whole_and_read_by_their_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path / "run")
    assert read_calibration(config, {"ranks": 1}) is None
    path = write_calibration(config, {"ranks": 1}, [TIMES])
    assert read_calibration(config, {"ranks": 1}) == [TIMES] and read_calibration(config, {"ranks": 2}) is None
    assert [file.name for file in path.parent.iterdir()] == [CALIBRATION_FILE]
    before = path.read_text()

    def cut_off(file: Path, text: str, encoding: str) -> None:
        file.write_bytes(text[:20].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(OSError, match="No space left"):
        write_calibration(config, {"ranks": 2}, [TIMES, TIMES])
    assert path.read_text() == before


@pytest.mark.parametrize("damage", [lambda text: text[:40], lambda text: "[]", lambda text: "{}", lambda text: text.replace("forward", "fwd")])
def test_a_file_that_cannot_be_read_is_named_with_the_way_out(tmp_path: Path, damage: Any) -> None:
    config = config_of(tmp_path)
    path = write_calibration(config, {"ranks": 1}, [TIMES])
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match=rf"run_dir: the measured times in '{path}' cannot be read .* delete the file, and measure anew with plan"):
        read_calibration(config, {"ranks": 1})


def test_one_process_of_several_devices_is_not_measured(tmp_path: Path) -> None:
    config = config_of(tmp_path, strategy="local", partition={"local_overlap": True, "num_stages": 2}, devices=2)
    with pytest.raises(ConfigError, match=r"partition.local_overlap: true given, .* leave out --calibrate, or set strategy: pipeline"):
        calibrate_run(config)


def test_a_rank_is_as_slow_as_its_slowest_replica_and_link() -> None:
    other = RankTimes(1, (PartSeconds(0.0, 0.0), PartSeconds(1.5, 2.0), PartSeconds(0.5, 0.5)), 0.05, 2e9, 5e8, source="measured")
    assert slowest([TIMES]) == TIMES
    assert slowest([TIMES, other]) == RankTimes(1, other.parts, 0.1, 1e9, 5e8, source="measured")
