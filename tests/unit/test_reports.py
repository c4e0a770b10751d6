"""What a run prints and records."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpfinetune.errors import ConfigError, DataError, UserError
from mpfinetune.reports.console import Reporter, duration_in_words, print_error
from mpfinetune.reports.tracking import Tracker

UPDATE: dict[str, Any] = {
    "epoch": 0.5,
    "loss": 0.7,
    "lr": 2e-5,
    "grad_norm": 1.25,
    "tokens": 512,
    "samples_per_second": 16.0,
    "tokens_per_second": 2048.0,
    "step_seconds": 0.25,
    "peak_memory_bytes": [2**30, 2**29],
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def lines_of(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


# --- console ----------------------------------------------------------------------------------------------------------------------


def test_say_leaves_the_text_as_it_is() -> None:
    out = io.StringIO()
    text = "reading [bold]models/x[/bold] " + "long/" * 60 + " :smile: 12"
    Reporter(True, file=out).say(text)
    assert out.getvalue() == text + "\n"


def test_table_shows_every_cell() -> None:
    out = io.StringIO()
    Reporter(True, file=out).table("Partition [2]", ["stage", "blocks", "GiB"], [["0", "embed, 0-2 [a]", 1.5], ["1", "3-5, head", 10.25]])
    text = out.getvalue()
    assert all(cell in text for cell in ["Partition [2]", "stage", "embed, 0-2 [a]", "3-5, head", "10.25"])
    assert "\x1b" not in text
    right_edges = {line.rstrip(" │").rindex("5") for line in text.splitlines() if "1.5" in line or "10.25" in line}
    assert len(right_edges) == 1


def test_other_ranks_print_nothing() -> None:
    out = io.StringIO()
    reporter = Reporter(False, file=out)
    reporter.say("text")
    reporter.table("title", ["a"], [["b"]])
    with reporter.progress(2) as progress:
        progress.advance(loss=1.0, lr=1e-3, tokens_per_second=10.0)
    assert out.getvalue() == ""


def test_progress_outside_a_terminal_is_a_line_every_ten_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    with Reporter(True, file=out, clock=clock).progress(100, start=40) as progress:
        for _ in range(60):
            clock.seconds += 1.0
            progress.advance(loss=0.5, lr=2e-5, tokens_per_second=12345.6)
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["41/100", "51/100", "61/100", "71/100", "81/100", "91/100", "100/100"]
    assert lines[1] == "update 51/100  loss 0.5000  lr 2.00e-05  12,346 tokens/s  remaining 0:00:49"
    assert lines[-1].endswith("remaining 0:00:00")


def test_progress_takes_a_loss_that_is_not_finite() -> None:
    out = io.StringIO()
    with Reporter(True, file=out).progress(1) as progress:
        progress.advance(loss=math.nan, lr=0.0, tokens_per_second=0.0)
    assert "loss nan" in out.getvalue()


def test_progress_in_a_terminal_is_a_bar_and_messages_go_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    reporter = Reporter(True, file=out)
    with reporter.progress(3, start=1) as progress:
        progress.advance(loss=0.1234, lr=1e-4, tokens_per_second=1000.0)
        reporter.say("evaluated")
        progress.advance(loss=0.1111, lr=1e-4, tokens_per_second=1000.0)
    text = out.getvalue()
    assert "3/3" in text and "0.1111" in text and "1,000 tokens/s" in text and "evaluated\n" in text and "remaining" in text


def test_progress_ends_when_the_run_fails() -> None:
    out = Terminal()
    with pytest.raises(ValueError, match="on purpose"), Reporter(True, file=out).progress(3):
        raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ConfigError(["a: 1 given", "b: 2 given [x]"]), "mpfinetune: config error:\n  a: 1 given\n  b: 2 given [x]\n"),
        (DataError("train.tsv: line 3: two\ncolumns"), "mpfinetune: data error:\n  train.tsv: line 3: two\n  columns\n"),
        (UserError("wrong"), "mpfinetune: error:\n  wrong\n"),
        (UserError(), "mpfinetune: error:\n  UserError\n"),
    ],
)
def test_error_is_printed_plainly_on_stderr(error: UserError, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_error(error)
    captured = capsys.readouterr()
    assert captured.err == text and captured.out == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.0, "0:00:00"), (59.6, "0:01:00"), (3725.4, "1:02:05"), (360000.0, "100:00:00")])
def test_duration_in_words(seconds: float, text: str) -> None:
    assert duration_in_words(seconds) == text


# --- tracking ---------------------------------------------------------------------------------------------------------------------


def test_each_update_and_evaluation_is_one_line_at_once(tmp_path: Path) -> None:
    with Tracker(tmp_path / "runs" / "x", True, tensorboard=False) as tracker:
        tracker.log_evaluation(0, "eval", {"accuracy": 0.5})
        tracker.log_update(step=1, **UPDATE)
        assert lines_of(tracker.path) == [  # before it is closed
            {"step": 0, "split": "eval", "metrics": {"accuracy": 0.5}},
            {"step": 1, **UPDATE, "skipped": False},
        ]
        assert list(lines_of(tracker.path)[1]) == ["step", "epoch", "loss", "lr", "grad_norm", "tokens", *list(UPDATE)[5:], "skipped"]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with Tracker(tmp_path, True, tensorboard=False) as tracker:
        tracker.log_update(step=1, **{**UPDATE, "loss": math.nan, "grad_norm": -math.inf}, skipped=True)
        tracker.log_evaluation(1, "eval", {"mcc": math.nan, "loss": math.inf})
    update, evaluation = lines_of(tmp_path / "metrics.jsonl")
    assert update["loss"] is None and update["grad_norm"] is None and update["skipped"] is True
    assert evaluation["metrics"] == {"mcc": None, "loss": None}


def test_numbers_of_torch_and_numpy_are_written_as_numbers(tmp_path: Path) -> None:
    values = {"loss": torch.tensor(0.5), "grad_norm": np.float32(0.25), "tokens": np.int64(3), "lr": torch.tensor(math.inf)}
    with Tracker(tmp_path, True, tensorboard=False) as tracker:
        tracker.log_update(step=1, **{**UPDATE, **values})
    (update,) = lines_of(tmp_path / "metrics.jsonl")
    assert (update["loss"], update["grad_norm"], update["tokens"], update["lr"]) == (0.5, 0.25, 3, None)


def test_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    with Tracker(tmp_path, True, tensorboard=False) as tracker:
        tracker.log_evaluation(0, "eval", {"accuracy": 0.1})
        for step in range(1, 6):
            tracker.log_update(step=step, **UPDATE)
        tracker.log_evaluation(3, "eval", {"accuracy": 0.3})
    with Tracker(tmp_path, True, tensorboard=False) as tracker:
        tracker.truncate_after(3)
        for step in range(4, 7):
            tracker.log_update(step=step, **{**UPDATE, "loss": 0.1})
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "split" in line] == [0, 3]
    assert [line["loss"] for line in lines if "loss" in line] == [0.7] * 3 + [0.1] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_truncating_works_in_the_middle_of_a_run_and_without_a_file(tmp_path: Path) -> None:
    with Tracker(tmp_path, True, tensorboard=False) as tracker:
        tracker.truncate_after(10)
        for step in (1, 2, 3):
            tracker.log_update(step=step, **UPDATE)
        tracker.truncate_after(1)
        tracker.log_update(step=2, **UPDATE)
        assert [line["step"] for line in lines_of(tracker.path)] == [1, 2]
        tracker.truncate_after(-1)
        assert lines_of(tracker.path) == []


@pytest.mark.parametrize(
    ("tail", "steps"),
    [('{"step": 2, "lo', [1, 3]), ('{"step": 2, "loss": 0.5}', [1, 2, 3]), ("", [1, 3])],
)
def test_line_cut_off_by_a_crash_does_not_spoil_the_next(tmp_path: Path, tail: str, steps: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.5}\n' + tail, encoding="utf-8")
    with Tracker(tmp_path, True, tensorboard=False) as tracker:
        tracker.log_update(step=3, **UPDATE)
    assert [line["step"] for line in lines_of(path)] == steps
    path.write_text('{"step": 1, "loss": 0.5}\n' + tail, encoding="utf-8")
    with Tracker(tmp_path, True, tensorboard=False) as tracker:
        tracker.truncate_after(1)
    assert path.read_text(encoding="utf-8") == '{"step": 1, "loss": 0.5}\n'


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Tracker(tmp_path / "x", False) as tracker:
        tracker.truncate_after(0)
        tracker.log_update(step=1, **UPDATE)
        tracker.log_evaluation(1, "eval", {"accuracy": 0.5})
    assert not (tmp_path / "x").exists()


def test_scalars_are_mirrored_to_tensorboard_and_a_resumed_run_hides_what_it_dropped(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Tracker(tmp_path, True) as tracker:
        for step in (1, 2, 3):
            tracker.log_update(step=step, **{**UPDATE, "loss": 1.0 * step})
        tracker.truncate_after(1)
        tracker.log_update(step=2, **{**UPDATE, "loss": 20.0})
        tracker.log_evaluation(2, "eval", {"accuracy": 0.75, "mcc": math.nan})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]
    assert [(event.step, event.value) for event in events.Scalars("eval/accuracy")] == [(2, 0.75)]
    assert events.Scalars("memory/peak_gib_rank1")[0].value == 0.5
    assert {"train/lr", "train/grad_norm", "train/tokens_per_second", "train/step_seconds", "train/epoch"} <= set(events.Tags()["scalars"])
