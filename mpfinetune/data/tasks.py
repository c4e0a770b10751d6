"""What each task reads, how a row of it becomes tokens and labels, and how it is scored. A new GLUE task is one more row of GLUE_TASKS."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpfinetune.config import DataConfig, RunConfig
from mpfinetune.data import sources
from mpfinetune.data.causal_lm import load_causal_lm
from mpfinetune.data.rows import Row, Say, encode, say_cut
from mpfinetune.data.sources import BadLine, Table
from mpfinetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["GLUE_TASKS", "GlueTask", "LoadedData", "Row", "choose_pad_token", "load_rows"]

GLUE_HUB_NAME = "nyu-mll/glue"


@dataclass(frozen=True)
class GlueTask:
    """Columns, labels and scores of one task. ``label_names[i]`` is the name of class i; without names, files hold the numbers."""

    num_labels: int  # 1: a score, trained as regression
    text_columns: tuple[str, ...]  # one or two, in the TSV files
    label_column: str
    hub_text_columns: tuple[str, ...]
    metrics: tuple[str, ...]  # named as the evaluate library names them
    best_metric: str  # the one that decides which checkpoint is best; higher is better
    positional_columns: tuple[str, ...] | None = None  # names by position: the files have no header
    label_names: tuple[str, ...] = ()
    train_file: str = "train.tsv"
    dev_file: str = "dev.tsv"
    hub_label_column: str = "label"

    @property
    def has_header(self) -> bool:
        return self.positional_columns is None

    @property
    def regression(self) -> bool:
        return self.num_labels == 1


GLUE_TASKS: dict[str, GlueTask] = {
    "mrpc": GlueTask(2, ("#1 String", "#2 String"), "Quality", ("sentence1", "sentence2"), ("accuracy", "f1"), "f1"),
    "sst2": GlueTask(2, ("sentence",), "label", ("sentence",), ("accuracy",), "accuracy"),
    "cola": GlueTask(
        2,
        ("sentence",),
        "label",
        ("sentence",),
        ("matthews_correlation",),
        "matthews_correlation",
        positional_columns=("source", "label", "original_mark", "sentence"),
    ),
    "rte": GlueTask(
        2,
        ("sentence1", "sentence2"),
        "label",
        ("sentence1", "sentence2"),
        ("accuracy",),
        "accuracy",
        label_names=("entailment", "not_entailment"),  # the hub's order: 0 = entailment
    ),
    "stsb": GlueTask(1, ("sentence1", "sentence2"), "score", ("sentence1", "sentence2"), ("pearson", "spearmanr"), "pearson"),
}


@dataclass(frozen=True)
class LoadedData:
    """Tokenised rows in file order; ``evaluation`` is empty where none was asked for."""

    train: list[Row]
    evaluation: list[Row]
    metric_names: tuple[str, ...]  # empty for causal_lm: loss and perplexity come from the loop
    best_metric: str
    regression: bool = False

    @property
    def lower_is_better(self) -> bool:
        """Whether a smaller ``best_metric`` is the better one."""
        return self.best_metric == "loss"


def load_rows(config: RunConfig, tokenizer: PreTrainedTokenizerFast, num_labels: int, max_positions: int | None, say: Say) -> LoadedData:
    """Read, check and tokenise what ``config.data`` names; the same on every rank.

    Args:
        num_labels: size of the model's head; 1 is regression; unused for causal_lm.
        max_positions: tokens that the model has positions for; None: no limit known.
        say: called with one line for each thing the user should know (rows cut, rows dropped).

    Raises:
        DataError: the data is missing, malformed, empty, or does not fit the head or the model.
    """
    data = config.data
    if max_positions is not None and data.max_length > max_positions:
        raise DataError(f"data.max_length: {data.max_length} given, must be at most {max_positions}, the number of positions of {config.model.path}")
    if config.model.task == "causal_lm":
        train, evaluation = load_causal_lm(data, tokenizer, config.train.seed, say)
        return LoadedData(train, evaluation, (), "loss")
    assert data.task is not None  # config rule
    task = GLUE_TASKS[data.task]
    if task.regression and num_labels != 1:
        raise DataError(f"model.num_labels: {num_labels} given, must be 1: data.task: {data.task} predicts a score (regression)")
    train = _glue_rows(data, False, tokenizer, num_labels, say)
    evaluation = _glue_rows(data, True, tokenizer, num_labels, say)
    return LoadedData(train, evaluation, task.metrics, task.best_metric, task.regression)


def choose_pad_token(tokenizer: PreTrainedTokenizerFast, say: Say) -> int:
    """The id that fills short rows: the pad token, else EOS, else 0. The vocabulary is never resized.

    The attention mask and the labels tell padding from text, never the id; so a real EOS stays a target where EOS pads.
    """
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    why = "the mask, not the id, says what is padding"
    if tokenizer.eos_token_id is not None:
        say(f"the tokenizer has no pad token: padding with EOS ({tokenizer.eos_token!r}); real EOS targets stay targets: {why}")
        return int(tokenizer.eos_token_id)
    say(f"the tokenizer has neither a pad token nor an EOS token: padding with id 0; {why}")
    return 0


# --- GLUE -------------------------------------------------------------------------------------------------------------------------


def _glue_rows(data: DataConfig, evaluation: bool, tokenizer: PreTrainedTokenizerFast, num_labels: int, say: Say) -> list[Row]:
    assert data.task is not None
    table, text_columns, label_column, key = _glue_table(data, GLUE_TASKS[data.task], evaluation)
    sources.check_fields(table, dict.fromkeys(text_columns, str))
    records = table.records[: data.eval_rows if evaluation else data.train_rows]
    table = Table(table.name, table.columns, records, counted=table.counted)
    labels = _labels(table, label_column, data.task, num_labels, key)
    texts: list[Any] = [record.values[text_columns[0]] for record in records]
    if len(text_columns) == 2:
        texts = [(record.values[text_columns[0]], record.values[text_columns[1]]) for record in records]
    encoded = _encode_cut(tokenizer, texts, data.max_length, table.name, say)
    return [Row(values["input_ids"], label, values.get("token_type_ids")) for values, label in zip(encoded, labels, strict=True)]


def _glue_table(data: DataConfig, task: GlueTask, evaluation: bool) -> tuple[Table, tuple[str, ...], str, str]:
    """The table of one split, its text columns, its label column, and the config key that named it."""
    key, path = "data.path", data.path
    if evaluation and data.eval_path is not None:
        key, path = "data.eval_path", data.eval_path
    local = None if path is None else sources.find_local(path, key)
    if local is None:
        table = sources.read_hub(path or GLUE_HUB_NAME, data.task, ("validation",) if evaluation else ("train",), key)
        sources.require_columns(table.name, table.columns, (*task.hub_text_columns, task.hub_label_column), key)
        return table, task.hub_text_columns, task.hub_label_column, key
    file = _glue_file(local, task, evaluation, key)
    table = sources.read_tsv(file, (*task.text_columns, task.label_column), key, task.positional_columns)
    return table, task.text_columns, task.label_column, key


def _glue_file(local: Path, task: GlueTask, evaluation: bool, key: str) -> Path:
    if local.is_dir():
        return local / (task.dev_file if evaluation else task.train_file)
    if key == "data.path":
        raise DataError(f"data.path: '{local}' is a file; for a GLUE task it must be the folder with {task.train_file} and {task.dev_file}")
    return local


def _encode_cut(tokenizer: PreTrainedTokenizerFast, texts: list[Any], max_length: int, name: str, say: Say) -> list[dict[str, list[int]]]:
    """Tokenise with special tokens; rows over max_length are tokenised again with truncation, so that they are known and counted."""
    specials = tokenizer.num_special_tokens_to_add(pair=isinstance(texts[0], tuple))
    if max_length <= specials:
        raise DataError(f"data.max_length: {max_length} given, must be more than the tokenizer's {specials} special tokens per row")
    encoded = encode(tokenizer, texts)
    long = [index for index, values in enumerate(encoded) if len(values["input_ids"]) > max_length]
    shortened = encode(tokenizer, [texts[index] for index in long], truncation="longest_first", max_length=max_length)
    for index, values in zip(long, shortened, strict=True):
        encoded[index] = values
    say_cut(say, name, len(long), len(texts), max_length)
    return encoded


# --- labels -----------------------------------------------------------------------------------------------------------------------


def _labels(table: Table, column: str, task_name: str, num_labels: int, key: str) -> list[int] | list[float]:
    """The labels of all rows, checked against the head before anything is trained.

    Raises:
        DataError: unreadable labels (every line), scores where classes are wanted, labels outside the head, unlabelled test rows.
    """
    task = GLUE_TASKS[task_name]
    scores: list[float] = []
    bad: list[BadLine] = []
    for record in table.records:
        score = _as_number(record.values.get(column), task.label_names)
        if math.isfinite(score):
            scores.append(score)
        else:
            wanted = "a number" if task.regression else f"one of {', '.join(task.label_names or map(str, range(task.num_labels)))}"
            bad.append(BadLine(record.line, f"label {record.values.get(column)!r} in column '{column}', must be {wanted}"))
    table.raise_bad(bad)
    if all(score == -1 for score in scores):
        raise DataError(f"{table.name}: every label is -1: a test set without labels; {key} must name data with labels")
    if task.regression:
        return scores
    _check_classes(table, scores, task_name, num_labels)
    return [int(score) for score in scores]


def _as_number(value: Any, names: tuple[str, ...]) -> float:
    """A label as a number, NaN where it is none."""
    if value in names:
        return float(names.index(value))
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _check_classes(table: Table, scores: list[float], task_name: str, num_labels: int) -> None:
    place = {score: table.place(record.line) for record, score in zip(reversed(table.records), reversed(scores), strict=True)}
    fractions = sorted(score for score in place if score != int(score))
    if fractions:
        raise DataError(
            f"{place[fractions[0]]}: label {fractions[0]} is a score, but data.task: {task_name} has a classification head "
            f"(model.num_labels: {num_labels}); for scores set data.task: stsb"
        )
    outside = sorted(score for score in place if not 0 <= score < num_labels)
    if outside:
        found = ", ".join(str(int(score)) for score in sorted(place)[: sources.MAX_LISTED])
        hint = "-1 marks rows without a label; remove them" if outside == [-1] else "set model.num_labels, or check data.task and data.path"
        raise DataError(
            f"{place[outside[0]]}: label {int(outside[0])} is outside the head: labels found {{{found}}}, "
            f"model.num_labels is {num_labels}, so they must be 0 to {num_labels - 1}; {hint}"
        )
