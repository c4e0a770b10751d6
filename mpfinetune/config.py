"""What was asked: the typed form of one YAML file and its ``key=value`` overrides.

``load_config`` reports every mistake at once (unknown keys, wrong types, impossible combinations), each with its dotted path, the
value given, the rule and the nearest valid name, before any process is started or any weight is read. Checking changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from omegaconf import MISSING

from mpfinetune.config_checks import check_rules, check_rules_of, value_at
from mpfinetune.config_files import merge_overrides, read_yaml, resolve, spell_out
from mpfinetune.config_rules import LOOPED_SCHEDULES, RULES, Rule
from mpfinetune.config_values import convert, type_in_words
from mpfinetune.errors import ConfigError, did_you_mean

__all__ = [
    "LOOPED_SCHEDULES",
    "RULES",
    "Rule",
    "RunConfig",
    "check_rules",
    "config_from_dict",
    "config_hints",
    "config_paths",
    "load_config",
]

T = TypeVar("T")

ModelTask = Literal["sequence_classification", "causal_lm"]
Strategy = Literal["auto", "local", "pipeline", "zero"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
PartitionRule = Literal["manual", "uniform", "parameters", "memory", "time"]
Precision = Literal["fp32", "bf16", "fp16"]
OptimizerName = Literal["adamw", "sgd", "adamw_8bit", "paged_adamw_8bit"]
GlueTask = Literal["mrpc", "sst2", "cola", "rte", "stsb"]


def option(default: T, sentence: str) -> T:
    """A config field with its documentation; the config reference in docs/ is generated from these sentences."""
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": sentence})  # type: ignore[return-value]
    return field(default=default, metadata={"help": sentence})


def section(section_type: type[T], sentence: str) -> T:
    """A nested section of the config."""
    return field(default_factory=section_type, metadata={"help": sentence})  # type: ignore[return-value]


@dataclass
class ModelConfig:
    path: str = option(MISSING, "Folder of a Hugging Face model (config.json, *.safetensors, tokenizer) or a hub id. Required.")
    task: ModelTask = option("sequence_classification", "Which head is trained: a label or score per row, or the next token.")
    num_labels: int | None = option(
        None, "Size of the classification head; 1 means regression. Default: what data.task needs, else what the model's config says."
    )
    init: Literal["pretrained", "random"] = option(
        "pretrained", "`random` draws the weights from train.seed and needs config.json only; for tests, benchmarks and training from scratch."
    )
    tokenizer: str | None = option(None, "Folder or hub id of the tokenizer. Default: model.path.")
    attention: Literal["auto", "sdpa", "eager"] = option("auto", "transformers' attn_implementation. `auto`: sdpa where the model has it.")
    overrides: dict[str, Any] = option(
        {}, "Keys of the model's own config.json to change, for example {hidden_dropout_prob: 0.0}. Exported with the model."
    )


@dataclass
class DataConfig:
    task: GlueTask | None = option(None, "A GLUE task: its columns, number of labels and metrics. Null for causal_lm files.")
    path: str | None = option(
        None,
        "A folder of GLUE TSVs (train.tsv, dev.tsv), a .jsonl or .txt file for causal_lm, or the hub name of a dataset. "
        "Default for a GLUE task: the hub's nyu-mll/glue.",
    )
    eval_path: str | None = option(None, "File of the held-out rows for causal_lm. Null: no evaluation, unless data.eval_fraction says so.")
    eval_fraction: float = option(0.0, "Share of the rows of data.path held out for evaluation when there is no data.eval_path. In [0, 1).")
    columns: dict[str, str] = option(
        {}, "Names of the columns where they differ: {prompt: question, response: answer}, {text: content} or {messages: conversation}."
    )
    chat: bool = option(False, "Render prompt and response as a user and an assistant turn of the tokenizer's chat template.")
    prompt_template: str = option("{prompt}", "Text in which {prompt} is replaced, put before the response when chat is false.")
    max_length: int = option(128, "Tokens per row; longer rows are cut (and counted). At most what the model's positions allow.")
    padding: Literal["batch", "bucketed", "fixed"] = option(
        "batch",
        "`batch`: to the longest row of the update; `bucketed`: the same, with rows of like length drawn together; `fixed`: always max_length.",
    )
    packing: bool = option(False, "Several training rows of causal_lm in one of at most max_length tokens, none of which sees another's tokens.")
    pad_to_multiple_of: int = option(8, "Padded lengths are rounded up to a multiple of this: few distinct shapes, aligned matrices.")
    train_rows: int | None = option(None, "Use only the first N training rows. Null: all.")
    eval_rows: int | None = option(None, "Use only the first N evaluation rows. Null: all.")


@dataclass
class PartitionConfig:
    rule: PartitionRule | None = option(
        None,
        "`manual`: as stages or device_map say; `uniform`: equal numbers of blocks; `parameters`: equal bytes, embedding and head counted. "
        "Default: manual where a map is given, else parameters.",
    )
    num_stages: int | None = option(
        None, "Number of stages for uniform and parameters. Default: one per visible device, at least 2 for the pipeline strategy."
    )
    stages: list[Any] = option([], "For manual: one entry per stage, like `embed, 0-2` and `3-5, head`; a module's own name stands for its block.")
    device_map: dict[str, int] = option(
        {},
        "For manual: a pasted map {module name: stage}, as accelerate and transformers print it. Excludes partition.stages. With strategy: local "
        "{module name or glob: device}, also inside a block, like model.layers.*.mlp: 1; number n is the n-th visible device.",
    )
    local_overlap: bool = option(
        False,
        "With strategy: local, one contiguous stage a device and the microbatches of an update in flight over them (all forward passes, then "
        "all backward passes, so activations of the whole update are kept). False: one device computes at a time.",
    )


@dataclass
class BatchConfig:
    global_size: int = option(16, "Rows per optimizer update, over all replicas and microbatches. The numbers of a run depend on this alone.")
    micro_size: int | Literal["auto"] = option(
        4,
        "Rows in one forward pass on one card: memory against speed, never the numbers. `auto`: the most that fit, found with the longest rows "
        "before training. When a pass runs out of memory, all ranks halve it and run the same rows again.",
    )


@dataclass
class OptimizerConfig:
    name: OptimizerName = option(
        "adamw", "torch's AdamW or SGD, or bitsandbytes' AdamW with 8-bit states (a quarter of the optimizer's bytes), paged to the host or not."
    )
    lr: float = option(2e-5, "Peak learning rate, after the warm-up.")
    weight_decay: float = option(0.01, "Decoupled decay for adamw, L2 for sgd; never on biases and norm weights.")
    betas: list[float] = option([0.9, 0.999], "AdamW's decay rates of the first and second moment.")
    eps: float = option(1e-8, "AdamW's denominator term.")
    momentum: float = option(0.0, "SGD's momentum.")
    stable_embedding: bool = option(
        True, "With 8-bit states: embeddings keep 32-bit states, as bitsandbytes advises (their gradients are the most uneven)."
    )


@dataclass
class OffloadConfig:
    optimizer: Literal["none", "cpu", "nvme", "auto"] = option(
        "none",
        "Where fp32 masters and optimizer states live. `cpu`: in host memory, updated there by DeepSpeed's CPUAdam. `auto`: there if they do not "
        "fit on the cards, and with them gradients (pipeline) or weights (zero) where that is not enough; `offload: auto` is short for it.",
    )
    gradients: Literal["none", "cpu"] = option(
        "none",
        "Where a pipeline adds up the gradients of an update's microbatches. `cpu`: each leaves the card as soon as it is computed, so that the "
        "card holds none, at the price of its transfer for every microbatch; with offload.optimizer: cpu.",
    )
    parameters: Literal["none", "cpu", "nvme"] = option("none", "Where the weights live between uses. Only with strategy: zero and zero.stage: 3.")
    nvme_path: str | None = option(None, "Folder on a fast local disk, for nvme.")


@dataclass
class ZeroConfig:
    stage: Literal[1, 2, 3] = option(2, "What is split over the cards: 1 optimizer states, 2 also gradients, 3 also parameters.")


@dataclass
class AdapterConfig:
    type: Literal["none", "lora", "rslora", "dora"] = option("none", "Train small matrices beside frozen weights (peft) instead of the weights.")
    rank: int = option(16, "Inner size of an adapter.")
    alpha: int = option(32, "The adapter's output is scaled by alpha / rank (rslora: alpha / sqrt(rank)).")
    dropout: float = option(0.0, "Dropout before the adapter. In [0, 1).")
    targets: Any = option("all-linear", "`all-linear` (every linear layer of the blocks) or a list of names or endings, like [q_proj, v_proj].")


@dataclass
class TrainConfig:
    epochs: float = option(3.0, "Passes over the training rows; a part of a pass is allowed. Ignored where max_steps is given.")
    max_steps: int | None = option(None, "Number of optimizer updates, in place of epochs.")
    clip_norm: float | None = option(1.0, "Gradients are scaled down to this norm, taken over all parameters of all stages. Null: no clipping.")
    scheduler: Literal["linear", "cosine", "constant"] = option("linear", "Shape of the learning rate after the warm-up.")
    warmup_ratio: float = option(0.0, "Share of the updates in which the learning rate rises linearly from 0. In [0, 1).")
    warmup_steps: int | None = option(None, "Number of warm-up updates, in place of warmup_ratio.")
    seed: int = option(42, "Seeds the new head, the data order and dropout; the run is a function of it and the layout.")
    max_skipped_updates: int = option(
        10,
        "Consecutive updates that may be skipped for a gradient that is not finite before the run stops, the last checkpoint kept. Of fp16 "
        "those at the smallest loss scale (1) count; above it an overflow halves the scale.",
    )


@dataclass
class EvalConfig:
    every_steps: int | None = option(None, "Evaluate every N updates, besides the end. Null: only at the end.")
    at_start: bool = option(True, "Evaluate once before the first update, so that the gain is seen.")
    full_precision_every: int = option(
        0,
        "At every N-th evaluation score the rows once more with fp32 weights and the original, unquantised base, so that drift through "
        "rounding is seen (`mpfinetune eval` then always does). Reads the model's files again, one block at a time. 0: never.",
    )


@dataclass
class WatchConfig:
    leak_steps: int = option(
        50, "Memory that has grown in each of this many updates in a row is reported once, with the update where it began. 0: not watched."
    )
    leak_mib: float = option(64.0, "Growth over leak_steps updates that is not reported, in MiB: allocators and caches settle slowly.")


@dataclass
class CheckpointConfig:
    every_steps: int | None = option(None, "Save every N updates, besides the end. Null: only at the end.")
    keep: int = option(2, "How many of the newest checkpoints are kept; the best by the task's metric is kept besides.")
    resume: str = option("auto", "`auto`: go on from the newest complete checkpoint of run_dir; `never`: start anew; or a checkpoint's folder.")
    save_final: bool = option(True, "Save a checkpoint after the last update.")


@dataclass
class DistConfig:
    timeout_seconds: float = option(600.0, "How long a rank waits for another before the run fails; saving and evaluation included.")
    port: int | None = option(None, "Port of the rendezvous when `mpfinetune train` starts the processes. Null: a free one.")


@dataclass
class RunConfig:
    """One run, complete."""

    model: ModelConfig = section(ModelConfig, "What is fine-tuned.")
    data: DataConfig = section(DataConfig, "What it learns from.")
    strategy: Strategy = option(
        "auto",
        "`pipeline`: blocks over processes; `local`: one process, on one device (the reference) or several; `zero`: DeepSpeed ZeRO, the whole "
        "model in each process; `auto`: the fastest of them that fits where the cards are known, else pipeline for more than one stage and local "
        "for one.",
    )
    partition: PartitionConfig = section(PartitionConfig, "Which blocks belong to which stage.")
    schedule: Schedule = option("1f1b", "Order of the microbatches' forward and backward passes in the pipeline.")
    stages_per_rank: int | None = option(
        None, "Stages that one process holds: 1 for gpipe and 1f1b, 2 for zbv, 2 or more (default 2) for the interleaved schedules."
    )
    batch: BatchConfig = section(BatchConfig, "Rows per update and per forward pass.")
    precision: Precision = option(
        "fp32",
        "Type of weights and activations. bf16 and fp16 keep fp32 master weights and accumulate gradients in fp32; fp16 scales the loss.",
    )
    optimizer: OptimizerConfig = section(OptimizerConfig, "How the weights move.")
    offload: OffloadConfig = section(OffloadConfig, "What lives outside the card between uses.")
    recompute: Any = option(
        "none",
        "Activation checkpointing: none, full, offload (block inputs on the CPU), every_2, or a list of blocks like [0, 2-5]. "
        "`auto`: the fastest of none, every_2 and full that fits.",
    )
    zero: ZeroConfig = section(ZeroConfig, "For strategy: zero.")
    deepspeed: dict[str, Any] = option({}, "Expert keys of DeepSpeed's own JSON, passed through; refused where they contradict this config.")
    quantize: Literal["none", "nf4", "int8"] = option(
        "none", "Hold the blocks' linear weights in 4 or 8 bits (bitsandbytes), frozen; needs an adapter to train."
    )
    adapter: AdapterConfig = section(AdapterConfig, "LoRA and its kin.")
    trainable: list[str] = option([], "Only these learn: names, modules, globs like *.bias, embed, head, last_2_blocks. Empty: all.")
    frozen: list[str] = option([], "These do not learn; the same forms as trainable.")
    train: TrainConfig = section(TrainConfig, "How long, how fast, from which seed.")
    eval: EvalConfig = section(EvalConfig, "When the held-out rows are scored.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "When the state is saved and whether a run goes on.")
    watch: WatchConfig = section(WatchConfig, "What is noticed while training goes on.")
    dist: DistConfig = section(DistConfig, "The processes' meeting point and patience.")
    device: Literal["auto", "cuda", "cpu"] = option("auto", "`auto`: CUDA cards (with NCCL) where there are any, else the CPU (with gloo).")
    fallback: Literal["auto", "never"] = option(
        "auto", "`auto`: a run planned for several cards that finds one goes on there with strategy zero and offload, with the same numbers."
    )
    hardware: list[Any] = option(
        [],
        "Cards to plan for that need not be here, one entry per rank of the pipeline, like [{gpu: rtx3090}, {gpu: gtx1080ti, memory_gib: 10.5}]. "
        "An entry may change the table's figures (memory_gib, bandwidth_gb_s, fp32_tflops, fp16_tflops, bf16_tflops, pcie_gb_s, capability), "
        "or describe a card that the table does not have.",
    )
    devices: int | None = option(None, "Use only the first N visible devices. On the CPU: how many to pretend. Null: all visible ones.")
    run_dir: str = option(MISSING, "Folder of the run: resolved config, plan, metrics, checkpoints, TensorBoard files, exported model. Required.")


# --- loading --------------------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply ``key=value`` overrides, check everything.

    Raises:
        ConfigError: with one line per problem found.
    """
    given = read_yaml(Path(path))
    problems = merge_overrides(given, overrides or [])
    return _config_from_dict(given, problems)


def config_from_dict(given: dict[str, Any]) -> RunConfig:
    """The same checks for a config that is already a plain dictionary (tests, notebooks).

    Raises:
        ConfigError: with one line per problem found.
    """
    return _config_from_dict(given, [])


def config_paths(config_type: type = RunConfig, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any]]]:
    """Every leaf of the config as (dotted path, field), in the order of definition."""
    for entry in dataclasses.fields(config_type):
        path = f"{prefix}{entry.name}"
        nested = _section_type(entry)
        if nested is not None:
            yield from config_paths(nested, f"{path}.")
        else:
            yield path, entry


@cache
def config_hints() -> dict[str, Any]:
    """The type of every leaf: {dotted path: type hint}."""
    sections = [("", RunConfig)] + [(f"{entry.name}.", nested) for entry in dataclasses.fields(RunConfig) if (nested := _section_type(entry))]
    hints = {f"{prefix}{name}": hint for prefix, owner in sections for name, hint in get_type_hints(owner).items()}
    return {path: hints[path] for path, _ in config_paths()}


def _section_type(entry: dataclasses.Field[Any]) -> type | None:
    nested = entry.default_factory
    return nested if isinstance(nested, type) and dataclasses.is_dataclass(nested) else None


@dataclass
class _Reading:
    """What reading has found so far. Paths are dotted."""

    problems: list[str]
    given: set[str] = field(default_factory=set)  # given with a value of the right type
    wrong: set[str] = field(default_factory=set)  # given with a value of another type
    doubtful: set[str] = field(default_factory=set)  # perhaps meant by an unknown key or a section that is none


def _config_from_dict(given: dict[Any, Any], problems: list[str]) -> RunConfig:
    reading = _Reading(list(problems))
    config = RunConfig()
    _assign(config, spell_out(resolve(given, reading.problems)), "", reading)
    for path, _ in config_paths():
        if value_at(config, path) == MISSING and path not in reading.wrong:
            reading.problems.append(f"{path}: required, but not given")
    if reading.problems:
        # Only about what was given: a complaint about a default that the user meant to change would mislead.
        reading.problems += check_rules_of(config, reading.given, reading.wrong | (reading.doubtful - reading.given))
    else:
        reading.problems += check_rules(config)
    if reading.problems:
        raise ConfigError(reading.problems)
    return config


def _assign(section_config: Any, given: dict[Any, Any], prefix: str, reading: _Reading) -> None:
    """Assign leaf by leaf, so that one wrong value does not hide the next."""
    fields = {entry.name: entry for entry in dataclasses.fields(section_config)}
    leaves = [path for path, _ in config_paths()]
    for key, value in given.items():
        path = f"{prefix}{key}"
        if key not in fields:
            reading.problems.append(f"{path}: unknown key{_nearest_key(str(key), list(fields))}")
            # It may have been meant for any key of this section, or for the one of this name in another.
            reading.doubtful |= {leaf for leaf in leaves if leaf.startswith(prefix) or leaf.rpartition(".")[2] == key}
            continue
        nested = _section_type(fields[key])
        if nested is not None and isinstance(value, dict):
            _assign(getattr(section_config, key), value, f"{path}.", reading)
        elif nested is not None:
            names = ", ".join(entry.name for entry in dataclasses.fields(nested))
            reading.problems.append(f"{path}: {value!r} given, but this is a section with the keys {names}")
            reading.doubtful |= {leaf for leaf in leaves if leaf.startswith(f"{path}.")}
        else:
            _assign_leaf(section_config, key, value, path, reading)


def _assign_leaf(section_config: Any, key: str, value: Any, path: str, reading: _Reading) -> None:
    hint = config_hints()[path]
    try:
        setattr(section_config, key, convert(value, hint))
    except ValueError:
        reading.problems.append(f"{path}: {value!r} given, must be {type_in_words(hint)}")
        reading.wrong.add(path)
    else:
        reading.given.add(path)


def _nearest_key(key: str, siblings: list[str]) -> str:
    everywhere = [path for path, _ in config_paths()]
    if key in everywhere:
        return f" (a dotted path is for the command line; in YAML write {key.replace('.', ': {')}: ...}})"
    # The same name in another section says more than a similar one in this.
    same_name = [path for path in everywhere if path.rpartition(".")[2] == key]
    if same_name:
        return f" (did you mean {' or '.join(repr(path) for path in same_name)}?)"
    return did_you_mean(key, siblings) or did_you_mean(key, everywhere) or f"; valid here: {', '.join(siblings)}"
