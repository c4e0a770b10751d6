"""Reading a config: every mistake at once, in words that name the path, the value, the rule and the nearest name."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest

from mpfinetune.config import RULES, RunConfig, check_rules, config_from_dict, config_hints, config_paths, load_config
from mpfinetune.config_checks import paths_read
from mpfinetune.config_files import save_config
from mpfinetune.config_values import convert, type_in_words
from mpfinetune.errors import ConfigError, UserError

GLUE: dict[str, Any] = {"model": {"path": "models/tiny"}, "data": {"task": "mrpc"}, "run_dir": "runs/x"}
CAUSAL: dict[str, Any] = {"model": {"path": "models/tiny", "task": "causal_lm"}, "data": {"path": "rows.jsonl"}, "run_dir": "runs/x"}


def with_values(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``base`` with the values of some dotted paths replaced."""
    given = copy.deepcopy(base)
    for path, value in values.items():
        *sections, leaf = path.split(".")
        target = given
        for name in sections:
            target = target.setdefault(name, {})
        target[leaf] = value
    return given


def problems_of(given: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(given)
    return caught.value.problems


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- valid configs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [GLUE, CAUSAL], ids=["glue", "causal_lm"])
def test_small_config_resolves_with_defaults(given: dict[str, Any]) -> None:
    config = config_from_dict(given)
    assert isinstance(config, RunConfig)
    assert config.optimizer.lr == 2e-5 and config.batch.global_size == 16 and config.train.clip_norm == 1.0
    assert check_rules(config) == []


def test_one_word_stands_for_the_section_of_offload(tmp_path: Path) -> None:
    assert config_from_dict({**GLUE, "offload": "auto"}).offload.optimizer == "auto"
    path = write(tmp_path / "c.yaml", "model: {path: m}\ndata: {task: mrpc}\nrun_dir: r\noffload: {optimizer: cpu}\n")
    assert load_config(path, ["offload=auto"]).offload.optimizer == "auto"
    (problem,) = problems_of({**GLUE, "offload": "cuda"})
    assert problem == "offload: 'cuda' given, but this is a section with the keys optimizer, gradients, parameters, nvme_path"


def test_checking_changes_nothing() -> None:
    given = with_values(GLUE, {"model.overrides": {"hidden_dropout_prob": 0.0}, "partition.stages": ["embed, 0-2", "3-5, head"]})
    before = copy.deepcopy(given)
    config = config_from_dict(given)
    config.model.overrides["x"] = 1
    config.partition.stages.append("more")
    assert given == before
    assert config_from_dict(given).partition.stages == before["partition"]["stages"]


def test_two_configs_share_no_default() -> None:
    first, second = config_from_dict(GLUE), config_from_dict(GLUE)
    first.optimizer.betas[0] = 0.5
    first.model.overrides["x"] = 1
    assert second.optimizer.betas == [0.9, 0.999] and second.model.overrides == {}


@pytest.mark.parametrize("text", ["2e-5", '"2e-5"', "2.0e-5", "0.00002", "'0.00002'"])
def test_spellings_of_a_number_in_yaml_are_equal(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "c.yaml", f"model: {{path: m}}\ndata: {{task: mrpc}}\nrun_dir: r\noptimizer: {{lr: {text}}}\n")
    assert load_config(path).optimizer.lr == 2e-5


@pytest.mark.parametrize("text", ["2e-5", '"2e-5"', "2.0e-5", "0.00002"])
def test_spellings_of_a_number_as_override_are_equal(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "c.yaml", "model: {path: m}\ndata: {task: mrpc}\nrun_dir: r\noptimizer: {lr: 1}\n")
    lr = load_config(path, [f"optimizer.lr={text}"]).optimizer.lr
    assert lr == 2e-5 and isinstance(lr, float)


def test_whole_numbers_and_floats_have_their_types() -> None:
    config = config_from_dict(with_values(GLUE, {"train.epochs": 1, "train.max_steps": "12", "batch.global_size": 64.0, "train.clip_norm": None}))
    assert isinstance(config.train.epochs, float) and config.train.max_steps == 12 and config.train.clip_norm is None
    assert isinstance(config.batch.global_size, int)


def test_path_object_and_numeric_folder_become_text(tmp_path: Path) -> None:
    config = config_from_dict(with_values(GLUE, {"run_dir": tmp_path, "model.path": 2024}))
    assert config.run_dir == str(tmp_path) and config.model.path == "2024"


# --- wrong values -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("optimizer.lr", "fast", "'fast' given, must be a finite number"),
        ("optimizer.lr", True, "True given, must be a finite number"),
        ("optimizer.lr", None, "None given, must be a finite number"),
        ("optimizer.lr", float("nan"), "nan given, must be a finite number"),
        ("optimizer.lr", "inf", "'inf' given, must be a finite number"),
        ("optimizer.lr", [1.0], "[1.0] given, must be a finite number"),
        ("train.clip_norm", "none", "'none' given, must be a finite number or null"),
        ("batch.global_size", 3.7, "3.7 given, must be a whole number"),
        ("batch.global_size", "3.7", "'3.7' given, must be a whole number"),
        ("batch.global_size", True, "True given, must be a whole number"),
        ("batch.global_size", float("inf"), "inf given, must be a whole number"),
        ("train.max_steps", False, "False given, must be a whole number or null"),
        ("data.chat", 1, "1 given, must be true or false"),
        ("data.chat", "yes please", "'yes please' given, must be true or false"),
        ("run_dir", False, "False given, must be text"),
        ("run_dir", None, "None given, must be text"),
        ("run_dir", ["runs"], "['runs'] given, must be text"),
        ("checkpoint.resume", False, "False given, must be text"),
        ("schedule", "1F1B", "'1F1B' given, must be one of gpipe, 1f1b, interleaved_1f1b, interleaved_zero_bubble, zbv"),
        ("model.task", 3, "3 given, must be one of sequence_classification, causal_lm"),
        ("optimizer.betas", 0.9, "0.9 given, must be a list of numbers"),
        ("optimizer.betas", [0.9, "x"], "[0.9, 'x'] given, must be a list of numbers"),
        ("partition.stages", "embed, 0-2", "'embed, 0-2' given, must be a list"),
        ("partition.device_map", {"model.layers.0": "cuda:0"}, "{'model.layers.0': 'cuda:0'} given, must be a mapping of text to whole numbers"),
        ("data.columns", ["text"], "['text'] given, must be a mapping of text to text"),
        ("model.overrides", "dropout=0", "'dropout=0' given, must be a mapping of text to values"),
    ],
)
def test_wrong_type_names_path_value_and_what_is_allowed(path: str, value: Any, words: str) -> None:
    line = next(line for line in problems_of(with_values(GLUE, {path: value})) if line.startswith(f"{path}:"))
    assert line.startswith(f"{path}: {words}")


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("optimizer.lrr", "optimizer.lrr: unknown key (did you mean 'lr'?)"),
        ("optimiser", "optimiser: unknown key (did you mean 'optimizer'?)"),
        ("lr", "lr: unknown key (did you mean 'optimizer.lr'?)"),
        ("optimizer.epochs", "optimizer.epochs: unknown key (did you mean 'train.epochs'?)"),
        ("train.every_steps", "train.every_steps: unknown key (did you mean 'eval.every_steps' or 'checkpoint.every_steps'?)"),
        ("dist.qqq", "dist.qqq: unknown key; valid here: timeout_seconds, port"),
    ],
)
def test_unknown_key_names_the_nearest(path: str, line: str) -> None:
    assert line in problems_of(with_values(GLUE, {path: 1}))


def test_dotted_key_in_yaml_is_explained() -> None:
    given = {**GLUE, "train.epochs": 1}
    assert problems_of(given) == ["train.epochs: unknown key (a dotted path is for the command line; in YAML write train: {epochs: ...})"]


@pytest.mark.parametrize("value", [None, 3, "fast", ["lr"]])
def test_section_that_is_not_a_mapping_lists_its_keys(value: Any) -> None:
    line = f"dist: {value!r} given, but this is a section with the keys timeout_seconds, port"
    assert problems_of(with_values(GLUE, {"dist": value})) == [line]


def test_required_keys_are_named() -> None:
    assert problems_of({"data": {"task": "mrpc"}}) == ["model.path: required, but not given", "run_dir: required, but not given"]
    assert "run_dir: required, but not given" in problems_of(with_values(GLUE, {"run_dir": "???"}))


# --- all at once ------------------------------------------------------------------------------------------------------------------


def test_all_problems_are_reported_at_once() -> None:
    given = {
        "model": {"pth": "m"},
        "data": {"task": "mrcp"},
        "batch": {"global_size": "many", "micro_size": 4},
        "optimizer": {"lr": -1.0, "eps": 0},
        "train": 3,
        "run_dir": "r",
    }
    assert problems_of(given) == [
        "model.pth: unknown key (did you mean 'path'?)",
        "data.task: 'mrcp' given, must be one of mrpc, sst2, cola, rte, stsb or null",
        "batch.global_size: 'many' given, must be a whole number",
        "train: 3 given, but this is a section with the keys " + ", ".join(entry.name for entry in dataclasses.fields(RunConfig().train)),
        "model.path: required, but not given",
        "optimizer.lr: -1.0 given, must be greater than 0",
        "optimizer.eps: 0.0 given, must be greater than 0",
    ]


def test_several_rules_are_reported_at_once() -> None:
    lines = problems_of(with_values(GLUE, {"optimizer.lr": 0, "train.epochs": -1, "devices": 0}))
    assert [line.partition(":")[0] for line in lines] == ["optimizer.lr", "train.epochs", "devices"]


@pytest.mark.parametrize(
    "values",
    [
        {"batch.micro_size": 32, "batch.global_size": "sixty"},
        {"batch.micro_size": 32, "batch.globalsize": 64},
        {"batch.micro_size": 32, "train.global_size": 64},
        {"data.path": "rows.jsonl", "data.task": None, "model.tsk": "causal_lm"},
        {"data.path": "rows.jsonl", "data.task": None, "modle": {"task": "causal_lm"}},
    ],
)
def test_rules_stay_silent_where_another_mistake_leaves_a_value_open(values: dict[str, Any]) -> None:
    lines = problems_of(with_values(GLUE, values))
    assert len(lines) == 1 and ("unknown key" in lines[0] or "'sixty' given" in lines[0])


def test_rules_about_defaults_stay_silent_beside_other_mistakes() -> None:
    given: dict[str, Any] = {"model": {"path": "m"}, "run_dir": "r", "epochs": 3}  # data.task is null, which a rule forbids
    assert problems_of(given) == ["epochs: unknown key (did you mean 'train.epochs'?)"]


def test_config_error_is_a_user_error_with_one_line_a_problem() -> None:
    with pytest.raises(UserError) as caught:
        config_from_dict({"data": {"task": "mrpc"}})
    assert str(caught.value) == "model.path: required, but not given\nrun_dir: required, but not given"


# --- rules ------------------------------------------------------------------------------------------------------------------------

MANUAL = {"strategy": "pipeline", "partition.stages": ["embed, 0", "1", "2, head"]}
# (base config, values that break the rule, the whole message). One row for each row of RULES; a test below sees to that.
BROKEN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (GLUE, {"model.num_labels": 0}, "model.num_labels: 0 given, must be at least 1 (1 means regression), or null"),
    (
        CAUSAL,
        {"data.task": "mrpc"},
        "data.task: 'mrpc' given, must be null for model.task: causal_lm: a GLUE task is a classification; set model.task: sequence_classification",
    ),
    (
        GLUE,
        {"data.task": None},
        "data.task: None given, must be one of mrpc, sst2, cola, rte, stsb for model.task: sequence_classification: its rows "
        "are those of a GLUE task; name one, or set model.task: causal_lm and data.path",
    ),
    (
        CAUSAL,
        {"data.path": None},
        "data.path: None given, must be a .jsonl or .txt file for model.task: causal_lm: no text is read by default; name your file",
    ),
    (CAUSAL, {"data.eval_fraction": 1.0}, "data.eval_fraction: 1.0 given, must be in [0, 1)"),
    (
        CAUSAL,
        {"data.eval_fraction": 0.1, "data.eval_path": "held_out.jsonl"},
        "data.eval_fraction: 0.1 given, must be 0 where data.eval_path or a GLUE task gives the held-out rows: there would be "
        "two held-out sets; leave out one of the two",
    ),
    (GLUE, {"data.max_length": 1}, "data.max_length: 1 given, must be at least 2 tokens"),
    (
        GLUE,
        {"data.packing": True},
        "data.packing: True given, must be false for model.task: sequence_classification: a classification head gives one answer per row; "
        "set data.packing: false; data.padding: bucketed saves most of the padding",
    ),
    (GLUE, {"data.pad_to_multiple_of": 0}, "data.pad_to_multiple_of: 0 given, must be at least 1"),
    (GLUE, {"data.train_rows": 0}, "data.train_rows: 0 given, must be at least 1, or null"),
    (GLUE, {"data.eval_rows": 0}, "data.eval_rows: 0 given, must be at least 1, or null"),
    (
        CAUSAL,
        {"data.columns": {"question": "prompt"}},
        "data.columns: {'question': 'prompt'} given, must be a mapping from text, prompt, response or messages to a column's name",
    ),
    (CAUSAL, {"data.prompt_template": "Q:"}, "data.prompt_template: 'Q:' given, must be a text that holds {prompt}"),
    (
        GLUE,
        {"partition.stages": ["embed", "head"], "partition.device_map": {"model": 0}},
        "partition.stages: ['embed', 'head'] given, must be empty where partition.device_map is given: there would be two "
        "maps; leave out one of the two",
    ),
    (
        GLUE,
        {"partition.rule": "manual"},
        "partition.rule: 'manual' given, must be manual only together with partition.stages or partition.device_map: a manual "
        "split is the one that you write; write a map, or set partition.rule: parameters",
    ),
    (
        GLUE,
        {"partition.rule": "uniform", "partition.stages": ["embed", "head"]},
        "partition.rule: 'uniform' given, must be manual (or left out) where partition.stages or partition.device_map is "
        "given: the map and the rule could differ; leave out one of the two",
    ),
    (
        GLUE,
        {"partition.device_map": {"bert.embeddings": -1, "classifier": 0}},
        "partition.device_map: {'bert.embeddings': -1, 'classifier': 0} given, must be a mapping to numbers of 0 or more",
    ),
    (
        GLUE,
        {"strategy": "pipeline", "partition.device_map": {"model.layers.*": 0}},
        "partition.device_map: {'model.layers.*': 0} given, must be without globs unless strategy is local: a pipeline's "
        "stages are whole blocks in their order; name them block by block, write partition.stages, or set strategy: local",
    ),
    (
        GLUE,
        {"strategy": "pipeline", "partition.local_overlap": True},
        "partition.local_overlap: True given, must be false unless strategy is local: a pipeline overlaps by its schedule; "
        "leave it out, or set strategy: local",
    ),
    (
        GLUE,
        {"strategy": "local", "partition.local_overlap": True, "devices": 1},
        "partition.local_overlap: True given, must be false with devices: 1: one device has nothing to overlap with; set devices: 2 or more",
    ),
    (
        GLUE,
        {"strategy": "local", "partition.local_overlap": True, "partition.device_map": {"model.layers.*.mlp": 1}},
        "partition.local_overlap: True given, must be false with globs in partition.device_map: overlap needs contiguous "
        "stages; write partition.stages, or a map of whole blocks",
    ),
    (GLUE, {"partition.num_stages": 0}, "partition.num_stages: 0 given, must be at least 1"),
    (
        GLUE,
        {"partition.num_stages": 2, "partition.stages": ["embed", "0", "head"]},
        "partition.num_stages: 2 given, must be left out, or equal to the number of entries of partition.stages: the map says "
        "how many stages there are; leave it out",
    ),
    (
        GLUE,
        {"stages_per_rank": 2, "schedule": "1f1b"},
        "stages_per_rank: 2 given, must be 1 for the schedules gpipe and 1f1b: they run one stage a process; take schedule: "
        "interleaved_1f1b for more",
    ),
    (
        GLUE,
        {"stages_per_rank": 3, "schedule": "zbv"},
        "stages_per_rank: 3 given, must be 2 for the schedule zbv: its V passes each process twice; take schedule: interleaved_zero_bubble for more",
    ),
    (
        GLUE,
        {"stages_per_rank": 1, "schedule": "interleaved_1f1b"},
        "stages_per_rank: 1 given, must be at least 2 for the interleaved schedules: one stage a process leaves nothing to "
        "interleave; take schedule: 1f1b",
    ),
    (
        GLUE,
        {**MANUAL, "schedule": "zbv"},
        "schedule: 'zbv' given, must be one whose stages_per_rank divides the number of entries of partition.stages: every "
        "process runs equally many stages (2 for interleaved and zbv); change the map, stages_per_rank or the schedule",
    ),
    (GLUE, {"batch.global_size": 0}, "batch.global_size: 0 given, must be at least 1 row"),
    (GLUE, {"batch.micro_size": 0}, "batch.micro_size: 0 given, must be at least 1 row"),
    (GLUE, {"batch.micro_size": 32}, "batch.micro_size: 32 given, must be at most batch.global_size"),
    (GLUE, {"watch.leak_steps": 4}, "watch.leak_steps: 4 given, must be at least 5 updates, or 0"),
    (GLUE, {"watch.leak_mib": -1}, "watch.leak_mib: -1.0 given, must be 0 or more"),
    (GLUE, {"optimizer.lr": 0}, "optimizer.lr: 0.0 given, must be greater than 0"),
    (GLUE, {"optimizer.weight_decay": -0.1}, "optimizer.weight_decay: -0.1 given, must be 0 or more"),
    (GLUE, {"optimizer.betas": [0.9, 1.0]}, "optimizer.betas: [0.9, 1.0] given, must be two numbers in [0, 1)"),
    (GLUE, {"optimizer.eps": 0}, "optimizer.eps: 0.0 given, must be greater than 0"),
    (GLUE, {"optimizer.momentum": 1}, "optimizer.momentum: 1.0 given, must be in [0, 1)"),
    (GLUE, {"train.epochs": 0}, "train.epochs: 0.0 given, must be greater than 0"),
    (GLUE, {"train.max_steps": 0}, "train.max_steps: 0 given, must be at least 1, or null"),
    (GLUE, {"train.clip_norm": 0}, "train.clip_norm: 0.0 given, must be greater than 0, or null for no clipping"),
    (GLUE, {"train.warmup_ratio": 1}, "train.warmup_ratio: 1.0 given, must be in [0, 1)"),
    (GLUE, {"train.warmup_steps": -1}, "train.warmup_steps: -1 given, must be 0 or more, or null"),
    (GLUE, {"train.max_skipped_updates": -1}, "train.max_skipped_updates: -1 given, must be 0 or more"),
    (GLUE, {"eval.every_steps": 0}, "eval.every_steps: 0 given, must be at least 1, or null"),
    (GLUE, {"precision": "bf16", "eval.full_precision_every": -1}, "eval.full_precision_every: -1 given, must be 0 (never) or more"),
    (
        GLUE,
        {"eval.full_precision_every": 2},
        "eval.full_precision_every: 2 given, must be 0 for precision: fp32 without quantize: every evaluation is at full "
        "precision already; leave it out",
    ),
    (GLUE, {"checkpoint.every_steps": 0}, "checkpoint.every_steps: 0 given, must be at least 1, or null"),
    (GLUE, {"checkpoint.keep": 0}, "checkpoint.keep: 0 given, must be at least 1"),
    (GLUE, {"dist.timeout_seconds": 0}, "dist.timeout_seconds: 0.0 given, must be greater than 0"),
    (GLUE, {"dist.port": 70000}, "dist.port: 70000 given, must be 1 to 65535, or null for a free one"),
    (
        GLUE,
        {"hardware": [{"gpu": "rtx3090", "memory_gib": 0}]},
        "hardware: [{'gpu': 'rtx3090', 'memory_gib': 0}] given, must be a list of entries like {gpu: rtx3090, memory_gib: 23.5}: gpu is the card's "
        "name, memory_gib, bandwidth_gb_s, fp32_tflops, fp16_tflops, bf16_tflops and pcie_gb_s are positive numbers, capability is like 8.6",
    ),
    (GLUE, {"devices": 0}, "devices: 0 given, must be at least 1, or null"),
    (
        GLUE,
        {"recompute": "sometimes"},
        "recompute: 'sometimes' given, must be none, full, offload, auto, every_N (like every_2) or a list of blocks (like [0, 2-5])",
    ),
    (
        GLUE,
        {"recompute": "offload", "schedule": "zbv", "strategy": "pipeline"},
        "recompute: 'offload' given, must be none, full, every_N or a list of blocks with a zero-bubble schedule: its split "
        "backward cannot run through fairscale's wrapper; take recompute: full, or schedule: 1f1b",
    ),
    (
        GLUE,
        {"offload.optimizer": "cpu", "strategy": "local"},
        "offload.optimizer: 'cpu' given, must be none or auto for strategy local and auto: DeepSpeed's engines offload, and "
        "neither has one; set strategy: pipeline or zero",
    ),
    (
        GLUE,
        {"offload.optimizer": "cpu", "strategy": "pipeline", "optimizer.name": "sgd"},
        "offload.optimizer: 'cpu' given, must be none or auto for optimizer.name other than adamw: DeepSpeed's CPUAdam is the "
        "one update rule that runs on the host; set optimizer.name: adamw",
    ),
    (
        GLUE,
        {"strategy": "zero", "precision": "fp16", "adapter.type": "lora"},
        "precision: 'fp16' given, must be bf16 or fp32 for an adapter with offload.optimizer or strategy: zero: adapters are fp32, and "
        "the engine of what is fp32 does not scale the loss, so gradients would vanish in fp16 activations; set precision: bf16, or "
        "leave the adapter's small optimizer on the card with strategy: pipeline or local",
    ),
    (
        GLUE,
        {"offload.optimizer": "nvme", "strategy": "zero"},
        "offload.optimizer: 'nvme' given, must be cpu, or nvme with strategy: zero and offload.nvme_path: only strategy zero "
        "swaps to a disk, and it needs a folder there; set both, or offload.optimizer: cpu",
    ),
    (
        GLUE,
        {"offload.gradients": "cpu", "strategy": "zero", "offload.optimizer": "cpu"},
        "offload.gradients: 'cpu' given, must be none, unless strategy is pipeline and offload.optimizer is cpu: they are added to "
        "what CPUAdam reads; strategy zero moves them itself from stage 2 on; set both, or strategy: zero with zero.stage: 2",
    ),
    (
        GLUE,
        {"offload.gradients": "cpu", "strategy": "pipeline", "offload.optimizer": "cpu", "schedule": "zbv"},
        "offload.gradients: 'cpu' given, must be none with a zero-bubble schedule: its split backward writes gradients where no "
        "hook sees them; take schedule: 1f1b, gpipe or interleaved_1f1b",
    ),
    (
        GLUE,
        {"offload.parameters": "cpu", "strategy": "zero"},
        "offload.parameters: 'cpu' given, must be none, unless strategy is zero and zero.stage is 3: only stage 3 gathers "
        "parameters when they are used; set zero.stage: 3, or offload the optimizer only",
    ),
    (
        GLUE,
        {"offload.parameters": "nvme", "strategy": "zero", "zero.stage": 3},
        "offload.parameters: 'nvme' given, must be cpu, or nvme together with offload.nvme_path: swapping needs a folder on "
        "the disk; set offload.nvme_path",
    ),
    (
        GLUE,
        {
            "offload.parameters": "nvme",
            "offload.nvme_path": "/x",
            "strategy": "zero",
            "zero.stage": 3,
            "adapter.type": "lora",
            "precision": "bf16",
        },
        "offload.parameters: 'nvme' given, must be none or cpu for an adapter on weights that are not fp32: DeepSpeed's buffers to the "
        "disk have one type, and adapters are fp32; set offload.parameters: cpu",
    ),
    (
        GLUE,
        {"zero.stage": 3, "strategy": "pipeline"},
        "zero.stage: 3 given, must be left out unless strategy is zero: in a pipeline ZeRO-2 gives wrong gradients and ZeRO-3 "
        "hangs; set strategy: zero, or take offload.optimizer: cpu, ZeRO-1 within each stage, and offload.gradients: cpu beside it",
    ),
    (
        GLUE,
        {"zero.stage": 3, "strategy": "zero", "quantize": "nf4", "adapter.type": "lora"},
        "zero.stage: 3 given, must be 1 or 2 for quantised weights: bitsandbytes holds on to the weights that stage 3 gathers (nf4 until "
        "the backward pass, int8 for good), so nothing would be saved; set zero.stage: 2, or strategy: pipeline to split them",
    ),
    (
        GLUE,
        {"deepspeed": {"wall_clock_breakdown": True}},
        "deepspeed: {'wall_clock_breakdown': True} given, must be empty where no DeepSpeed engine runs: nothing would read it; "
        "set strategy: zero or offload.optimizer: cpu, or leave it out",
    ),
    (
        GLUE,
        {"optimizer.name": "sgd", "strategy": "zero"},
        "optimizer.name: 'sgd' given, must be adamw for strategy: zero: DeepSpeed shards the states of its own Adam; take "
        "strategy: pipeline or local for sgd and the 8-bit optimizers",
    ),
    (
        GLUE,
        {"quantize": "nf4"},
        "quantize: 'nf4' given, must be none without an adapter: quantised weights have no gradient; set adapter.type: lora",
    ),
    (GLUE, {"adapter.rank": 0}, "adapter.rank: 0 given, must be at least 1"),
    (GLUE, {"adapter.alpha": 0}, "adapter.alpha: 0 given, must be at least 1"),
    (GLUE, {"adapter.dropout": 1.0}, "adapter.dropout: 1.0 given, must be in [0, 1)"),
    (GLUE, {"adapter.targets": "q_proj"}, "adapter.targets: 'q_proj' given, must be all-linear, or a list of module names or endings"),
]


@pytest.mark.parametrize(("base", "values", "message"), BROKEN, ids=[message.partition(" given")[0] for _, _, message in BROKEN])
def test_broken_rule_says_so(base: dict[str, Any], values: dict[str, Any], message: str) -> None:
    assert problems_of(with_values(base, values)) == [message]


@pytest.mark.parametrize(("base", "values", "message"), BROKEN, ids=[message.partition(" given")[0] for _, _, message in BROKEN])
def test_broken_rule_is_reported_beside_a_type_problem(base: dict[str, Any], values: dict[str, Any], message: str) -> None:
    path = message.partition(":")[0]
    lines = problems_of(with_values(base, {**values, "eval.at_start": "perhaps"}))
    assert lines[0] == "eval.at_start: 'perhaps' given, must be true or false"
    assert lines[1:] == ([message] if path in values else [])


def test_every_rule_has_a_case() -> None:
    for rule in RULES:
        cases = [message for _, _, message in BROKEN if message.startswith(f"{rule.path}: ") and message.endswith(f" given, must be {rule.demand}")]
        assert cases, f"add a row to BROKEN for the rule '{rule.path}: must be {rule.demand}'"
    assert len(BROKEN) == len(RULES)


@pytest.mark.parametrize(("base", "values", "message"), BROKEN, ids=[message.partition(" given")[0] for _, _, message in BROKEN])
def test_a_refused_combination_says_why_and_what_instead(
    monkeypatch: pytest.MonkeyPatch, base: dict[str, Any], values: dict[str, Any], message: str
) -> None:
    """A verdict that rests on several keys; the bounds of batch.micro_size by batch.global_size explain themselves."""
    path, _, demand = message.partition(" given, must be ")
    (rule,) = [rule for rule in RULES if path.startswith(f"{rule.path}: ") and rule.demand == demand]
    monkeypatch.setattr("mpfinetune.config.check_rules", lambda config: [])
    wrong = config_from_dict(with_values(base, values))
    combination = {key for key in paths_read(rule, wrong) if not key.startswith("batch.")}
    assert bool(rule.why and rule.instead) == (len(combination) > 1), combination


def test_every_rule_is_about_a_key_of_the_config() -> None:
    paths = {path for path, _ in config_paths()}
    assert {rule.path for rule in RULES} <= paths


# --- files and overrides ------------------------------------------------------------------------------------------------------------


def test_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.yaml", "model:\n  path: m\n  task: [a,\nrun_dir: r\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)
    assert f"{path}: not valid YAML: line 5" in str(caught.value) and "begins on line 3" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"train: {epochs: 1}\ntrain: {epochs: 2}\n", "line 2, column 1: found duplicate key train"),
        (b"a:\n\tb: 1\n", "line 2"),
        (b"model: {path: \xff\xfe}\n", "not valid YAML"),
        (b"run_dir: ${foo\n", "run_dir: "),
    ],
)
def test_other_unreadable_files_say_why(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"{path}: ") and words in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such config file"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["- a\n- b\n", "3\n"])
def test_file_that_is_not_a_mapping(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).startswith(str(path))


def test_empty_file_lacks_what_is_required(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: required, but not given"):
        load_config(write(tmp_path / "c.yaml", ""))


def test_overrides_take_nested_lists_mappings_and_null(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "model: {path: m, overrides: {a: 1, b: {c: 2}}}\ndata: {task: mrpc}\nrun_dir: r\n")
    overrides = [
        "train.epochs=0.5",
        "train.clip_norm=null",
        "optimizer.betas=[0.8, 0.9]",
        "partition.stages=['embed, 0-2', '3-5, head']",
        "model.overrides.b.d=3",
        "model.overrides.e=true",
        "data.columns={}",
        "run_dir=runs/a=b",
        "schedule=gpipe",
    ]
    config = load_config(path, overrides)
    assert config.train.epochs == 0.5 and config.train.clip_norm is None and config.optimizer.betas == [0.8, 0.9]
    assert config.partition.stages == ["embed, 0-2", "3-5, head"]
    assert config.model.overrides == {"a": 1, "b": {"c": 2, "d": 3}, "e": True}
    assert config.run_dir == "runs/a=b" and config.schedule == "gpipe"


def test_override_replaces_a_list_and_a_mapping_value(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.yaml", "model: {path: m}\ndata: {task: mrpc}\nrun_dir: r\npartition: {device_map: {model.layers.0: 0, model.layers.1: 1}}\n"
    )
    assert load_config(path, ["partition.device_map={model.layers.0: 1}"]).partition.device_map == {"model.layers.0": 1, "model.layers.1": 1}
    config = load_config(path, ["partition.device_map={}", "partition.stages=[embed, head]"])
    assert config.partition.device_map == {} and config.partition.stages == ["embed", "head"]


def test_later_override_wins(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "model: {path: m}\ndata: {task: mrpc}\nrun_dir: r\n")
    assert load_config(path, ["train.seed=1", "train.seed=2"]).train.seed == 2


def test_wrong_overrides_are_reported_with_everything_else(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "model: {path: m}\ndata: {task: mrpc}\nrun_dir: r\nepochs: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["train.epochs", "=3", "optimizer.lr=[", "train.epoch=2", "batch.micro_size=x"])
    lines = caught.value.problems
    assert lines[0] == "override 'train.epochs': must have the form key=value, for example train.epochs=1"
    assert lines[1].startswith("override '=3': must have the form key=value")
    assert lines[2].startswith("override 'optimizer.lr=[': cannot be read: ") and "\n" not in lines[2]
    assert "train.epoch: unknown key (did you mean 'epochs'?)" in lines
    assert "batch.micro_size: 'x' given, must be a whole number or auto" in lines
    assert "epochs: unknown key (did you mean 'train.epochs'?)" in lines


def test_other_keys_and_environment_can_be_used_in_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_FOLDER", "scratch")
    text = "model: {path: m}\ndata: {task: mrpc}\nrun_dir: ${oc.env:SCRATCH_FOLDER}/${data.task}\noptimizer: {lr: 1e-3, eps: '${optimizer.lr}'}\n"
    config = load_config(write(tmp_path / "c.yaml", text), ["data.task=rte"])
    assert config.run_dir == "scratch/rte" and config.optimizer.eps == 1e-3


def test_reference_to_nothing_is_explained() -> None:
    lines = problems_of(with_values(GLUE, {"run_dir": "runs/${nothing}", "optimizer.lr": "fast"}))
    assert lines[0].startswith("run_dir: Interpolation key 'nothing' not found") and "\n" not in lines[0]
    assert lines[1] == "optimizer.lr: 'fast' given, must be a finite number"


def test_saved_config_reads_back_equal(tmp_path: Path) -> None:
    values = {
        "model.overrides": {"hidden_dropout_prob": 0.0, "id2label": {0: "no", 1: "yes"}, "list": [1, {"a": None}], "text": "2e-5"},
        "data.prompt_template": "Q: {prompt}\n\tcost \\${x} 'quoted' é\nA:",
        "partition.device_map": {"model.embed": 0, "model.layers.0": 1},
        "optimizer.lr": "3e-7",
        "train.clip_norm": None,
        "run_dir": "2e5",
    }
    config = config_from_dict(with_values(GLUE, values))
    assert "cost ${x} " in config.data.prompt_template
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_saved_config_holds_every_key(tmp_path: Path) -> None:
    save_config(config_from_dict(GLUE), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert all(f"{path.rpartition('.')[2]}:" in text for path, _ in config_paths())


# --- the schema itself --------------------------------------------------------------------------------------------------------------


def test_every_key_has_a_sentence_and_a_type_that_is_understood() -> None:
    for path, entry in config_paths():
        sentence = entry.metadata.get("help", "")
        assert sentence and sentence.rstrip().endswith((".", ")")), f"{path}: write a sentence that says what it means"
        assert type_in_words(config_hints()[path])


def test_every_default_has_the_type_of_its_key() -> None:
    for path, entry in config_paths():
        default = entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
        if default != "???":
            assert convert(default, config_hints()[path]) == default, path
