"""What a rank runs for evaluation at full precision: updates with or without it in between, and the loss that it gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfinetune.data.batches import GlobalBatch
from mpfinetune.models.architecture import construct_model
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.full_precision import FullPrecisionForward
from tests.checkpoints import tensors_of
from tests.families import task_of
from tests.multiproc.training_cases import Problem, build, hf_config_of, make_batches, run_config


def train_and_score(problem: Problem, changes: dict[str, Any], folder: str | None, score: bool = True) -> dict[str, Any]:
    """Two updates, a score of all batches at full precision between them where ``score``."""
    strategy, batches = build(problem, changes, folder), make_batches(problem)
    strategy.train_step(batches[0], 1e-2)
    weights = tensors_of(strategy).weights  # whole on the first replica only
    result: dict[str, Any] = {"weights": copied(weights) if strategy.context.replica == 0 else {}}
    if score:
        result["loss"] = full_precision_loss(strategy, problem, changes, folder)
    strategy.train_step(batches[1], 1e-2)
    after = tensors_of(strategy)
    return {**result, "after": copied(after.weights) | copied(after.states)}


def full_precision_loss(strategy: Strategy, problem: Problem, changes: dict[str, Any], folder: str | None) -> float:
    """The mean over all batches of the problem."""
    total = torch.zeros((), dtype=torch.float64)

    def add(logits: Tensor, labels: Tensor) -> None:
        total.add_(strategy.loss_sum(logits, labels).double())

    batches = make_batches(problem)
    forward = FullPrecisionForward(strategy, run_config(problem, **changes), hf_config_of(problem), Path(folder) if folder else None)
    forward(batches, add)
    return float(strategy.context.sum_over_world(total)) / sum(batch.target_count for batch in batches)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def random_model(problem: Problem, folder: Path) -> None:
    """Weights in fp32 whose rounding to bf16 is worth something, as transformers writes them."""
    torch.manual_seed(1)
    model = construct_model(hf_config_of(problem), task_of(problem.family), "auto", torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def plain_loss(problem: Problem, folder: Path, changed: dict[str, Tensor]) -> float:
    """transformers' own model in fp32 with the files' weights, those of ``changed`` (by name) put in, row after row of the loss by hand."""
    batches: list[GlobalBatch] = make_batches(problem)
    model: Any = construct_model(hf_config_of(problem), task_of(problem.family), "auto", torch.float32)
    model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    named = dict(model.named_parameters())
    total = 0.0
    with torch.no_grad():
        for name, value in changed.items():
            named[name].copy_(value)
        for batch in batches:
            inputs = {name: tensor for name, tensor in batch.tensors.items() if name != "labels"}
            logits, labels = model(**inputs).logits, batch.tensors["labels"]
            if labels.ndim == 2:
                logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            kept = labels >= 0
            total += float(torch.nn.functional.cross_entropy(logits[kept].double(), labels[kept], reduction="sum"))
    return total / sum(batch.target_count for batch in batches)


def with_lora(weights: dict[str, Tensor], base: dict[str, Tensor], alpha: int, rank: int, dora: bool = False) -> dict[str, Tensor]:
    """The weights that adapters make of their base, by the formulas of the papers: W + alpha / rank * B A, for DoRA scaled row by row."""
    merged = {}
    for name in [name for name in weights if name.endswith(".lora_A.weight")]:
        layer = name.removesuffix(".lora_A.weight")
        weight = base[f"{layer}.weight"] + alpha / rank * weights[f"{layer}.lora_B.weight"] @ weights[name]
        if dora:
            weight = weight * (weights[f"{layer}.lora_magnitude_vector.weight"] / weight.norm(dim=1))[:, None]
        merged[f"{layer}.weight"] = weight
    return merged | {name: value for name, value in weights.items() if ".lora_" not in name}
