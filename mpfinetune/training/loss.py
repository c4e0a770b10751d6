"""Loss sums over the valid targets of a microbatch; the step divides by the number of targets of the whole update."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mpfinetune.config import ModelTask
from mpfinetune.data.rows import IGNORED


def causal_lm_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the next token, summed over labels that are not -100.

    Args:
        logits: [B, T, V]; position t predicts token t + 1.
        labels: [B, T]; -100 is left out.
    """
    targets = labels[:, 1:].reshape(-1)
    # fp32: a sum over thousands of tokens in bf16 would keep three digits.
    predictions = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    return functional.cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")


def classification_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over rows whose label is not -100. logits: [B, C]; labels: [B]."""
    return functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")


def regression_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Squared error summed over rows whose label is a number. logits: [B, 1]; labels: [B], NaN is left out."""
    valid = ~torch.isnan(labels)
    # torch.where, not a mask on the product: NaN times zero is NaN, in the gradient too.
    difference = torch.where(valid, logits.squeeze(-1).float() - torch.where(valid, labels, 0.0), 0.0)
    return difference.square().sum()


def loss_sum_for(task: ModelTask, num_labels: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a task; one label means regression."""
    if task == "causal_lm":
        return causal_lm_loss_sum
    return regression_loss_sum if num_labels == 1 else classification_loss_sum
