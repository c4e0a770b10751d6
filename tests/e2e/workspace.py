"""What the end-to-end tests share: tiny real models, data files, configs, and the command line run inside this process or beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml

from tests.families import CAUSAL_LM, task_of, tiny_config
from tests.threads import one_thread
from tests.unit.test_tasks import word_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
TRAIN_ROWS, EVALUATION_ROWS = 18, 7  # at 4 rows per update: 5 updates per epoch, the last with 2 rows
UPDATES_PER_EPOCH = 5
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "MPFINETUNE_STARTED_RANKS", "OMP_NUM_THREADS")


# --- models -----------------------------------------------------------------------------------------------------------------------


def encoder_tokenizer() -> Any:
    """One token per letter, [CLS] and [SEP] around, segment ids for pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names)


def make_model(folder: Path, family: str, task: str | None = None, **changes: Any) -> Path:
    """A tiny random model of the family with its tokenizer, written as transformers writes it."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    task = task or task_of(family)
    config = tiny_config(family, **changes)
    torch.manual_seed(11)
    model = (AutoModelForCausalLM if task == "causal_lm" else AutoModelForSequenceClassification).from_config(config)
    model.save_pretrained(folder)
    (word_tokenizer() if family in CAUSAL_LM else encoder_tokenizer()).save_pretrained(folder)
    return folder


# --- data -------------------------------------------------------------------------------------------------------------------------


def _sentence(number: int, length: int) -> str:
    return " ".join(LETTERS[(number * 7 + place * (1 + number % 3)) % 26] for place in range(length))


def mrpc_row(number: int, label: object | None = None) -> str:
    shown = number % 2 if label is None else label
    return f"{shown}\t{number}\t{number}\t{_sentence(number, 2 + number % 6)}\t{_sentence(number + number % 2, 3 + number % 4)}"


def make_mrpc(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, numbers in (("train.tsv", range(TRAIN_ROWS)), ("dev.tsv", range(100, 100 + EVALUATION_ROWS))):
        (folder / name).write_text("\n".join([MRPC_HEADER, *map(mrpc_row, numbers)]) + "\n", encoding="utf-8")
    return folder


def make_texts(path: Path, numbers: Iterable[int]) -> Path:
    path.write_text("".join(json.dumps({"text": _sentence(number, 4 + number % 9)}) + "\n" for number in numbers), encoding="utf-8")
    return path


# --- configs ----------------------------------------------------------------------------------------------------------------------


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``changes`` over ``base``, section by section; keys of ``changes`` may be dotted. Neither is changed."""
    result = {key: dict(value) if isinstance(value, Mapping) else value for key, value in base.items()}
    for dotted, value in changes.items():
        section, _, key = dotted.partition(".")
        if key:
            result[section] = {**result.get(section, {}), key: value}
        else:
            result[section] = merged(result[section], value) if isinstance(value, Mapping) and isinstance(result.get(section), dict) else value
    return result


@dataclass(frozen=True)
class Workspace:
    """A folder per test with what all tests read (models, data) and what this one writes (configs, runs)."""

    models: dict[str, Path]
    data: dict[str, Path]
    folder: Path

    def config(self, kind: str = "bert", name: str = "run", **changes: Any) -> Path:
        """Write a YAML file for a local run of ``kind`` whose run_dir is ``name``; see ``merged`` for ``changes`` (use ** for dotted keys)."""
        content = merged(self.content(kind, name), changes)
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def content(self, kind: str, name: str) -> dict[str, Any]:
        causal = kind != "bert"
        data: dict[str, Any] = {"task": "mrpc", "path": str(self.data["mrpc"])}
        if causal:
            data = {"path": str(self.data["texts"]), "eval_path": str(self.data["held_out"])}
        return {
            "model": {"path": str(self.models[kind]), "task": "causal_lm" if causal else "sequence_classification"},
            "data": {**data, "max_length": 32},
            "strategy": "local",
            "batch": {"global_size": 4, "micro_size": 2},
            "optimizer": {"lr": 1e-3, "eps": 1e-6},
            "train": {"max_steps": 8, "warmup_steps": 2},
            "device": "cpu",
            "run_dir": str(self.run_dir(name)),
        }

    def run_dir(self, name: str = "run") -> Path:
        return self.folder / name


PIPELINE: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 2}}


# --- the command line -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code and everything it printed."""

    code: int
    text: str


def command(*arguments: object, environment: Mapping[str, str] | None = None) -> Outcome:
    """``mpfinetune ARGUMENTS`` in this process: the same code as the command line, without its start."""
    from typer.testing import CliRunner

    from mpfinetune.cli import app

    cleared = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    with (
        mock.patch.dict(os.environ, {**cleared, **(environment or {})}, clear=True),
        mock.patch.object(os, "_exit", _leave),
        mock.patch("mpfinetune.cli._SILENT_RANK_SECONDS", 0.0),
        one_thread(),
    ):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.output)


def _leave(code: int) -> None:
    raise SystemExit(code)


def train(config: Path, *overrides: str) -> str:
    """A local run in this process that must end well; returns what it printed."""
    outcome = command("train", config, *overrides)
    assert outcome.code == 0, outcome.text
    return outcome.text


def start(*arguments: object, module: bool = True, **environment: str) -> subprocess.Popen[str]:
    """A command of its own, in a session of its own, with stdout and stderr in one pipe."""
    cleared = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-m", *(["mpfinetune"] if module else []), *map(str, arguments)],
        cwd=REPOSITORY,
        env={**cleared, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 90.0) -> Outcome:
    """Wait for a started command; one that does not end in time is killed and fails the test."""
    try:
        text, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        text, _ = process.communicate()
        raise AssertionError(f"still running after {seconds:.0f} s:\n{text[-3000:]}") from None
    return Outcome(process.returncode, text)


# --- what a run leaves ------------------------------------------------------------------------------------------------------------


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def updates(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The updates by step; each step must be there once, in order."""
    found = [record for record in records(run_dir) if "loss" in record]
    steps = [record["step"] for record in found]
    assert steps == list(range(1, len(steps) + 1)), f"steps in metrics.jsonl: {steps}"
    return {record["step"]: record for record in found}


def evaluations(run_dir: Path) -> dict[int, dict[str, float]]:
    found = [record for record in records(run_dir) if "metrics" in record]
    assert len({record["step"] for record in found}) == len(found), "an evaluation is there twice"
    return {record["step"]: record["metrics"] for record in found}


def largest_difference(run_dir: Path, reference: Path, keys: tuple[str, ...] = ("loss", "grad_norm", "lr")) -> float:
    """Over all updates of two runs, which must have as many, and the losses of their evaluations."""
    ours, theirs = updates(run_dir), updates(reference)
    assert list(ours) == list(theirs)
    differences = [abs(ours[step][key] - theirs[step][key]) for step in ours for key in keys]
    assert all(ours[step]["tokens"] == theirs[step]["tokens"] for step in ours)
    scores, reference_scores = evaluations(run_dir), evaluations(reference)
    differences += [abs(scores[step]["loss"] - reference_scores[step]["loss"]) for step in scores if step in reference_scores]
    return max(differences)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def step_folders(run_dir: Path) -> list[int]:
    """The steps of the checkpoints; anything else in their folder fails the test."""
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert all(name.startswith("step-") and name[5:].isdigit() for name in names), names
    return [int(name[5:]) for name in names]


def checkpoint_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"
