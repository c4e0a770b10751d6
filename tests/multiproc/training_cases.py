"""What a rank runs for the parity matrix: a few updates of a tiny model under any strategy, and the plain loop they must equal."""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpfinetune.config import ModelTask, RunConfig, config_from_dict
from mpfinetune.data.batches import GlobalBatch, LengthRule, count_targets, make_batch
from mpfinetune.data.packing import pack_rows
from mpfinetune.data.rows import Row
from mpfinetune.dist import DistContext, make_context
from mpfinetune.errors import ModelError
from mpfinetune.models.adapters import facts_with_adapters
from mpfinetune.models.architecture import load_hf_config
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.models.load import stream_seed
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies import base as strategy_base
from mpfinetune.strategies import pipeline, zero
from mpfinetune.strategies.base import StepOutcome, Strategy
from mpfinetune.strategies.build import build_stage, build_strategy
from mpfinetune.training.checkpoint import RunState, load_into, save_checkpoint, streams_of
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.optim import attach_update
from mpfinetune.training.packed_rows import refuse_rows_that_mix
from tests.checkpoints import tensors_of
from tests.families import VOCAB_SIZE, task_of, tiny_config

LR, WEIGHT_DECAY, CLIP_NORM, SEED = 1e-3, 0.1, 0.5, 7
# Not AdamW's 1e-8: a bias of the keys changes no softmax, so its gradient is rounding noise of about 1e-9, which would become a whole step.
ADAM_EPS = 1e-6
PAD_TOKEN_ID = 0
CPU = torch.device("cpu")

Shapes = tuple[tuple[int, int], ...]  # (rows, tokens) of each update
UNEVEN: Shapes = ((8, 12), (7, 9), (5, 16))


@dataclass(frozen=True)
class Problem:
    """What is trained, whatever the split: model, task, batches and update rule. Hashable, so that references can be cached."""

    family: str
    task: ModelTask | None = None  # None: the family's
    num_labels: int = 2
    shapes: Shapes = UNEVEN
    left_padded: bool = False
    token_types: bool = False
    packed: bool = False  # several rows in one; the plain loop has each alone
    ignored: bool = False  # the second update has one labelled row only, the third none
    label_counts: tuple[int, ...] = ()  # causal LM: so many labelled tokens in each row
    optimizer: tuple[tuple[str, Any], ...] = ()
    clip_norm: float | None = CLIP_NORM
    precision: str = "fp32"
    frozen: tuple[str, ...] = ()
    model_changes: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()  # further keys of the config that belong to the problem: adapter, quantize...

    @property
    def effective_task(self) -> ModelTask:
        return self.task or task_of(self.family)

    @property
    def lr(self) -> float:
        return float(dict(self.optimizer).get("lr", LR))


# Wider than the other tests' models: nf4 takes rows of 64 weights or more.
_WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 128},
    "bert": {"hidden_size": 64, "intermediate_size": 128},
    "gpt2": {"n_embd": 64},
    "deepseek_v3": {"hidden_size": 64, "intermediate_size": 128},
}


# Devices by module, cut inside the blocks.
SUB_BLOCK_MAPS: dict[str, dict[str, int]] = {
    "llama": {
        "model.embed_tokens": 0, "model.layers.*.self_attn": 0, "model.layers.*.input_layernorm": 0, "model.layers.*.mlp": 1,
        "model.layers.*.post_attention_layernorm": 1, "model.norm": 1, "lm_head": 1,
    },
    "gpt2": {"": 0, "transformer.h.*.mlp": 1, "transformer.wpe": 1, "transformer.ln_f": 1, "lm_head": 1},
    "bert": {"": 0, "bert.encoder.layer.*.attention": 1, "bert.embeddings.position_embeddings": 1, "classifier": 1},
    "mpnet": {"": 1, "mpnet.encoder.layer.*.attention": 0},
}  # fmt: skip


def adapter_problem(family: str, **config: Any) -> Problem:
    """LoRA of rank 4 unless ``config``, keys of the config, says otherwise."""
    keys = {"adapter": {"type": "lora", "rank": 4}, **config}
    return Problem(family, optimizer=(("lr", 1e-2),), model_changes=tuple(_WIDE[family].items()), config=tuple(keys.items()))


def run_config(problem: Problem, **changes: Any) -> RunConfig:
    """A config for the matrix; ``changes`` are top-level keys or sections."""
    causal = problem.effective_task == "causal_lm"
    base: dict[str, Any] = {
        "model": {"path": "in memory", "task": problem.effective_task, "init": "random"},
        "data": {"path": "in memory"} if causal else {"task": "mrpc"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": ADAM_EPS, **dict(problem.optimizer)},
        "train": {"clip_norm": problem.clip_norm, "seed": SEED},
        "precision": problem.precision,
        "frozen": list(problem.frozen),
        "run_dir": "unused",
        "device": "cpu",
        "strategy": "pipeline",
        "partition": {"rule": "uniform", "num_stages": 2},
    }
    return config_from_dict({**base, **dict(problem.config), **changes})


def local_over(**partition: Any) -> dict[str, Any]:
    """Changes of the config: one process over several devices, split as the section says."""
    return {"strategy": "local", "partition": partition}


def hf_config_of(problem: Problem) -> Any:
    return tiny_config(problem.family, num_labels=problem.num_labels, **dict(problem.model_changes))


@cache
def _facts_of_base(family: str, task: ModelTask, num_labels: int, model_changes: tuple[tuple[str, Any], ...]) -> ModelFacts:
    return inspect_model(tiny_config(family, num_labels=num_labels, **dict(model_changes)), task)


def facts_of(problem: Problem, config: RunConfig) -> ModelFacts:
    base = _facts_of_base(problem.family, config.model.task, problem.num_labels, problem.model_changes)
    return facts_with_adapters(base, config.adapter)


def make_batches(problem: Problem, packed: bool | None = None) -> list[GlobalBatch]:
    """One batch per update: rows of many lengths, padded; the last updates uneven. ``packed``: default as the problem says."""
    if problem.packed:
        return _make_packable_batches(problem, problem.packed if packed is None else packed)
    generator, lengths = torch.Generator().manual_seed(3), random.Random(5)
    batches = []
    for update, (rows, tokens) in enumerate(problem.shapes):
        mask = torch.zeros(rows, tokens, dtype=torch.int64)
        for row in range(rows):
            length = tokens if row == 0 or problem.label_counts else lengths.randint(2, tokens)
            mask[row, tokens - length if problem.left_padded else 0 : tokens if problem.left_padded else length] = 1
        input_ids = torch.where(mask == 1, torch.randint(3, VOCAB_SIZE, (rows, tokens), generator=generator), PAD_TOKEN_ID)
        tensors = {"input_ids": input_ids, "attention_mask": mask}
        if problem.token_types:
            tensors["token_type_ids"] = torch.randint(0, 2, (rows, tokens), generator=generator) * mask
        labels = _make_labels(problem, input_ids, mask, generator)
        if problem.ignored and update > 0:
            labels[1 if update == 1 else 0 :] = math.nan if labels.is_floating_point() else -100
        batches.append(GlobalBatch({**tensors, "labels": labels}, rows, count_targets(labels), int(mask.sum())))
    return batches


def _make_packable_batches(problem: Problem, packed: bool) -> list[GlobalBatch]:
    """Twice as many rows of at most half the tokens as the shapes say, the prompt of each without a loss; packed or alone."""
    lengths = random.Random(5)
    batches = []
    for rows, tokens in problem.shapes:
        alone = []
        for _ in range(2 * rows):
            ids = [lengths.randrange(3, VOCAB_SIZE) for _ in range(lengths.randint(2, tokens // 2))]
            prompt = lengths.randint(1, len(ids) - 1)
            alone.append(Row(ids, [-100] * prompt + ids[prompt:]))
        given = pack_rows(alone, tokens, "in memory", print) if packed else alone
        batches.append(make_batch(given, PAD_TOKEN_ID, LengthRule("fixed", tokens)))
    return batches


def _make_labels(problem: Problem, input_ids: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
    rows = input_ids.shape[0]
    if problem.effective_task == "causal_lm":
        labels = torch.where(mask == 1, input_ids, -100)
        for row, count in enumerate(problem.label_counts):
            labels[row, 1 + count :] = -100  # the label of position 0 is never a target
        return labels
    if problem.num_labels == 1:
        scores = torch.randn(rows, generator=generator)
        scores[1::3] = math.nan
        return scores
    return torch.randint(0, problem.num_labels, (rows,), generator=generator)


def build(problem: Problem, changes: dict[str, Any], folder: str | Path | None = None, devices: tuple[torch.device, ...] = (CPU, CPU)) -> Strategy:
    """The strategy of this rank with its update, as a run builds it.

    Args:
        folder: None draws the weights.
        devices: of `strategy: local`; the ranks of the others have the CPU.
    """
    config = run_config(problem, **changes)
    facts = facts_of(problem, config)
    distributed = dist.is_initialized() and config.strategy != "local"
    world = dist.get_world_size() if distributed else None
    plan = make_plan(config, facts, World("cpu", len(devices), world))
    context = DistContext(0, 1, devices[0], devices=devices)
    if world is not None:
        context = make_context(dist.get_rank(), world, CPU, plan.pipeline_ranks, timedelta(seconds=60))
    loss_sum: Any = loss_sum_for(config.model.task, problem.num_labels)
    strategy, _ = build_strategy(config, hf_config_of(problem), facts, plan, context, loss_sum, Path(folder) if folder else None)
    attach_update(strategy, config)
    return strategy


def train(
    problem: Problem,
    changes: dict[str, Any],
    folder: str | None = None,
    updates: tuple[int, int | None] = (0, None),
    resume: str | None = None,
    save: str | None = None,
    poison: tuple[int, str, float] | None = None,
    stop_rank: int | None = None,
) -> dict[str, Any]:
    """``run_updates`` on a strategy built for it, from a checkpoint's folder and into a folder of checkpoints where these are given."""
    strategy = build(problem, changes, folder)
    if resume is not None:
        load_into(strategy, Path(resume))
    result = run_updates(strategy, problem, updates, poison, stop_rank)
    if save is not None:
        save_checkpoint(Path(save), RunState(step=len(result["losses"])), streams_of(strategy), strategy.context)
    return result


def run_updates(
    strategy: Strategy,
    problem: Problem,
    updates: tuple[int, int | None] = (0, None),
    poison: tuple[int, str, float] | None = None,
    stop_rank: int | None = None,
) -> dict[str, Any]:
    """Updates over the problem's batches from the first to before the last of ``updates``, with an evaluation before the last of them.

    ``poison`` = (update, parameter, value): the gradient of that parameter is that value there. ``stop_rank`` asks to stop at update 1.
    """
    rank = strategy.context.rank
    batches = make_batches(problem)[slice(*updates)]
    outcomes: list[StepOutcome] = []
    logits: list[Tensor] = []
    still = {name: p.detach().clone() for name, p in strategy.named_parameters().items() if not p.requires_grad}
    for step, batch in enumerate(batches):
        if step == len(batches) - 1:
            strategy.evaluate(batch, lambda out, labels: logits.append(out.detach().float().cpu()))
        torch.manual_seed(stream_seed(SEED, "update", step, rank))  # as the training loop does
        with _poisoned(strategy, poison if poison is not None and poison[0] == step else None):
            stops = rank == stop_rank and step == 1
            outcomes.append(strategy.train_step(batch, problem.lr, stop_requested=lambda stops=stops: stops))
    saved, parameters = tensors_of(strategy), strategy.named_parameters()
    if strategy.plan.zero_stage == 3:  # the parameters themselves are parts; rank 0 has what a checkpoint holds, whole
        assert strategy.update is not None
        left_out = dict(strategy.update.full_weights(sorted(parameters.keys() - strategy.saved_names())))
        held = left_out | saved.weights if strategy.context.replica == 0 else {}
    else:
        held = {name: parameter.detach() for name, parameter in parameters.items() if parameter.is_floating_point()}
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "skipped": [outcome.skipped for outcome in outcomes],
        "stops": [outcome.stop_requested for outcome in outcomes],
        "parameters": {name: tensor.float().cpu().clone() for name, tensor in held.items()},
        "moments": {name: tensor.float().clone() for name, tensor in saved.states.items()},
        "logits": torch.cat(logits) if logits else None,
        "types": {name: getattr(parameter, "ds_tensor", parameter).dtype for name, parameter in parameters.items()},
        "first_held": sorted(strategy.first_held_names()),
        "frozen_changed": [name for name, before in still.items() if not torch.equal(before, parameters[name])],
        "replica": strategy.context.replica,
    }


def _poisoned(strategy: Strategy, poison: tuple[int, str, float] | None) -> Any:
    """A context in which the backward pass gives the parameter a gradient of the value only."""
    parameter = strategy.named_parameters().get(poison[1]) if poison is not None else None
    if parameter is None or poison is None:
        return mock.MagicMock()
    return parameter.register_hook(lambda gradient: torch.full_like(gradient, poison[2]))


def error_of_a_forgotten_parameter(**arguments: Any) -> str:
    """What ``train`` raises on a model that has a parameter which its forward does not use; on every rank, so the ranks can go on."""
    attach = attach_update

    def add_and_attach(strategy: Strategy, config: RunConfig) -> Any:
        next(iter(strategy.stages.values())).model.register_parameter("forgotten", nn.Parameter(torch.zeros(2)))
        return attach(strategy, config)

    with mock.patch(f"{__name__}.attach_update", add_and_attach):
        try:
            train(**arguments)
        except ModelError as error:
            return str(error)
    return "nothing"


def error_of_packed_rows(problem: Problem, changes: dict[str, Any]) -> str:
    """What a run with packed rows says of its model before the first update."""
    try:
        refuse_rows_that_mix(build(problem, changes), VOCAB_SIZE)
    except ModelError as error:
        return str(error)
    return "nothing"


def train_from_small_groups(**arguments: Any) -> dict[str, Any]:
    """As ``train``, but a checkpoint is read one parameter at a time."""
    with mock.patch.object(strategy_base, "CHECKPOINT_BYTES_AT_ONCE", 1):
        return train(**arguments)


def train_with_small_cache(**arguments: Any) -> dict[str, Any]:
    """As ``train``, with room for the buffers of one shape only: each schedule is dropped as soon as another is needed."""
    with mock.patch.object(pipeline, "_CACHED_BUFFER_BYTES", 1):
        return train(**arguments)


def dropout_masks(problem: Problem, changes: dict[str, Any]) -> dict[str, Any]:
    """One update; for each dropout call of this rank, which elements were kept. The blocks of all stages have the same shapes."""
    masks: list[Tensor] = []
    original = nn.functional.dropout

    def recorded(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p > 0 and type(values) is Tensor:  # not the fake tensors of the model's inspection
            masks.append(original(torch.ones_like(values), p, training) != 0)
            return values * masks[-1] / (1 - p)
        return original(values, p, training, inplace)

    with mock.patch.object(nn.functional, "dropout", recorded):
        result = train(problem, changes)
    return {**result, "masks": masks}


def plain_loop(problem: Problem) -> dict[str, Any]:
    """The plainest PyTorch loop on the whole model: one forward, one backward, clip_grad_norm_, torch's optimizer on fp32 weights.

    In bf16 the model holds rounded copies of them.
    """
    hf_config = hf_config_of(problem)
    config = run_config(problem, strategy="local", partition={}, frozen=[])
    facts = facts_of(problem, config)
    stage, _ = build_stage(config, hf_config, facts, StageSpan(0, facts.num_blocks, True, True), CPU, None)
    model: Any = stage.model  # whole: transformers' own module, nothing replaced
    learning = {n: p for n, p in model.named_parameters() if not any(fnmatch(n, pattern) for pattern in problem.frozen)}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learning)
    masters = {name: nn.Parameter(parameter.detach().float().clone()) for name, parameter in learning.items()}
    optimizer = _plain_optimizer(problem, masters)
    losses, norms, logits = [], [], None
    batches = make_batches(problem, packed=False)
    for step, batch in enumerate(batches):
        inputs = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
        if step == len(batches) - 1:
            model.eval()
            with torch.no_grad():
                logits = model(**inputs).logits.float()
            model.train()
        loss = _plain_loss(model(**inputs).logits.float(), batch.tensors["labels"])
        loss.backward()
        for name, parameter in learning.items():
            masters[name].grad = None if parameter.grad is None else parameter.grad.float()
        max_norm = math.inf if problem.clip_norm is None else problem.clip_norm
        norms.append(float(nn.utils.clip_grad_norm_(masters.values(), max_norm)))
        losses.append(loss.item())
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for name, parameter in learning.items():
                parameter.copy_(masters[name])
    parameters = {facts.canonical_name(name): p.detach().float().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "parameters": parameters, "logits": None if problem.packed else logits}


def _plain_optimizer(problem: Problem, masters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    decayed, rest = [], []
    for name, parameter in masters.items():
        is_matrix = parameter.ndim > 1 and "bias" not in name.split(".")[-1]
        (decayed if is_matrix else rest).append(parameter)
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    settings = dict(problem.optimizer)
    if settings.get("name") == "sgd":
        return torch.optim.SGD(groups, lr=problem.lr, momentum=settings["momentum"])
    return torch.optim.AdamW(groups, lr=problem.lr, eps=ADAM_EPS)


def _plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the targets that count, picked out beforehand; 0 where there are none."""
    if labels.is_floating_point():
        kept = [row for row in range(len(labels)) if not math.isnan(labels[row])]
        return nn.functional.mse_loss(logits[kept, 0], labels[kept]) if kept else logits.sum() * 0.0
    if labels.ndim == 2:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    kept = [target for target in range(len(labels)) if labels[target] >= 0]
    return nn.functional.cross_entropy(logits[kept], labels[kept]) if kept else logits.sum() * 0.0


def differences(result: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Largest absolute difference of the losses, the norms, the evaluation's logits and of every parameter that the result holds."""
    found = {key: max(abs(a - b) for a, b in zip(result[key], reference[key], strict=True)) for key in ("losses", "norms")}
    found |= {name: largest_gap(value, reference["parameters"][name]) for name, value in result["parameters"].items()}
    if result["logits"] is not None and reference["logits"] is not None:  # the plain loop has the logits of other rows, if they are packed
        found["logits"] = largest_gap(result["logits"][: len(reference["logits"])], reference["logits"])
    return found


def largest_gap(left: Tensor, right: Tensor) -> float:
    assert left.shape == right.shape, f"{tuple(left.shape)} against {tuple(right.shape)}"
    return float((left - right).abs().max())


def worst_of(found: dict[str, float]) -> tuple[str, float]:
    """The largest difference and where it is; NaN counts as larger than any number."""
    name = max(found, key=lambda key: math.inf if math.isnan(found[key]) else found[key])
    return name, found[name]


def load_bytes_of_stage_3(folder: str, part_bytes: int) -> dict[str, float]:
    """Memory of this process while ZeRO-3 reads a llama from its files: bytes of the whole, of the largest part, of the peak."""
    config = run_config(Problem("llama"), strategy="zero", partition={}, zero={"stage": 3}, model={"path": folder, "task": "causal_lm"})
    hf_config = load_hf_config(config.model, None)
    facts = inspect_model(hf_config, "causal_lm")
    plan = make_plan(config, facts, World("cpu", 2, dist.get_world_size()))
    context = make_context(dist.get_rank(), dist.get_world_size(), CPU, 1, timedelta(seconds=60))
    zero.join_deepspeed(context)
    parts = zero.part_spans(facts, plan.spans[0], 4, part_bytes)
    process, seen, done = psutil.Process(), [0.0], threading.Event()
    before = process.memory_full_info().uss

    def watch() -> None:
        while not done.is_set():
            seen.append(float(process.memory_full_info().uss - before))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with mock.patch.object(zero, "part_spans", lambda *_: parts):
        strategy, _ = build_strategy(config, hf_config, facts, plan, context, loss_sum_for("causal_lm", 2), Path(folder))
    done.set()
    watcher.join()
    held: Any = strategy.named_parameters().values()
    assert all(parameter.numel() == 0 for parameter in held if parameter.ds_persist is False)
    largest = max(facts.numel(part.parameter_names(facts)) for part in parts) * 4
    return {"whole": facts.numel(facts.parameters) * 4, "largest_part": largest, "peak": max(seen)}
