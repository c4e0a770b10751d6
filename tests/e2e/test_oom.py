"""Runs that do not fit at first: the micro-batch is halved or probed, said, written down and kept; the numbers stay those of the smaller size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mpfinetune.strategies.full_precision import FullPrecisionForward
from mpfinetune.training.checkpoint import read_state
from mpfinetune.training.leaks import LeakWatch
from mpfinetune.training.loop import Trainer
from mpfinetune.training.optim import NamedOptimizer
from tests.e2e.workspace import PIPELINE, Workspace, checkpoint_of, command, largest_difference, records, train
from tests.multiproc.rank_pool import RankPool
from tests.oom_injection import room_for

TRAIN_CASE, INJECTED_CASE = "tests.e2e.run_cases:train", "tests.e2e.run_cases:train_out_of_memory"
TOLERANCE = 1e-5
LIMIT_SECONDS = 90.0


def micro(size: int | str) -> dict[str, Any]:
    return {"batch": {"global_size": 8, "micro_size": size}}


def events(run_dir: Path, event: str = "micro_size") -> list[dict[str, Any]]:
    return [record for record in records(run_dir) if record.get("event") == event]


def test_one_rank_runs_out_and_both_go_on(work: Workspace, two_ranks: RankPool) -> None:
    """On rank 1 only, at the forward of microbatch 3 of update 5."""
    saved = {"checkpoint": {"every_steps": 4, "keep": 9}, **PIPELINE}
    hit = work.config(name="hit", **saved, **micro(2))
    small = work.config(name="small", **saved, **micro(1))
    arguments = {"config": str(hit), "rank": 1, "update": 5, "microbatch": 3}
    said = two_ranks.run(INJECTED_CASE, arguments, LIMIT_SECONDS)
    two_ranks.run(TRAIN_CASE, {"config": str(small)}, LIMIT_SECONDS)
    assert largest_difference(work.run_dir("hit"), work.run_dir("small")) <= TOLERANCE
    for lines in said:
        (line,) = [line for line in lines if "out of memory" in line]
        assert "after update 4: rank 1 ran out of memory (CUDA out of memory" in line
        assert "halved from 2 to 1 row(s) at once, 8 microbatch(es)" in line
    (event,) = events(work.run_dir("hit"))
    assert (event["step"], event["reason"], event["ranks"], event["micro_size"]) == (4, "out_of_memory", [1], 1)
    assert read_state(checkpoint_of(work.run_dir("hit"), 4)).micro_size is None
    assert read_state(checkpoint_of(work.run_dir("hit"), 8)).micro_size == 1


def test_the_found_size_is_used_on_resume(work: Workspace) -> None:
    config = work.config(**micro(4), **{"train.max_steps": 6, "checkpoint.every_steps": 3})
    with room_for(2):
        train(config)
    assert [event["reason"] for event in events(work.run_dir())] == ["out_of_memory"]
    with room_for(2) as calls:
        text = train(config, "train.max_steps=9")
    assert "2 row(s) at once" in text and "found earlier in this run (batch.micro_size: 4)" in text
    assert max(calls) == 2  # no second failure
    with room_for(8) as calls:
        train(config, "train.max_steps=10", "batch.micro_size=8")  # another wish is not overruled by what was found for the first
    assert max(calls) == 8


@pytest.mark.parametrize(("room", "found"), [(1, 1), (3, 2), (5, 4), (99, 8)])
def test_auto_finds_the_largest_that_fits(work: Workspace, room: int, found: int) -> None:
    auto = work.config(name="auto", **micro("auto"), **{"train.max_steps": 2})
    with room_for(room):
        text = train(auto)
    assert f"batch.micro_size: auto: {found} row(s) at once" in text
    (event,) = events(work.run_dir("auto"))
    assert (event["step"], event["reason"], event["micro_size"]) == (0, "probed", found)
    assert json.loads((work.run_dir("auto") / "plan.json").read_text())["micro_size"] == found
    assert read_state(checkpoint_of(work.run_dir("auto"), 2)).micro_size == found
    train(work.config(name="given", **micro(found), **{"train.max_steps": 2}))
    assert largest_difference(work.run_dir("auto"), work.run_dir("given")) <= TOLERANCE


def test_auto_in_a_pipeline_leaves_the_schedule_its_microbatches(work: Workspace, two_ranks: RankPool) -> None:
    config = work.config("gpt2", **PIPELINE, **micro("auto"), **{"train.max_steps": 2})
    for lines in two_ranks.run(TRAIN_CASE, {"config": str(config)}, LIMIT_SECONDS):
        assert any("auto: 4 row(s) at once, 2 microbatch(es)" in line for line in lines)


def test_one_row_that_does_not_fit_ends_with_advice(work: Workspace) -> None:
    with room_for(0):
        outcome = command("train", work.config(**micro(2)))
    assert outcome.code == 1
    assert "Traceback" not in outcome.text
    for words in ("rank 0 ran out of memory", "batch.micro_size: 1", "precision: bf16", "recompute: full", "optimizer.name: adamw_8bit"):
        assert words in outcome.text, outcome.text


def test_an_update_that_does_not_fit_ends_with_advice(work: Workspace) -> None:
    with mock.patch.object(NamedOptimizer, "step", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        outcome = command("train", work.config(**micro(2)))
    assert outcome.code == 1
    assert "Traceback" not in outcome.text
    assert "in the optimizer's update" in outcome.text and "A smaller batch.micro_size would not help there" in outcome.text


def test_an_evaluation_that_does_not_fit_is_scored_anew(work: Workspace) -> None:
    with room_for(1, evaluation=True):
        text = train(work.config(name="hit", **micro(4), **{"train.max_steps": 2}))
    assert "after update 0" in text
    train(work.config(name="small", **micro(1), **{"train.max_steps": 2}))
    assert largest_difference(work.run_dir("hit"), work.run_dir("small")) <= TOLERANCE


def test_an_evaluation_at_full_precision_that_does_not_fit_ends_with_advice(work: Workspace) -> None:
    config = work.config("llama", precision="bf16", **{"eval": {"full_precision_every": 1}}, **micro(2))
    with mock.patch.object(FullPrecisionForward, "__call__", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        outcome = command("train", config)
    assert outcome.code == 1 and "Traceback" not in outcome.text
    assert "in what eval.full_precision_every asks for; set batch.micro_size to less than 2" in outcome.text.replace("\n", " ")


def test_another_error_is_not_taken_for_a_want_of_memory(work: Workspace) -> None:
    with mock.patch("mpfinetune.models.stage.StageModule.forward", side_effect=RuntimeError("mat1 and mat2 shapes cannot be multiplied")):
        outcome = command("train", work.config(**micro(2)))
    assert outcome.code == 1 and "defect" in outcome.text and "shapes cannot be multiplied" in outcome.text


def test_a_leak_is_reported_once_with_its_beginning(work: Workspace) -> None:
    kept: list[torch.Tensor] = []
    update = Trainer._update_once

    def leaking(self: Trainer, *arguments: Any) -> Any:
        if self.state.step >= 10:
            kept.append(torch.ones(3 * 2**20))  # 12 MiB, written to, so that it is resident
        return update(self, *arguments)

    with mock.patch.object(Trainer, "_update_once", leaking):
        text = train(work.config(**micro(4), **{"train.max_steps": 40, "watch": {"leak_steps": 20, "leak_mib": 64.0}}))
    assert text.count("has grown steadily since update") == 1
    (event,) = events(work.run_dir(), "leak")
    assert (event["kind"], event["rank"]) == ("host", 0)
    assert 7 <= event["began"] <= 12
    assert event["bytes_per_update"] == pytest.approx(12 * 2**20, rel=0.5)


def test_memory_is_written_after_each_update(work: Workspace) -> None:
    with mock.patch.object(LeakWatch, "note", return_value=[]) as note:
        train(work.config(**micro(4), **{"train.max_steps": 2}))
    assert note.call_count == 2
    for record in records(work.run_dir()):
        if "loss" in record:
            assert record["host_bytes"][0] > 2**20
            assert record["allocated_bytes"] == record["reserved_bytes"] == [0]  # torch counts none on the CPU
