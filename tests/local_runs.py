"""A few updates under `strategy: local` over several devices, and how far they are from the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfinetune.dist import DistContext
from mpfinetune.models.facts import inspect_model
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.build import build_strategy
from mpfinetune.strategies.update import PlainUpdate
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.optim import NamedOptimizer
from tests.multiproc.training_cases import LR, Problem, hf_config_of, make_batches, run_config

CPU = torch.device("cpu")


def build_local(
    problem: Problem, partition: dict[str, Any], devices: tuple[torch.device, ...] = (CPU, CPU), folder: Path | None = None, **changes: Any
) -> Strategy:
    """The strategy with its optimizer, over the given devices; ``partition`` is the config's section, ``folder`` None draws the weights."""
    config = run_config(problem, strategy="local", partition=partition, devices=len(devices), **changes)
    hf_config = hf_config_of(problem)
    facts = inspect_model(hf_config, config.model.task)
    plan = make_plan(config, facts, World("cpu", len(devices)))
    loss_sum: Any = loss_sum_for(config.model.task, problem.num_labels)
    strategy, _ = build_strategy(config, hf_config, facts, plan, DistContext(0, 1, devices[0], devices=devices), loss_sum, folder)
    strategy.update = PlainUpdate(strategy, NamedOptimizer(strategy.named_parameters(), config.optimizer), config.train.clip_norm)
    return strategy


def run_updates(strategy: Strategy, problem: Problem) -> dict[str, Any]:
    """Losses, norms and parameters after the problem's updates, and the logits of the last batch before its update."""
    losses, norms, logits = [], [], []
    batches = make_batches(problem)
    for step, batch in enumerate(batches):
        if step == len(batches) - 1:
            strategy.evaluate(batch, lambda out, labels: logits.append(out.detach().float().cpu()))
        outcome = strategy.train_step(batch, LR)
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    parameters = {name: parameter.detach().float().cpu() for name, parameter in strategy.named_parameters().items()}
    return {"losses": losses, "norms": norms, "parameters": parameters, "logits": torch.cat(logits)[: batches[-1].row_count]}


def largest_difference(result: dict[str, Any], reference: dict[str, Any]) -> float:
    """Over losses, norms, logits and every parameter."""
    assert result["parameters"].keys() == reference["parameters"].keys()

    def gap(a: Tensor, b: Tensor) -> float:
        return float((a - b).abs().max())

    scalars = [gap(torch.tensor(result[key]), torch.tensor(reference[key])) for key in ("losses", "norms")]
    return max(*scalars, gap(result["logits"], reference["logits"]), *(gap(p, reference["parameters"][n]) for n, p in result["parameters"].items()))
