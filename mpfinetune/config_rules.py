"""What values and combinations of values are allowed: one row per rule.

A row names the path to change, the test that must hold and what is allowed; for a combination also why, and what to write instead. All
rows are tried and all failures reported; checking changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpfinetune.config import RunConfig

# Schedules that place several stages on one rank; the others have exactly one.
LOOPED_SCHEDULES = ("interleaved_1f1b", "interleaved_zero_bubble", "zbv")


ZERO_BUBBLE_SCHEDULES = ("interleaved_zero_bubble", "zbv")
_RECOMPUTE_EVERY = re.compile(r"every_[1-9]\d*")
_BLOCK_RANGE = re.compile(r"\d+(\s*-\s*\d+)?")


def is_recompute_policy(policy: Any) -> bool:
    """Whether a value has one of the forms of ``recompute``, whatever the model."""
    if isinstance(policy, str):
        return policy in ("none", "full", "offload", "auto") or _RECOMPUTE_EVERY.fullmatch(policy) is not None
    return isinstance(policy, list) and all(not isinstance(item, bool) and _BLOCK_RANGE.fullmatch(str(item)) for item in policy)


def _offloads(config: RunConfig) -> bool:
    """Whether the optimizer is asked to leave the card; what is left to the plan is checked for each choice that it has."""
    return config.offload.optimizer in ("cpu", "nvme")


def _is_glob(key: str) -> bool:
    return any(sign in key for sign in "*?[")


# Figures of a card in an entry of ``hardware``: positive numbers, but bf16_tflops may be 0 (a card without it).
CARD_FIGURES = ("memory_gib", "bandwidth_gb_s", "fp32_tflops", "fp16_tflops", "bf16_tflops", "pcie_gb_s")
_CAPABILITY = re.compile(r"\d+\.\d")


def is_hardware(entries: list[Any]) -> bool:
    """Whether every entry of ``hardware`` names a card and has figures that can be ones; whether the card is known is asked by the plan."""
    return all(isinstance(entry, dict) and isinstance(entry.get("gpu"), str) and all(map(_is_figure, entry.items())) for entry in entries)


def _is_figure(item: tuple[Any, Any]) -> bool:
    name, value = item
    if name == "gpu":
        return True
    if name == "capability":
        return _CAPABILITY.fullmatch(str(value)) is not None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return name in CARD_FIGURES and is_number and (value > 0 or (name == "bf16_tflops" and value == 0))


@dataclass(frozen=True)
class Rule:
    """``holds(config)`` must be true; otherwise the message names the path, its value and ``allowed``.

    A rule about a combination also says why the values exclude each other, and what to write instead.
    """

    path: str
    holds: Callable[[RunConfig], bool]
    allowed: str
    why: str = ""
    instead: str = ""

    @property
    def demand(self) -> str:
        """What a message says after ``must be``."""
        return self.allowed + (f": {self.why}; {self.instead}" if self.why else "")


def _default_stages_per_rank(config: RunConfig) -> int:
    return config.stages_per_rank or (2 if config.schedule in LOOPED_SCHEDULES else 1)


RULES: tuple[Rule, ...] = (
    Rule("model.num_labels", lambda c: c.model.num_labels is None or c.model.num_labels >= 1, "at least 1 (1 means regression), or null"),
    Rule(
        "data.task",
        lambda c: c.data.task is None or c.model.task == "sequence_classification",
        "null for model.task: causal_lm",
        why="a GLUE task is a classification",
        instead="set model.task: sequence_classification",
    ),
    Rule(
        "data.task",
        lambda c: c.data.task is not None or c.model.task == "causal_lm",
        "one of mrpc, sst2, cola, rte, stsb for model.task: sequence_classification",
        why="its rows are those of a GLUE task",
        instead="name one, or set model.task: causal_lm and data.path",
    ),
    Rule(
        "data.path",
        lambda c: c.data.path is not None or c.model.task != "causal_lm",
        "a .jsonl or .txt file for model.task: causal_lm",
        why="no text is read by default",
        instead="name your file",
    ),
    Rule("data.eval_fraction", lambda c: 0.0 <= c.data.eval_fraction < 1.0, "in [0, 1)"),
    Rule(
        "data.eval_fraction",
        lambda c: not (c.data.eval_fraction > 0 and (c.data.eval_path or c.data.task)),
        "0 where data.eval_path or a GLUE task gives the held-out rows",
        why="there would be two held-out sets",
        instead="leave out one of the two",
    ),
    Rule("data.max_length", lambda c: c.data.max_length >= 2, "at least 2 tokens"),
    Rule(
        "data.packing",
        lambda c: not c.data.packing or c.model.task == "causal_lm",
        "false for model.task: sequence_classification",
        why="a classification head gives one answer per row",
        instead="set data.packing: false; data.padding: bucketed saves most of the padding",
    ),
    Rule("data.pad_to_multiple_of", lambda c: c.data.pad_to_multiple_of >= 1, "at least 1"),
    Rule("data.train_rows", lambda c: c.data.train_rows is None or c.data.train_rows >= 1, "at least 1, or null"),
    Rule("data.eval_rows", lambda c: c.data.eval_rows is None or c.data.eval_rows >= 1, "at least 1, or null"),
    Rule(
        "data.columns",
        lambda c: set(c.data.columns) <= {"text", "prompt", "response", "messages"},
        "a mapping from text, prompt, response or messages to a column's name",
    ),
    Rule("data.prompt_template", lambda c: "{prompt}" in c.data.prompt_template, "a text that holds {prompt}"),
    Rule(
        "partition.stages",
        lambda c: not (c.partition.stages and c.partition.device_map),
        "empty where partition.device_map is given",
        why="there would be two maps",
        instead="leave out one of the two",
    ),
    Rule(
        "partition.rule",
        lambda c: c.partition.rule != "manual" or bool(c.partition.stages or c.partition.device_map),
        "manual only together with partition.stages or partition.device_map",
        why="a manual split is the one that you write",
        instead="write a map, or set partition.rule: parameters",
    ),
    Rule(
        "partition.rule",
        lambda c: c.partition.rule in (None, "manual") or not (c.partition.stages or c.partition.device_map),
        "manual (or left out) where partition.stages or partition.device_map is given",
        why="the map and the rule could differ",
        instead="leave out one of the two",
    ),
    Rule(
        "partition.device_map",
        lambda c: c.strategy == "local" or not any(_is_glob(key) for key in c.partition.device_map),
        "without globs unless strategy is local",
        why="a pipeline's stages are whole blocks in their order",
        instead="name them block by block, write partition.stages, or set strategy: local",
    ),
    Rule("partition.device_map", lambda c: min(c.partition.device_map.values(), default=0) >= 0, "a mapping to numbers of 0 or more"),
    Rule(
        "partition.local_overlap",
        lambda c: not c.partition.local_overlap or c.strategy == "local",
        "false unless strategy is local",
        why="a pipeline overlaps by its schedule",
        instead="leave it out, or set strategy: local",
    ),
    Rule(
        "partition.local_overlap",
        lambda c: not c.partition.local_overlap or c.devices is None or c.devices >= 2,
        "false with devices: 1",
        why="one device has nothing to overlap with",
        instead="set devices: 2 or more",
    ),
    Rule(
        "partition.local_overlap",
        lambda c: not (c.partition.local_overlap and any(_is_glob(key) for key in c.partition.device_map)),
        "false with globs in partition.device_map",
        why="overlap needs contiguous stages",
        instead="write partition.stages, or a map of whole blocks",
    ),
    Rule("partition.num_stages", lambda c: c.partition.num_stages is None or c.partition.num_stages >= 1, "at least 1"),
    Rule(
        "partition.num_stages",
        lambda c: c.partition.num_stages is None or not c.partition.stages or c.partition.num_stages == len(c.partition.stages),
        "left out, or equal to the number of entries of partition.stages",
        why="the map says how many stages there are",
        instead="leave it out",
    ),
    Rule(
        "stages_per_rank",
        lambda c: c.stages_per_rank is None or c.schedule in LOOPED_SCHEDULES or c.stages_per_rank == 1,
        "1 for the schedules gpipe and 1f1b",
        why="they run one stage a process",
        instead="take schedule: interleaved_1f1b for more",
    ),
    Rule(
        "stages_per_rank",
        lambda c: c.stages_per_rank is None or c.schedule != "zbv" or c.stages_per_rank == 2,
        "2 for the schedule zbv",
        why="its V passes each process twice",
        instead="take schedule: interleaved_zero_bubble for more",
    ),
    Rule(
        "stages_per_rank",
        lambda c: c.stages_per_rank is None or not c.schedule.startswith("interleaved") or c.stages_per_rank >= 2,
        "at least 2 for the interleaved schedules",
        why="one stage a process leaves nothing to interleave",
        instead="take schedule: 1f1b",
    ),
    Rule(
        "schedule",
        lambda c: c.strategy == "local" or not c.partition.stages or len(c.partition.stages) % _default_stages_per_rank(c) == 0,
        "one whose stages_per_rank divides the number of entries of partition.stages",
        why="every process runs equally many stages (2 for interleaved and zbv)",
        instead="change the map, stages_per_rank or the schedule",
    ),
    Rule("batch.global_size", lambda c: c.batch.global_size >= 1, "at least 1 row"),
    Rule("batch.micro_size", lambda c: c.batch.micro_size == "auto" or c.batch.micro_size >= 1, "at least 1 row"),
    Rule(
        "batch.micro_size",
        lambda c: c.batch.micro_size == "auto" or c.batch.global_size < 1 or c.batch.micro_size <= c.batch.global_size,
        "at most batch.global_size",
    ),
    Rule(
        "recompute",
        lambda c: is_recompute_policy(c.recompute),
        "none, full, offload, auto, every_N (like every_2) or a list of blocks (like [0, 2-5])",
    ),
    Rule(
        "recompute",
        lambda c: not (c.recompute == "offload" and c.schedule in ZERO_BUBBLE_SCHEDULES and c.strategy in ("auto", "pipeline")),
        "none, full, every_N or a list of blocks with a zero-bubble schedule",
        why="its split backward cannot run through fairscale's wrapper",
        instead="take recompute: full, or schedule: 1f1b",
    ),
    Rule(
        "offload.optimizer",
        lambda c: not _offloads(c) or c.strategy in ("pipeline", "zero"),
        "none or auto for strategy local and auto",
        why="DeepSpeed's engines offload, and neither has one",
        instead="set strategy: pipeline or zero",
    ),
    Rule(
        "offload.optimizer",
        lambda c: not _offloads(c) or c.optimizer.name == "adamw",
        "none or auto for optimizer.name other than adamw",
        why="DeepSpeed's CPUAdam is the one update rule that runs on the host",
        instead="set optimizer.name: adamw",
    ),
    Rule(
        "precision",
        lambda c: c.precision != "fp16" or c.adapter.type == "none" or not (_offloads(c) or c.strategy == "zero"),
        "bf16 or fp32 for an adapter with offload.optimizer or strategy: zero",
        why="adapters are fp32, and the engine of what is fp32 does not scale the loss, so gradients would vanish in fp16 activations",
        instead="set precision: bf16, or leave the adapter's small optimizer on the card with strategy: pipeline or local",
    ),
    Rule(
        "offload.optimizer",
        lambda c: c.offload.optimizer != "nvme" or (c.strategy == "zero" and c.offload.nvme_path is not None),
        "cpu, or nvme with strategy: zero and offload.nvme_path",
        why="only strategy zero swaps to a disk, and it needs a folder there",
        instead="set both, or offload.optimizer: cpu",
    ),
    Rule(
        "offload.gradients",
        lambda c: c.offload.gradients == "none" or (c.strategy == "pipeline" and c.offload.optimizer == "cpu"),
        "none, unless strategy is pipeline and offload.optimizer is cpu",
        why="they are added to what CPUAdam reads; strategy zero moves them itself from stage 2 on",
        instead="set both, or strategy: zero with zero.stage: 2",
    ),
    Rule(
        "offload.gradients",
        lambda c: c.offload.gradients == "none" or c.schedule not in ZERO_BUBBLE_SCHEDULES,
        "none with a zero-bubble schedule",
        why="its split backward writes gradients where no hook sees them",
        instead="take schedule: 1f1b, gpipe or interleaved_1f1b",
    ),
    Rule(
        "offload.parameters",
        lambda c: c.offload.parameters == "none" or (c.strategy == "zero" and c.zero.stage == 3),
        "none, unless strategy is zero and zero.stage is 3",
        why="only stage 3 gathers parameters when they are used",
        instead="set zero.stage: 3, or offload the optimizer only",
    ),
    Rule(
        "offload.parameters",
        lambda c: c.offload.parameters != "nvme" or c.offload.nvme_path is not None,
        "cpu, or nvme together with offload.nvme_path",
        why="swapping needs a folder on the disk",
        instead="set offload.nvme_path",
    ),
    Rule(
        "offload.parameters",
        lambda c: c.offload.parameters != "nvme" or c.adapter.type == "none" or c.precision == "fp32",
        "none or cpu for an adapter on weights that are not fp32",
        why="DeepSpeed's buffers to the disk have one type, and adapters are fp32",
        instead="set offload.parameters: cpu",
    ),
    Rule(
        "zero.stage",
        lambda c: c.zero.stage == 2 or c.strategy == "zero",
        "left out unless strategy is zero",
        why="in a pipeline ZeRO-2 gives wrong gradients and ZeRO-3 hangs",
        instead="set strategy: zero, or take offload.optimizer: cpu, ZeRO-1 within each stage, and offload.gradients: cpu beside it",
    ),
    Rule(
        "zero.stage",
        lambda c: c.zero.stage != 3 or c.strategy != "zero" or c.quantize == "none",
        "1 or 2 for quantised weights",
        why="bitsandbytes holds on to the weights that stage 3 gathers (nf4 until the backward pass, int8 for good), so nothing would be saved",
        instead="set zero.stage: 2, or strategy: pipeline to split them",
    ),
    Rule(
        "deepspeed",
        lambda c: not c.deepspeed or c.strategy == "zero" or c.offload.optimizer != "none",
        "empty where no DeepSpeed engine runs",
        why="nothing would read it",
        instead="set strategy: zero or offload.optimizer: cpu, or leave it out",
    ),
    Rule(
        "optimizer.name",
        lambda c: c.strategy != "zero" or c.optimizer.name == "adamw",
        "adamw for strategy: zero",
        why="DeepSpeed shards the states of its own Adam",
        instead="take strategy: pipeline or local for sgd and the 8-bit optimizers",
    ),
    Rule(
        "quantize",
        lambda c: c.quantize == "none" or c.adapter.type != "none",
        "none without an adapter",
        why="quantised weights have no gradient",
        instead="set adapter.type: lora",
    ),
    Rule("adapter.rank", lambda c: c.adapter.rank >= 1, "at least 1"),
    Rule("adapter.alpha", lambda c: c.adapter.alpha >= 1, "at least 1"),
    Rule("adapter.dropout", lambda c: 0 <= c.adapter.dropout < 1, "in [0, 1)"),
    Rule(
        "adapter.targets",
        lambda c: c.adapter.targets == "all-linear" or (isinstance(c.adapter.targets, list) and bool(c.adapter.targets)),
        "all-linear, or a list of module names or endings",
    ),
    Rule("optimizer.lr", lambda c: c.optimizer.lr > 0, "greater than 0"),
    Rule("optimizer.weight_decay", lambda c: c.optimizer.weight_decay >= 0, "0 or more"),
    Rule("optimizer.betas", lambda c: len(c.optimizer.betas) == 2 and all(0 <= b < 1 for b in c.optimizer.betas), "two numbers in [0, 1)"),
    Rule("optimizer.eps", lambda c: c.optimizer.eps > 0, "greater than 0"),
    Rule("optimizer.momentum", lambda c: 0 <= c.optimizer.momentum < 1, "in [0, 1)"),
    Rule("train.epochs", lambda c: c.train.epochs > 0, "greater than 0"),
    Rule("train.max_steps", lambda c: c.train.max_steps is None or c.train.max_steps >= 1, "at least 1, or null"),
    Rule("train.clip_norm", lambda c: c.train.clip_norm is None or c.train.clip_norm > 0, "greater than 0, or null for no clipping"),
    Rule("train.warmup_ratio", lambda c: 0 <= c.train.warmup_ratio < 1, "in [0, 1)"),
    Rule("train.warmup_steps", lambda c: c.train.warmup_steps is None or c.train.warmup_steps >= 0, "0 or more, or null"),
    Rule("train.max_skipped_updates", lambda c: c.train.max_skipped_updates >= 0, "0 or more"),
    Rule("eval.every_steps", lambda c: c.eval.every_steps is None or c.eval.every_steps >= 1, "at least 1, or null"),
    Rule("eval.full_precision_every", lambda c: c.eval.full_precision_every >= 0, "0 (never) or more"),
    Rule(
        "eval.full_precision_every",
        lambda c: c.eval.full_precision_every == 0 or c.precision != "fp32" or c.quantize != "none",
        "0 for precision: fp32 without quantize",
        why="every evaluation is at full precision already",
        instead="leave it out",
    ),
    Rule("watch.leak_steps", lambda c: c.watch.leak_steps == 0 or c.watch.leak_steps >= 5, "at least 5 updates, or 0"),
    Rule("watch.leak_mib", lambda c: c.watch.leak_mib >= 0, "0 or more"),
    Rule("checkpoint.every_steps", lambda c: c.checkpoint.every_steps is None or c.checkpoint.every_steps >= 1, "at least 1, or null"),
    Rule("checkpoint.keep", lambda c: c.checkpoint.keep >= 1, "at least 1"),
    Rule("dist.timeout_seconds", lambda c: c.dist.timeout_seconds > 0, "greater than 0"),
    Rule("dist.port", lambda c: c.dist.port is None or 1 <= c.dist.port <= 65535, "1 to 65535, or null for a free one"),
    Rule(
        "hardware",
        lambda c: is_hardware(c.hardware),
        "a list of entries like {gpu: rtx3090, memory_gib: 23.5}: gpu is the card's name, memory_gib, bandwidth_gb_s, fp32_tflops, fp16_tflops, "
        "bf16_tflops and pcie_gb_s are positive numbers, capability is like 8.6",
    ),
    Rule("devices", lambda c: c.devices is None or c.devices >= 1, "at least 1, or null"),
)
