"""What a rank runs for evaluation at full precision: updates with or without it in between, and the loss that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpfinetune.config import RunConfig
from mpfinetune.data.batches import GlobalBatch
from mpfinetune.models.architecture import construct_model
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.full_precision import FullPrecisionForward
from mpfinetune.training.checkpoint import tensors_of
from tests.families import task_of, tiny_config
from tests.multiproc import adapter_cases, zero_cases


@dataclass(frozen=True)
class Held:
    """How a run holds its weights: a base with adapters (``adapter_cases``) where ``adapted``, else every weight learns."""

    family: str
    changes: tuple[tuple[str, Any], ...] = ()  # of the config
    adapted: bool = False


def held(family: str, adapted: bool = False, **changes: Any) -> Held:
    return Held(family, tuple(changes.items()), adapted)


def pieces(how: Held, layout: dict[str, Any], folder: str | None) -> tuple[Strategy, RunConfig, Any, list[GlobalBatch]]:
    """The strategy of this rank, its config, the model's configuration, and the batches."""
    if how.adapted:
        wanted = adapter_cases.Case(how.family, how.changes)
        strategy = adapter_cases.build(wanted, layout, folder)
        return strategy, adapter_cases.run_config(wanted, **layout), adapter_cases.hf_config_of(wanted), adapter_cases.make_batches(wanted)
    task = zero_cases.Task(how.family, dict(how.changes).get("precision", "fp32"))
    changes = {**dict(how.changes), **layout}
    return zero_cases.build(task, changes, folder), zero_cases.config_of(task, changes), tiny_config(how.family), zero_cases.batches_of(task)


def train_and_score(how: Held, layout: dict[str, Any], folder: str | None, score: bool = True) -> dict[str, Any]:
    """Two updates, a score of all batches at full precision between them where ``score``."""
    strategy, config, hf_config, batches = pieces(how, layout, folder)
    strategy.train_step(batches[0], 1e-2)
    weights = tensors_of(strategy).weights  # whole on the first replica only
    result: dict[str, Any] = {"weights": copied(weights) if strategy.context.replica == 0 else {}}
    if score:
        result["loss"] = full_precision_loss(strategy, config, hf_config, folder, batches)
    strategy.train_step(batches[1], 1e-2)
    after = tensors_of(strategy)
    return {**result, "after": copied(after.weights) | copied(after.states)}


def full_precision_loss(strategy: Strategy, config: RunConfig, hf_config: Any, folder: str | None, batches: list[GlobalBatch]) -> float:
    total = torch.zeros((), dtype=torch.float64)
    forward = FullPrecisionForward(strategy, config, hf_config, Path(folder) if folder else None)
    forward(batches, lambda logits, labels: total.add_(strategy.loss_sum(logits, labels).double()) and None)
    return float(strategy.context.sum_over_world(total)) / sum(batch.target_count for batch in batches)


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def random_model(family: str, hf_config: Any, folder: Path) -> None:
    """Weights in fp32 whose rounding to bf16 is worth something, as transformers writes them."""
    torch.manual_seed(1)
    model = construct_model(hf_config, task_of(family), "auto", torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def plain_loss(family: str, hf_config: Any, folder: Path, changed: dict[str, Tensor], batches: list[GlobalBatch]) -> float:
    """transformers' own model in fp32 with the files' weights, those of ``changed`` (by name) put in, row after row of the loss by hand."""
    model: Any = construct_model(hf_config, task_of(family), "auto", torch.float32)
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
