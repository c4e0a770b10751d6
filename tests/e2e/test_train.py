"""Whole runs: what they leave, and the real processes: started by the command, started by torchrun, stopped by signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from mpfinetune.config import DistConfig, load_config
from mpfinetune.errors import CheckpointError
from mpfinetune.launcher import start_processes
from mpfinetune.training.loop import NotFinite, Stopped
from tests.e2e.run_cases import build_local
from tests.e2e.workspace import (
    EVALUATION_ROWS,
    PIPELINE,
    TRAIN_ROWS,
    Outcome,
    Workspace,
    checkpoint_of,
    command,
    evaluations,
    finish,
    largest_difference,
    make_model,
    records,
    start,
    step_folders,
    train,
    updates,
)
from tests.multiproc.rank_pool import RankPool

TRAIN_CASE = "tests.e2e.run_cases:train"
EXACT, ACROSS_LAYOUTS = 1e-6, 1e-5
UPDATE_FIELDS = {
    "step",
    "epoch",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "samples_per_second",
    "tokens_per_second",
    "step_seconds",
    "peak_memory_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "host_bytes",
    "skipped",
}

# --- in this process --------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_the_design_says(work: Workspace) -> None:
    config = work.config(**{"eval.every_steps": 4})
    train(config)
    run_dir = work.run_dir()
    names = {path.name for path in run_dir.iterdir()}
    assert names == {"config.yaml", "plan.json", "metrics.jsonl", "checkpoints", "tensorboard", "export"}
    assert load_config(run_dir / "config.yaml") == load_config(config)
    assert json.loads((run_dir / "plan.json").read_text())["strategy"] == "local"
    assert all(set(record) == UPDATE_FIELDS for record in updates(run_dir).values())
    assert all(set(metrics) == {"loss", "accuracy", "f1"} for metrics in evaluations(run_dir).values())
    compared = {entry["what"]: entry["relative_error"] for entry in records(run_dir)[-1]["predicted_against_measured"]}
    assert [compared[what] for what in ("weights", "gradients", "optimizer")] == [0, 0, 0] and "resident peak of the process" in compared
    assert {path.suffix for path in checkpoint_of(run_dir, 8).iterdir()} == {".safetensors", ".json"}, "nothing is pickled"


def test_full_precision_scores_stand_beside_the_others(work: Workspace) -> None:
    """Every second evaluation (of those at 0, 2 and 4), and always by `mpfinetune eval`."""
    config = work.config("llama", precision="bf16", **{"eval": {"every_steps": 2, "full_precision_every": 2}, "train.max_steps": 4})
    text = train(config)
    found = [record for record in records(work.run_dir()) if "metrics" in record]
    assert [(record["step"], record["split"]) for record in found] == [
        (0, "evaluation"), (2, "evaluation"), (2, "evaluation_full_precision"), (4, "evaluation")
    ]  # fmt: skip
    own, full = found[1]["metrics"], found[2]["metrics"]
    assert set(full) == {"loss", "perplexity", "loss_difference"}
    assert 0 < abs(full["loss_difference"]) < 0.05 and full["loss_difference"] == pytest.approx(own["loss"] - full["loss"], abs=1e-9)
    shown = f"at full precision: loss {full['loss']:.4f}, perplexity {full['perplexity']:.4f}; the loss in bf16 is {abs(full['loss_difference']):.5f}"
    assert shown in text.replace("\n", " ")
    assert json.loads((checkpoint_of(work.run_dir(), 4) / "state.json").read_text())["state"]["evaluations"] == 3
    assert "at full precision: loss" in command("eval", config).text


def test_packed_rows_train_over_two_ranks_and_held_out_rows_stay_alone(work: Workspace, two_ranks: RankPool) -> None:
    changes = {"data.packing": True, "eval.at_start": True, "train.max_steps": 4}
    alone = train(work.config("llama", "alone", **changes))
    rows = int(re.search(r"(\d+) rows packed into (\d+) of up to 32 tokens", alone.replace("\n", " ")).group(2))  # type: ignore[union-attr]
    assert rows < TRAIN_ROWS
    said = two_ranks.run(TRAIN_CASE, {"config": str(work.config("llama", "split", **PIPELINE, **changes))})[0]
    assert any(f"({EVALUATION_ROWS} rows)" in line for line in said)
    assert largest_difference(work.run_dir("split"), work.run_dir("alone")) <= ACROSS_LAYOUTS
    with pytest.raises(CheckpointError, match=r"data\.packing was True and is False"):
        trainer = build_local(work.config("llama", "alone", **{**changes, "data.packing": False}))
        trainer.resume(checkpoint_of(work.run_dir("alone"), 4))


def test_the_loss_falls(work: Workspace) -> None:
    train(work.config("llama", **{"optimizer.lr": 0.02, "train.max_steps": 15}))
    losses = [record["loss"] for record in updates(work.run_dir()).values()]
    assert losses[-1] < losses[0] - 0.5


def test_a_model_that_cannot_be_split_is_trained_whole(work: Workspace) -> None:
    """albert runs one set of layers many times."""
    folder = make_model(work.folder / "model", "albert", task="sequence_classification")
    train(work.config(**{"model.path": str(folder), "train.max_steps": 2}))
    assert len(updates(work.run_dir())) == 2 and (work.run_dir() / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize(("epochs", "total"), [(1.0, 5), (1.1, 6), (2.2, 11), (0.4, 2), (3, 15)])
def test_a_part_of_an_epoch_is_rounded_up_to_whole_updates(work: Workspace, epochs: float, total: int) -> None:
    trainer = build_local(work.config("llama", train={"max_steps": None, "epochs": epochs}))
    assert trainer.total_updates == total


def test_plan_writes_the_plan_and_starts_nothing(work: Workspace) -> None:
    outcome = command("plan", work.config(**PIPELINE))
    assert outcome.code == 0 and "embed, 0-1" in outcome.text and "2-3, head" in outcome.text
    assert [path.name for path in work.run_dir().iterdir()] == ["plan.json"]


def prediction_of(outcome: Outcome, work: Workspace) -> dict[str, Any] | None:
    """What the plan that was written says of the step."""
    assert outcome.code == 0, outcome.text
    return json.loads((work.run_dir() / "plan.json").read_text())["prediction"]


def test_a_plan_with_a_picture_for_cards_that_are_not_here(work: Workspace) -> None:
    changes = {**PIPELINE, "partition.rule": "time", "hardware": [{"gpu": "rtx3090"}, {"gpu": "gtx1080ti", "memory_gib": 10.5}]}
    picture = work.folder / "plan.png"
    outcome = command("plan", work.config(**changes), "--picture", picture)
    assert outcome.code == 0, outcome.text
    assert picture.read_bytes().startswith(b"\x89PNG") and f"drawn into {picture}" in outcome.text.replace("\n", "")
    prediction = prediction_of(outcome, work)
    assert prediction is not None and prediction["source"] == "cards' figures" and prediction["step_seconds"] > 0


def test_calibrated_once_every_later_plan_uses_the_measured_times(work: Workspace) -> None:
    """Two processes of the command's own measure; the plan after it reads what they wrote."""
    config = work.config(**PIPELINE)
    assert prediction_of(command("plan", config), work) is None
    measured = finish(start("plan", config, "--calibrate"), seconds=240)
    assert measured.code == 0 and "measuring on 2 process(es)" in measured.text, measured.text
    assert len(json.loads((work.run_dir() / "calibration.json").read_text())["ranks"]) == 2
    later = prediction_of(command("plan", config), work)
    assert later is not None and later["source"] == "measured" and later["step_seconds"] > 0


def test_calibration_and_cards_that_are_not_here_exclude_each_other(work: Workspace) -> None:
    outcome = command("plan", work.config(hardware=[{"gpu": "rtx3090"}]), "--calibrate")
    assert outcome.code == 2 and "hardware: names the cards of the plan" in outcome.text


def test_split_and_whole_runs_have_the_same_numbers(work: Workspace, two_ranks: RankPool) -> None:
    train(work.config("mixtral", name="whole", **{"eval.every_steps": 3}))
    two_ranks.run(TRAIN_CASE, {"config": str(work.config("mixtral", name="split", **PIPELINE, **{"eval.every_steps": 3}))})
    assert largest_difference(work.run_dir("split"), work.run_dir("whole")) <= ACROSS_LAYOUTS


def test_a_run_without_a_checkpoint_says_so(work: Workspace) -> None:
    text = train(work.config("llama", **{"checkpoint.save_final": False, "train.max_steps": 1}))
    assert "nothing is exported" in text and "checkpoint.save_final" in text
    assert not (work.run_dir() / "export").exists() and not (work.run_dir() / "checkpoints").exists()


class Poisoned:
    """Gives one update (or all from there on) a gradient that is not finite."""

    def __init__(self, trainer: Any, steps: Callable[[int], bool]) -> None:
        parameter = next(iter(trainer.strategy.named_parameters().values()))
        parameter.register_hook(lambda gradient: gradient * float("nan") if steps(trainer.state.step) else gradient)


def test_skipped_updates_do_not_advance_the_schedule(work: Workspace) -> None:
    trainer = build_local(work.config("llama", **{"train": {"max_steps": 6, "warmup_steps": 0}, "eval.at_start": False}))
    trainer.tracker._enabled = True
    Poisoned(trainer, lambda step: step in (1, 2))
    trainer.fit()
    found = updates(work.run_dir())
    assert [record["skipped"] for record in found.values()] == [False, True, True, False, False, False]
    applied = [0, 1, 1, 1, 2, 3]
    assert [record["lr"] for record in found.values()] == pytest.approx([1e-3 * (1 - done / 6) for done in applied])
    assert trainer.state.applied_updates == 4


def test_gradients_that_stay_infinite_end_the_run_and_keep_the_last_good_checkpoint(work: Workspace) -> None:
    changes = {"train": {"max_steps": 20, "max_skipped_updates": 3}, "checkpoint.every_steps": 2}
    trainer = build_local(work.config("llama", **changes))
    Poisoned(trainer, lambda step: step >= 5)
    with pytest.raises(NotFinite, match="4 updates in a row"):
        trainer.fit()
    newest = max(step_folders(work.run_dir()))
    state = json.loads((checkpoint_of(work.run_dir(), newest) / "state.json").read_text())["state"]
    assert state["applied_updates"] <= 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_saves_and_stops(work: Workspace, number: signal.Signals) -> None:
    trainer = build_local(work.config("llama"))
    raised: list[int] = []

    def hook(gradient: Any) -> None:
        if trainer.state.step == 3 and not raised:
            raised.append(number)
            signal.raise_signal(number)

    next(iter(trainer.strategy.named_parameters().values())).register_hook(hook)
    before = signal.signal(number, signal.SIG_DFL)  # a test run under nohup ignores SIGHUP
    with pytest.raises(Stopped):
        trainer.fit()
    assert step_folders(work.run_dir()) == [4]  # the update in which it came
    assert signal.signal(number, before) == signal.SIG_DFL


def test_the_launcher_waits_for_a_checkpoint_as_long_as_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda config, entry: lambda *arguments: configs.append(config))
    start_processes(2, ["train", "run.yaml"], DistConfig(timeout_seconds=900.0), print)
    assert configs[0].shutdown_timeout == 900


# --- real processes ---------------------------------------------------------------------------------------------------------------

LONG = {"train.max_steps": 80, "eval.at_start": False, "checkpoint": {"every_steps": 5, "keep": 3}}


def wait_for_update(run_dir: Path, step: int, process: subprocess.Popen[str], seconds: float = 60.0) -> None:
    """Until metrics.jsonl holds the update."""
    end = time.monotonic() + seconds
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < end and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b'"loss"') >= step:
            return
        time.sleep(0.02)
    outcome = finish(process, 0.1) if process.poll() is not None else None
    raise AssertionError(f"update {step} not reached: {outcome}")


def rank_processes(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that the launcher has started, in the order of their ranks."""
    ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(process.pid).children() if "RANK" in child.environ()}
    return [ranks[rank] for rank in sorted(ranks)]


@pytest.fixture(scope="module")
def uninterrupted(material: Workspace, tmp_path_factory: pytest.TempPathFactory, two_ranks: RankPool) -> Path:
    work = Workspace(material.models, material.data, tmp_path_factory.mktemp("uninterrupted"))
    two_ranks.run(TRAIN_CASE, {"config": str(work.config("gpt2", **PIPELINE, **LONG))})
    return work.run_dir()


def to_launcher(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)


def to_group(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C in a terminal does."""
    os.killpg(process.pid, signal.SIGINT)


def to_rank_1(process: subprocess.Popen[str]) -> None:
    rank_processes(process)[1].terminate()


def kill_ranks(process: subprocess.Popen[str]) -> None:
    for rank in rank_processes(process):
        rank.kill()


def kill_launcher(process: subprocess.Popen[str]) -> None:
    """The ranks must not train on without it: they save and stop."""
    ranks = rank_processes(process)
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    for rank in alive:
        rank.kill()
    assert not alive, "ranks train on although their launcher was killed"


STOPS: dict[str, tuple[Callable[[subprocess.Popen[str]], None], str]] = {
    "SIGTERM to the launcher": (to_launcher, "the state is saved"),
    "SIGTERM to one rank": (to_rank_1, "the state is saved"),
    "Ctrl-C": (to_group, "the state is saved"),
    "SIGKILL of the ranks": (kill_ranks, "killed (signal 9)"),
    "SIGKILL of the launcher": (kill_launcher, "the state is saved"),
}
IN_DEFAULT_TIER = ("SIGTERM to the launcher",)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in IN_DEFAULT_TIER else pytest.mark.slow) for name in STOPS])
def test_a_stopped_run_goes_on_as_if_nothing_had_been(work: Workspace, uninterrupted: Path, two_ranks: RankPool, name: str) -> None:
    stop, said = STOPS[name]
    config = work.config("gpt2", **PIPELINE, **LONG)
    process = start("train", config)
    wait_for_update(work.run_dir(), 12, process)
    stop(process)
    outcome = finish(process, 45)
    assert outcome.code == (-9 if stop is kill_launcher else 1), outcome.text
    assert said in outcome.text
    if said == "the state is saved":
        assert outcome.text.count(said) == 1 and "Traceback" not in outcome.text
    assert list(updates_so_far(work.run_dir()))[-1] < LONG["train.max_steps"], "the run was over before it was stopped"
    two_ranks.run(TRAIN_CASE, {"config": str(config)})
    assert largest_difference(work.run_dir(), uninterrupted) <= EXACT
    assert len(step_folders(work.run_dir())) <= 4


def updates_so_far(run_dir: Path) -> Iterator[int]:
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        if '"loss": ' in line and line.endswith("}"):
            yield json.loads(line)["step"]


def test_the_command_and_torchrun_are_the_same_run(work: Workspace) -> None:
    """Also: a port that is in use is not taken, and the ranks end with exit code 0."""
    changes = {**PIPELINE, "train.max_steps": 3}
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        ended: dict[str, Outcome] = {"command": finish(start("train", work.config(name="command", **changes, **{"dist.port": port})))}
    torchrun = ("torch.distributed.run", "--nproc_per_node", 2, "-m", "mpfinetune", "train", work.config(name="torchrun", **changes))
    ended["torchrun"] = finish(start(*torchrun, module=False))
    assert f"dist.port: {port} is in use" in ended["command"].text
    for name, outcome in ended.items():
        assert outcome.code == 0, outcome.text
        assert outcome.text.count("plan: pipeline") == 1 and outcome.text.count("exported") == 1, outcome.text
        assert yaml.safe_load((work.run_dir(name) / "config.yaml").read_text())["strategy"] == "pipeline"
    assert largest_difference(work.run_dir("command"), work.run_dir("torchrun")) <= EXACT


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_within_seconds(work: Workspace) -> None:
    process = start("train", work.config("gpt2", **PIPELINE, **LONG))
    wait_for_update(work.run_dir(), 3, process)
    rank_processes(process)[1].kill()
    outcome = finish(process, 30)
    assert outcome.code == 1 and "rank 1 was killed (signal 9)" in outcome.text, outcome.text
    assert "the plan expected host memory: " in outcome.text, outcome.text


@pytest.mark.slow
def test_two_runs_side_by_side_do_not_meet(work: Workspace) -> None:
    processes = [start("train", work.config(name=name, **PIPELINE, **{"train.max_steps": 2})) for name in ("one", "two")]
    for outcome in [finish(process, 120) for process in processes]:
        assert outcome.code == 0, outcome.text
    assert largest_difference(work.run_dir("one"), work.run_dir("two")) <= EXACT
