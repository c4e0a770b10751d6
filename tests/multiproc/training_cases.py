"""What a rank runs for the parity matrix: a few updates of a tiny model under any strategy, and the plain loop they must equal."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpfinetune.config import ModelTask, RunConfig, config_from_dict
from mpfinetune.data.batches import GlobalBatch, count_targets
from mpfinetune.dist import DistContext, make_context
from mpfinetune.models.facts import inspect_model
from mpfinetune.models.load import stream_seed
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies import pipeline
from mpfinetune.strategies.base import StepOutcome, Strategy
from mpfinetune.strategies.build import build_stage, build_strategy
from mpfinetune.strategies.update import LossScale, PlainUpdate
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.optim import NamedOptimizer
from tests.families import VOCAB_SIZE, task_of, tiny_config

LR, WEIGHT_DECAY, CLIP_NORM, SEED = 1e-3, 0.1, 0.5, 7
# Not AdamW's 1e-8: a bias of the keys changes no softmax, so its gradient is rounding noise of about 1e-9, which would become a whole step.
ADAM_EPS = 1e-6
PAD_TOKEN_ID = 0

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
    ignored: bool = False  # the second update has one labelled row only, the third none
    label_counts: tuple[int, ...] = ()  # causal LM: so many labelled tokens in each row
    optimizer: tuple[tuple[str, Any], ...] = ()
    clip_norm: float | None = CLIP_NORM
    precision: str = "fp32"
    model_changes: tuple[tuple[str, Any], ...] = ()

    @property
    def effective_task(self) -> ModelTask:
        return self.task or task_of(self.family)


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
        "run_dir": "unused",
        "device": "cpu",
        "strategy": "pipeline",
        "partition": {"rule": "uniform", "num_stages": 2},
    }
    return config_from_dict({**base, **changes})


def hf_config_of(problem: Problem) -> Any:
    return tiny_config(problem.family, num_labels=problem.num_labels, **dict(problem.model_changes))


def make_batches(problem: Problem) -> list[GlobalBatch]:
    """One batch per update: rows of many lengths, padded; the last updates uneven."""
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


def build(problem: Problem, changes: dict[str, Any], folder: str | None = None) -> Strategy:
    """The strategy of this rank with its optimizer, as a run builds it."""
    config, hf_config = run_config(problem, **changes), hf_config_of(problem)
    facts = inspect_model(hf_config, config.model.task)
    distributed = dist.is_initialized() and config.strategy != "local"
    world = dist.get_world_size() if distributed else 1
    plan = make_plan(config, facts, World("cpu", 2, world))
    context = DistContext(0, 1, torch.device("cpu"))
    if distributed:
        context = make_context(dist.get_rank(), world, torch.device("cpu"), plan.pipeline_ranks, timedelta(seconds=60))
    loss_sum: Any = loss_sum_for(config.model.task, problem.num_labels)
    strategy, _ = build_strategy(config, hf_config, facts, plan, context, loss_sum, Path(folder) if folder else None)
    optimizer = NamedOptimizer(strategy.named_parameters(), config.optimizer, facts.embeddings)
    strategy.update = PlainUpdate(strategy, optimizer, config.train.clip_norm, LossScale.for_precision(config.precision))
    return strategy


def train(
    problem: Problem, changes: dict[str, Any], folder: str | None = None, poison: tuple[int, str, float] | None = None, stop_rank: int | None = None
) -> dict[str, Any]:
    """Updates over the problem's batches, with an evaluation of the last batch before the last update.

    ``poison`` = (update, parameter, value): the gradient of that parameter is that value there. ``stop_rank`` asks to stop at update 1.
    """
    strategy = build(problem, changes, folder)
    rank = strategy.context.rank
    batches = make_batches(problem)
    outcomes: list[StepOutcome] = []
    logits: list[Tensor] = []
    for step, batch in enumerate(batches):
        if step == len(batches) - 1:
            strategy.evaluate(batch, lambda out, labels: logits.append(out.detach().float().clone()))
        torch.manual_seed(stream_seed(SEED, "update", step, rank))  # as the training loop does
        with _poisoned(strategy, poison if poison is not None and poison[0] == step else None):
            stops = rank == stop_rank and step == 1
            outcomes.append(strategy.train_step(batch, LR, stop_requested=lambda stops=stops: stops))
    assert strategy.update is not None
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "norms": [outcome.grad_norm for outcome in outcomes],
        "skipped": [outcome.skipped for outcome in outcomes],
        "stops": [outcome.stop_requested for outcome in outcomes],
        "parameters": {name: p.detach().float().clone() for name, p in strategy.named_parameters().items()},
        "moments": {name: tensor.clone() for name, tensor in strategy.update.state_tensors().items()},
        "logits": torch.cat(logits) if logits else None,
        "first_held": sorted(strategy.first_held_names()),
        "replica": strategy.context.replica,
    }


def _poisoned(strategy: Strategy, poison: tuple[int, str, float] | None) -> Any:
    """A context in which the backward pass gives the parameter a gradient of the value only."""
    parameter = strategy.named_parameters().get(poison[1]) if poison is not None else None
    if parameter is None or poison is None:
        return mock.MagicMock()
    return parameter.register_hook(lambda gradient: torch.full_like(gradient, poison[2]))


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
    """The plainest PyTorch loop on the whole model: one forward, one backward, clip_grad_norm_, torch's optimizer."""
    hf_config = hf_config_of(problem)
    facts = inspect_model(hf_config, problem.effective_task)
    config = run_config(problem, strategy="local", partition={})
    stage, _ = build_stage(config, hf_config, facts, StageSpan(0, facts.num_blocks, True, True), torch.device("cpu"), None)
    model: Any = stage.model  # whole: transformers' own module, nothing replaced
    optimizer = _plain_optimizer(problem, model)
    losses, norms, logits = [], [], None
    batches = make_batches(problem)
    for step, batch in enumerate(batches):
        inputs = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
        if step == len(batches) - 1:
            model.eval()
            with torch.no_grad():
                logits = model(**inputs).logits
            model.train()
        loss = _plain_loss(model(**inputs).logits, batch.tensors["labels"])
        loss.backward()
        max_norm = math.inf if problem.clip_norm is None else problem.clip_norm
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "parameters": {n: p.detach().clone() for n, p in model.named_parameters()}, "logits": logits}


def _plain_optimizer(problem: Problem, model: nn.Module) -> torch.optim.Optimizer:
    decayed, rest = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim > 1 and "bias" not in name.split(".")[-1]
        (decayed if is_matrix else rest).append(parameter)
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
    settings = dict(problem.optimizer)
    if settings.get("name") == "sgd":
        return torch.optim.SGD(groups, lr=LR, momentum=settings["momentum"])
    return torch.optim.AdamW(groups, lr=LR, eps=ADAM_EPS)


def _plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over the targets that count, picked out beforehand; 0 where there are none."""
    if labels.is_floating_point():
        kept = [row for row in range(len(labels)) if not math.isnan(labels[row])]
        return nn.functional.mse_loss(logits[kept, 0], labels[kept]) if kept else logits.sum() * 0.0
    if labels.ndim == 2:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    kept = [target for target in range(len(labels)) if labels[target] >= 0]
    return nn.functional.cross_entropy(logits[kept], labels[kept]) if kept else logits.sum() * 0.0
