"""fp16's dynamic loss scale in the training loop: overflows on one rank, at the smallest scale, and across a resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.e2e.fp16_cases import fit
from tests.e2e.workspace import PIPELINE, Workspace, checkpoint_of, step_folders
from tests.multiproc.rank_pool import RankPool

FIT = "tests.e2e.fp16_cases:fit"
FP16: dict[str, Any] = {"precision": "fp16", "eval.at_start": False, "data.max_length": 8, "data.eval_rows": 1}
LIMIT_SECONDS = 120.0  # fp16 is slow on a CPU


def test_an_overflow_on_one_rank_skips_the_update_on_all(work: Workspace, two_ranks: RankPool) -> None:
    config = work.config("llama", **FP16, **PIPELINE, train={"max_steps": 4, "warmup_steps": 0})
    results = two_ranks.run(FIT, {"config": str(config), "overflows": (1,), "rank": 1, "scale": 1024.0}, LIMIT_SECONDS)
    for result in results:
        records = result["records"]
        assert [record["skipped"] for record in records] == [False, True, False, False]
        assert [record["scale"] for record in records] == [(1024.0, 1), (512.0, 0), (512.0, 1), (512.0, 2)]
        assert [record["unchanged"] for record in records] == [False, True, False, False]
        # the schedule stands still: the third update has the rate that the second would have had
        assert [record["lr"] for record in records] == pytest.approx([1e-3, 0.75e-3, 0.75e-3, 0.5e-3])
        assert result["stopped"] is None
    first, second = results
    assert [record["loss"] for record in first["records"]] == [record["loss"] for record in second["records"]]


def test_overflows_at_the_smallest_scale_end_the_run_with_the_last_good_checkpoint_named(work: Workspace, two_ranks: RankPool) -> None:
    """Those above it only search for the scale: they are not counted."""
    changes = {"train": {"max_steps": 20, "max_skipped_updates": 1}, "checkpoint": {"every_steps": 2, "keep": 9}}
    config = work.config("llama", **FP16, **PIPELINE, **changes)
    arguments = {"config": str(config), "overflows": tuple(range(2, 20)), "rank": 1, "scale": 8.0}
    results = two_ranks.run(FIT, arguments, LIMIT_SECONDS)
    for result in results:
        assert [record["scale"][0] for record in result["records"]] == [8.0, 8.0, 4.0, 2.0, 1.0, 1.0, 1.0]
        assert [record["skipped"] for record in result["records"]] == [False, False, True, True, True, True, True]
        assert all(record["unchanged"] for record in result["records"][2:])
        assert "2 updates in a row had a gradient that is not finite at the smallest loss scale, 1" in result["stopped"]
        assert str(checkpoint_of(work.run_dir(), 6)) in result["stopped"] and "train.max_skipped_updates" in result["stopped"]
        assert result["newest"] == str(checkpoint_of(work.run_dir(), 6))
    assert step_folders(work.run_dir()) == [2, 4, 6]


def test_scale_and_count_of_a_resumed_run_are_those_of_the_uninterrupted_one(work: Workspace) -> None:
    """The scale grows every two updates here; the checkpoint lies between two growths, after an overflow."""
    changes = {"train": {"max_steps": 8, "warmup_steps": 0}, "checkpoint": {"every_steps": 5, "keep": 9}}
    whole = fit(str(work.config("llama", name="whole", **FP16, **changes)), (2,), 0, scale=64.0, growth_interval=3)
    config = work.config("llama", name="again", **FP16, **changes)
    resumed = fit(str(config), (2,), 0, growth_interval=3, resume=str(checkpoint_of(work.run_dir("whole"), 5)))
    assert [record["scale"] for record in whole["records"]] == [
        (64.0, 1), (64.0, 2), (32.0, 0), (32.0, 1), (32.0, 2), (64.0, 0), (64.0, 1), (64.0, 2),
    ]  # fmt: skip
    assert resumed["records"] == whole["records"][5:]
    assert resumed["scale"] == whole["scale"] and resumed["end"].keys() == whole["end"].keys()
    assert all(torch.equal(resumed["end"][name], whole["end"][name]) for name in whole["end"])
