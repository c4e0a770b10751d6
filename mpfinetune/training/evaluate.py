"""Scores on the held-out rows, streamed: neither logits nor hidden states outlive their microbatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mpfinetune.data.batches import GlobalBatch, UpdateLoader
from mpfinetune.data.tasks import LoadedData
from mpfinetune.strategies.base import Observer, Strategy
from mpfinetune.training.metrics import StreamingMetrics, compute_from

# Runs the forward passes of all batches and shows each microbatch's (logits, labels) to the observer.
Forward = Callable[[Iterable[GlobalBatch], Observer], None]


def evaluate(strategy: Strategy, loader: UpdateLoader, data: LoadedData, forward: Forward | None = None) -> dict[str, float]:
    """Mean loss over all valid targets and the task's metrics, equal on every rank; collective.

    For causal LM ``perplexity`` is the exponential of the loss.

    Args:
        forward: default: the strategy's own forward passes.
    """
    context = strategy.context
    metrics = StreamingMetrics(data.metric_names, data.regression)
    loss_sum = torch.zeros((), dtype=torch.float64, device=context.device)
    targets = 0

    def observe(logits: Tensor, labels: Tensor) -> None:
        loss_sum.add_(strategy.loss_sum(logits, labels).double().to(loss_sum.device))
        if data.metric_names:
            metrics.update(logits, labels)

    def counted() -> Iterator[GlobalBatch]:
        nonlocal targets
        for batch in loader.batches(epoch=0):
            targets += batch.target_count
            yield batch

    if forward is not None:
        forward(counted(), observe)
    else:
        for batch in counted():
            strategy.evaluate(batch, observe)
    loss = float(context.sum_over_world(loss_sum)) / max(1, targets)
    if not data.metric_names:
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    # A class or a score per row, a few bytes: the replicas' parts fit into one message.
    parts: list[Any] = [part for part in context.gather_objects(metrics.predictions() if strategy.has_logits else None) if part is not None]
    predictions, labels = (torch.cat([part[index].cpu() for part in parts]) for index in (0, 1))
    return {"loss": loss, **compute_from(predictions, labels, data.metric_names)}
