"""Checkpoint folders: complete or not there, found, kept, and refused where they do not fit."""

from __future__ import annotations

import errno
import json
import resource
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from mpfinetune.dist import DistContext
from mpfinetune.errors import CheckpointError
from mpfinetune.training import checkpoint, tensor_files
from mpfinetune.training.checkpoint import (
    RankTensors,
    RunState,
    best_checkpoint,
    check_identity,
    find_checkpoint,
    list_checkpoints,
    prune,
    read_state,
    restore,
    save_checkpoint,
)
from tests.checkpoints import streams
from tests.multiproc.layouts import LOCAL
from tests.multiproc.training_cases import Problem, train, train_from_small_groups

ALONE = DistContext(0, 1, torch.device("cpu"))


def tensors(elements: int = 6) -> RankTensors:
    weight = torch.arange(elements, dtype=torch.float32)
    return RankTensors({"a.weight": weight, "b.bias": torch.ones(2)}, {"a.weight/exp_avg": weight / 2, "a.weight/step": torch.tensor(3.0)})


def save(folder: Path, step: int, score: float | None = None, elements: int = 6) -> Path:
    return save_checkpoint(folder, RunState(step=step, score=score, identity={"optimizer.name": "adamw"}), streams(tensors(elements)), ALONE)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    saved = save(tmp_path, 7, score=0.5)
    assert names(saved) == ["optimizer-00000-of-00001.safetensors", "state.json", "weights-00000-of-00001.safetensors"]
    assert read_state(saved) == RunState(step=7, score=0.5, identity={"optimizer.name": "adamw"})
    found = restore(saved, {"a.weight": (6,)})
    assert set(found.weights) == {"a.weight"} and set(found.states) == {"a.weight/exp_avg", "a.weight/step"}
    assert torch.equal(found.weights["a.weight"], tensors().weights["a.weight"])
    assert torch.equal(found.states["a.weight/step"], torch.tensor(3.0))


def test_tensors_are_written_as_they_come_and_few_are_held_at_a_time(tmp_path: Path) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most: list[int] = []

    def made(count: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(count):
            tensor = torch.full((100,), float(index))
            alive.add(tensor)
            most.append(sum(tensor.nbytes for tensor in alive))
            yield f"weight{index}", tensor
            del tensor

    with mock.patch.object(tensor_files, "CHECKPOINT_BYTES_AT_ONCE", 1000):
        saved = save_checkpoint(tmp_path, RunState(step=1), {"weights": made(9), "optimizer": []}, ALONE)
    assert max(most) == 1200, "two of 400 bytes, and the one that comes next"
    last = [f"weights-00000-of-00001{number}.safetensors" for number in (".1", ".2", ".3", ".4", "")]
    assert names(saved) == ["optimizer-00000-of-00001.safetensors", "state.json", *last]
    found = restore(saved, {f"weight{index}": (100,) for index in range(9)}).weights
    assert [float(found[f"weight{index}"][0]) for index in range(9)] == list(range(9)) and find_checkpoint(tmp_path, "auto")[0] == saved


def test_nothing_is_pickled(tmp_path: Path) -> None:
    for path in save(tmp_path, 1).iterdir():
        assert load_file(path) if path.suffix == ".safetensors" else json.loads(path.read_text())


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1, elements=6)
    saved = save(tmp_path, 1, elements=9)
    assert restore(saved, {"a.weight": (9,)}).weights["a.weight"].numel() == 9
    assert names(tmp_path) == ["step-00000001"]


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_grow_leaves_the_old_checkpoint_and_no_part_of_the_new(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with largest_file(100_000), pytest.raises(CheckpointError, match=r"step 2 could not be written .* needs 1,600,0\d\d bytes .* MiB are free"):
        save(tmp_path, 2, elements=200_000)
    assert names(tmp_path) == ["step-00000001"]
    assert find_checkpoint(tmp_path, "auto")[0] == tmp_path / "step-00000001"


@pytest.mark.parametrize("failing", ["_write_tensors", "_make_anew", "_finish"])
def test_whatever_fails_while_saving_leaves_the_old_checkpoint(tmp_path: Path, failing: str) -> None:
    save(tmp_path, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    owner = tensor_files if failing == "_write_tensors" else checkpoint
    with mock.patch.object(owner, failing, side_effect=full), pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        save(tmp_path / "file" / "checkpoints", 1)


# --- finding and keeping ----------------------------------------------------------------------------------------------------------


def test_the_newest_complete_one_is_found_and_those_passed_over_are_named(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003" / "state.json").unlink()
    (tmp_path / "step-00000004.unfinished").mkdir()
    found, skipped = find_checkpoint(tmp_path, "auto")
    assert found == tmp_path / "step-00000002"
    assert len(skipped) == 1 and "step-00000003" in skipped[0] and "state.json is missing" in skipped[0]


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_no_checkpoint_is_a_fresh_start(tmp_path: Path, resume: str) -> None:
    assert find_checkpoint(tmp_path / "none", resume) == (None, [])


STATES = {
    "truncated": '{"format": 1, "sta',
    "a list": "[]",
    "no files": '{"state": {}}',
    "unknown field": '{"files": {}, "state": {"stepp": 1}}',
    "empty": "",
}


@pytest.mark.parametrize("name", STATES)
def test_a_broken_state_is_no_checkpoint(tmp_path: Path, name: str) -> None:
    (save(tmp_path, 1) / "state.json").write_text(STATES[name])
    with pytest.raises(CheckpointError, match=r"state.json is broken"):
        find_checkpoint(tmp_path, str(tmp_path / "step-00000001"))


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ({1: 0.5, 2: 0.9, 3: 0.7}, 2),
        ({1: None, 2: 0.1, 3: None}, 2),
        ({1: float("nan"), 2: -3.0, 3: -2.0}, 3),
        ({1: -2.0, 2: float("nan")}, 1),
        ({1: 0.5, 2: 0.5}, 1),
        ({1: None}, None),
        ({1: float("nan")}, None),
        ({}, None),
    ],
)
def test_the_best_is_the_highest_score(tmp_path: Path, scores: dict[int, float | None], best: int | None) -> None:
    for step, score in scores.items():
        save(tmp_path, step, score)
    assert best_checkpoint(tmp_path) == (None if best is None else tmp_path / f"step-{best:08d}")


@pytest.mark.parametrize(
    ("keep", "newest", "left"),
    [
        (2, 6, [2, 5, 6]),  # the best, and the last two
        (1, 6, [2, 6]),
        (9, 6, [1, 2, 3, 5, 6]),  # 4 is broken
        (2, 5, [2, 3, 5]),  # 6 is of a continuation that was given up
        (1, 1, [1]),
    ],
)
def test_what_is_kept(tmp_path: Path, keep: int, newest: int, left: list[int]) -> None:
    for step, score in ((1, 0.1), (2, 0.9), (3, 0.3), (4, 0.95), (5, 0.5), (6, 0.6)):
        save(tmp_path, step, score)
    (tmp_path / "step-00000004" / "state.json").unlink()
    (tmp_path / "step-00000009.unfinished").mkdir()
    prune(tmp_path, keep, tmp_path / f"step-{newest:08d}")
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == left
    assert not list(tmp_path.glob("*.unfinished"))


# --- refusing ---------------------------------------------------------------------------------------------------------------------


def test_a_setting_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    saved = save(tmp_path, 1)
    check_identity(saved, {"optimizer.name": "adamw", "new.key": 3})
    with pytest.raises(CheckpointError, match=r"optimizer\.name was 'adamw' and is 'sgd'"):
        check_identity(saved, {"optimizer.name": "sgd"})


@pytest.mark.parametrize(
    ("shapes", "fragment"),
    [
        ({"a.weight": (6,), "c.weight": (1,)}, "does not hold c.weight"),
        ({"a.weight": (3, 2)}, r"a.weight is \[6\] there and \[3, 2\] here"),
        ({"b.bias": (1,)}, r"b.bias is \[2\] there and \[1\] here"),
    ],
)
def test_tensors_of_another_model_are_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]], fragment: str) -> None:
    with pytest.raises(CheckpointError, match=fragment):
        restore(save(tmp_path, 1), shapes)


def test_a_file_that_is_broken_inside_is_named(tmp_path: Path) -> None:
    """Of the right size, so that only reading finds it."""
    saved = save(tmp_path, 1)
    weights = saved / "weights-00000-of-00001.safetensors"
    weights.write_bytes(b"\xff" * weights.stat().st_size)
    with pytest.raises(CheckpointError, match=r"weights-00000-of-00001\.safetensors cannot be read"):
        restore(saved, {"a.weight": (6,)})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_read_one_parameter_at_a_time_is_the_same(tmp_path: Path, precision: str) -> None:
    problem = Problem("gpt2", precision=precision)
    train(problem, LOCAL, updates=(0, 1), save=str(tmp_path))
    arguments: dict[str, Any] = {"problem": problem, "changes": LOCAL, "updates": (1, None), "resume": str(tmp_path / "step-00000001")}
    at_once, one_by_one = train(**arguments), train_from_small_groups(**arguments)
    assert at_once["losses"] == one_by_one["losses"]
    assert all(torch.equal(value, one_by_one["parameters"][name]) for name, value in at_once["parameters"].items())
