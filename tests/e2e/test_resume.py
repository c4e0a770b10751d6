"""Stopping and going on: the losses after a resume equal those of the run that was never stopped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.workspace import (
    PIPELINE,
    UPDATES_PER_EPOCH,
    Workspace,
    checkpoint_of,
    command,
    largest_difference,
    records,
    step_folders,
    train,
    tree,
    updates,
)
from tests.multiproc.rank_pool import RankPool

LAST = 12  # updates: two epochs and a part of the third
EXACT, ACROSS_LAYOUTS = 1e-6, 1e-5
DROPOUT = {"model.overrides": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}}
EVERY_STEP = {"train.max_steps": LAST, "checkpoint": {"every_steps": 1, "keep": 50}, "eval": {"every_steps": 3}}
TRAIN_CASE = "tests.e2e.run_cases:train"


def copy_as_killed(source: Path, target: Path, step: int) -> None:
    """The folder of a run that was killed some updates after its checkpoint of ``step``: later metrics, half a line, half a checkpoint."""
    shutil.copytree(source, target)
    for folder in (target / "checkpoints").iterdir():
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    shutil.rmtree(target / "export")
    half = target / "checkpoints" / f"step-{step + 1:08d}.unfinished"
    half.mkdir()
    (half / "weights-00000-of-00001.safetensors").write_bytes(b"half")
    kept = [json.dumps(record) for record in records(source) if record["step"] <= step + 2]
    (target / "metrics.jsonl").write_text("\n".join([*kept, '{"step": 9, "lo']), encoding="utf-8")


@pytest.fixture(scope="module")
def whole_runs(material: Workspace, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that were never stopped, a checkpoint at every update."""
    work = Workspace(material.models, material.data, tmp_path_factory.mktemp("whole"))
    kinds: dict[str, dict[str, Any]] = {
        "adamw": DROPOUT,
        "sgd": {"optimizer": {"name": "sgd", "momentum": 0.9}, **DROPOUT},
        "bf16": {"precision": "bf16"},
        "plain": {},
    }
    for name, changes in kinds.items():
        train(work.config(name=name, **EVERY_STEP, **changes))
    return {name: work.run_dir(name) for name in kinds}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "bf16"])
@pytest.mark.parametrize("step", [3, UPDATES_PER_EPOCH, UPDATES_PER_EPOCH + 2])
def test_a_resumed_run_equals_the_uninterrupted_one(whole_runs: dict[str, Path], tmp_path: Path, kind: str, step: int) -> None:
    copy_as_killed(whole_runs[kind], tmp_path / "run", step)
    text = train(whole_runs[kind] / "config.yaml", f"run_dir={tmp_path / 'run'}")
    assert f"after update {step}" in text
    assert largest_difference(tmp_path / "run", whole_runs[kind]) <= EXACT
    assert step_folders(tmp_path / "run") == list(range(1, LAST + 1))
    assert tree(tmp_path / "run" / "export") == tree(whole_runs[kind] / "export")


def test_a_finished_run_is_left_as_it_is(whole_runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(whole_runs["plain"], tmp_path / "run")
    train(whole_runs["plain"] / "config.yaml", f"run_dir={tmp_path / 'run'}")
    assert largest_difference(tmp_path / "run", whole_runs["plain"]) == 0.0
    assert tree(tmp_path / "run" / "checkpoints") == tree(whole_runs["plain"] / "checkpoints")


def test_a_run_goes_on_under_another_strategy(whole_runs: dict[str, Path], work: Workspace, two_ranks: RankPool) -> None:
    """Local, then two stages, then local again, each for a part of the run."""
    run_dir = work.run_dir()
    copy_as_killed(whole_runs["plain"], run_dir, 3)
    split = work.config(**EVERY_STEP, **PIPELINE)
    two_ranks.run(TRAIN_CASE, {"config": str(split)})
    assert largest_difference(run_dir, whole_runs["plain"]) <= ACROSS_LAYOUTS
    assert len(list(checkpoint_of(run_dir, 8).glob("weights-*"))) == 2
    again = work.folder / "again"
    copy_as_killed(run_dir, again, 8)
    train(work.config(name="again", **EVERY_STEP))
    assert largest_difference(again, whole_runs["plain"]) <= ACROSS_LAYOUTS


LORA_OVER_ZERO_3: dict[str, Any] = {
    "strategy": "zero", "zero": {"stage": 3}, "offload": {"optimizer": "cpu", "parameters": "cpu"}, "precision": "bf16",
    "adapter": {"type": "lora", "rank": 4},
}  # fmt: skip


@pytest.mark.parametrize("layout", [PIPELINE, LORA_OVER_ZERO_3], ids=["pipeline", "lora over zero 3"])
def test_a_split_run_with_tied_weights_resumes(work: Workspace, two_ranks: RankPool, layout: dict[str, Any]) -> None:
    config = work.config("gpt2", **EVERY_STEP, **layout)
    two_ranks.run(TRAIN_CASE, {"config": str(config)})
    again = work.folder / "again"
    copy_as_killed(work.run_dir(), again, 7)
    two_ranks.run(TRAIN_CASE, {"config": str(config), "overrides": [f"run_dir={again}"]})
    assert largest_difference(again, work.run_dir()) <= EXACT
    assert tree(again / "export") == tree(work.run_dir() / "export")


# --- checkpoints that are not complete --------------------------------------------------------------------------------------------


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE = [(pattern, damage) for pattern in ("weights-*", "optimizer-*", "state.json") for damage in (halve, empty, Path.unlink)]


@pytest.mark.parametrize(("pattern", "damage"), DAMAGE, ids=[f"{pattern}-{damage.__name__}" for pattern, damage in DAMAGE])
def test_a_broken_newest_checkpoint_is_passed_over(whole_runs: dict[str, Path], tmp_path: Path, pattern: str, damage: Any) -> None:
    copy_as_killed(whole_runs["plain"], tmp_path / "run", 9)
    (broken,) = checkpoint_of(tmp_path / "run", 9).glob(pattern)
    damage(broken)
    text = train(whole_runs["plain"] / "config.yaml", f"run_dir={tmp_path / 'run'}")
    assert "step-00000009 is not complete" in text and broken.name in text
    assert "after update 8" in text
    assert largest_difference(tmp_path / "run", whole_runs["plain"]) <= EXACT


def refused(config: Path, run_dir: Path, *overrides: str) -> str:
    """The message of a run that must be refused and must leave its folder as it was."""
    before = tree(run_dir)
    outcome = command("train", config, f"run_dir={run_dir}", *overrides)
    assert outcome.code == 2, outcome.text
    assert "Traceback" not in outcome.text
    assert tree(run_dir) == before
    return outcome.text


def test_no_complete_checkpoint_is_an_error_and_not_a_fresh_start(whole_runs: dict[str, Path], tmp_path: Path) -> None:
    copy_as_killed(whole_runs["plain"], tmp_path / "run", 2)
    for step in (1, 2):
        (checkpoint_of(tmp_path / "run", step) / "state.json").unlink()
    text = refused(whole_runs["plain"] / "config.yaml", tmp_path / "run")
    assert "none of the 2 checkpoints" in text and "checkpoint.resume: never" in text
    train(whole_runs["plain"] / "config.yaml", f"run_dir={tmp_path / 'run'}", "checkpoint.resume=never")
    assert largest_difference(tmp_path / "run", whole_runs["plain"]) <= EXACT


CHANGED = {
    "optimizer": (("optimizer.name=sgd",), ("optimizer.name", "'adamw'", "'sgd'")),
    "rows per update": (("batch.global_size=8",), ("batch.global_size", "was 4", "is 8")),
    "seed": (("train.seed=1",), ("train.seed", "was 42", "is 1")),
    "rows": (("data.train_rows=6",), ("number of training rows", "was 18", "is 6")),
    "head": (("model.num_labels=3",), ("classifier.weight", "[2, 32]", "[3, 32]")),
    "width of a layer": (("model.overrides.intermediate_size=24", "model.init=random"), ("[48", "[24")),
    "fewer updates than done": (("train.max_steps=4",), ("at update 9", "ends at 4")),
    "named checkpoint that is not there": (("checkpoint.resume=nowhere",), ("'nowhere'", "state.json is missing")),
    "named checkpoint that is a file": ((f"checkpoint.resume={__file__}",), ("no complete checkpoint",)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_setting_is_refused_with_both_values(whole_runs: dict[str, Path], tmp_path: Path, name: str) -> None:
    overrides, fragments = CHANGED[name]
    copy_as_killed(whole_runs["plain"], tmp_path / "run", 9)
    text = refused(whole_runs["plain"] / "config.yaml", tmp_path / "run", *overrides)
    for fragment in fragments:
        assert fragment in text


def test_going_on_from_an_older_checkpoint_gives_up_the_later_ones(whole_runs: dict[str, Path], tmp_path: Path) -> None:
    """Later checkpoints are of a continuation that is given up: they must neither push out the new ones nor be resumed from."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole_runs["plain"], run_dir)
    older = checkpoint_of(run_dir, 4)
    overrides = [f"run_dir={run_dir}", f"checkpoint.resume={older}", "train.max_steps=6", "checkpoint.keep=1", "eval.every_steps=null"]
    train(whole_runs["plain"] / "config.yaml", *overrides)
    assert list(updates(run_dir))[-1] == 6
    assert step_folders(run_dir)[-1] == 6


def test_resuming_elsewhere_leaves_the_source_alone(whole_runs: dict[str, Path], tmp_path: Path) -> None:
    source = whole_runs["plain"]
    before = tree(source)
    train(source / "config.yaml", f"run_dir={tmp_path / 'other'}", f"checkpoint.resume={checkpoint_of(source, 5)}")
    assert tree(source) == before
    assert max(step_folders(tmp_path / "other")) == LAST


# --- keeping and losing -----------------------------------------------------------------------------------------------------------


def test_the_last_n_and_the_best_are_kept(work: Workspace) -> None:
    config = work.config("llama", **{**EVERY_STEP, "checkpoint": {"every_steps": 1, "keep": 2}, "eval": {"every_steps": 1}, "optimizer.lr": 0.05})
    train(config)
    scores = {record["step"]: record["metrics"]["loss"] for record in records(work.run_dir()) if "metrics" in record and record["step"]}
    best = min(scores, key=lambda step: scores[step])
    assert set(step_folders(work.run_dir())) == {LAST - 1, LAST, best}


@pytest.mark.parametrize(("fault", "rank"), [("_write_tensors", 1), ("_write_tensors", 0), ("_finish", 0), ("mkdir", 0)])
def test_a_full_disk_on_one_rank_ends_both_with_one_message(two_ranks: RankPool, tmp_path: Path, fault: str, rank: int) -> None:
    folder = tmp_path / "checkpoints"
    messages = two_ranks.run("tests.e2e.run_cases:save_with_fault", {"folder": str(folder), "fault": fault, "faulty_rank": rank})
    for message in messages:
        assert message is not None and "No space left on device" in message and "MiB are free" in message
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


# --- one folder for all ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [False, True])
def test_ranks_that_do_not_share_a_run_dir_are_told_before_the_first_update(work: Workspace, two_ranks: RankPool, resumed: bool) -> None:
    """Two machines that each have a folder of that name; where both have been trained in, their checkpoints have the same names."""
    configs = [work.config("llama", name, **PIPELINE, **{"train.max_steps": 2}) for name in ("here", "there")]
    if resumed:
        for config in configs:
            train(config, "strategy=local", "partition.rule=null", "partition.num_stages=null", "train.max_steps=1")
    before = tree(work.folder)
    said = two_ranks.run("tests.e2e.run_cases:train_apart", {"configs": [str(config) for config in configs]})
    assert said[1] == said[0].replace("/here'", "/there'")
    assert said[0].startswith("CheckpointError: run_dir: ") and "must be one folder that all machines see: rank 1 (on " in said[0]
    assert "does not see what rank 0" in said[0] and "would go on from" not in said[0]
    assert tree(work.folder) == before
    assert sorted(path.name for path in work.folder.iterdir()) == sorted(["here.yaml", "there.yaml", *(["here", "there"] if resumed else [])])


def test_ranks_that_would_resume_from_different_checkpoints_are_told(work: Workspace, two_ranks: RankPool) -> None:
    base = {"train.max_steps": 2, "checkpoint.every_steps": 1, "checkpoint.keep": 9, "run_dir": str(work.run_dir())}
    train(work.config("llama", **base))
    resumes = {"newest": "auto", "older": str(checkpoint_of(work.run_dir(), 1))}
    configs = [str(work.config("llama", name, **PIPELINE, **base, **{"checkpoint.resume": resume})) for name, resume in resumes.items()]
    before = tree(work.run_dir())
    said = two_ranks.run("tests.e2e.run_cases:train_apart", {"configs": configs})
    assert said[0] == said[1] and "would go on from checkpoint 'step-00000001', rank 0 from 'step-00000002'" in said[0]
    assert "does not see" not in said[0] and tree(work.run_dir()) == before


def test_a_shared_run_dir_holds_nothing_of_the_look(work: Workspace, two_ranks: RankPool) -> None:
    config = work.config("llama", **PIPELINE, **{"train.max_steps": 1})
    two_ranks.run(TRAIN_CASE, {"config": str(config)})
    assert updates(work.run_dir()) and not [path for path in work.run_dir().iterdir() if path.name.startswith(".")]
