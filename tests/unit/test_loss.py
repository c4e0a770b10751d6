"""Loss sums against the definition, target by target."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mpfinetune.data.batches import count_targets
from mpfinetune.training.loss import causal_lm_loss_sum, classification_loss_sum, loss_sum_for, regression_loss_sum

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def test_next_token() -> None:
    logits, labels = normal(2, 4, 5), torch.tensor([[1, 2, -100, 3], [4, -100, -100, 0]])
    log_probabilities = logits.log_softmax(-1)
    # Position t predicts token t + 1; the first label of a row is never a target.
    expected = -(log_probabilities[0, 0, 2] + log_probabilities[0, 2, 3] + log_probabilities[1, 2, 0])
    torch.testing.assert_close(causal_lm_loss_sum(logits, labels), expected)
    assert count_targets(labels) == 3


def test_classes() -> None:
    logits, labels = normal(4, 3), torch.tensor([2, -100, 0, 1])
    log_probabilities = logits.log_softmax(-1)
    expected = -(log_probabilities[0, 2] + log_probabilities[2, 0] + log_probabilities[3, 1])
    torch.testing.assert_close(classification_loss_sum(logits, labels), expected)
    assert count_targets(labels) == 3


def test_scores() -> None:
    logits = normal(3, 1).requires_grad_()
    labels = torch.tensor([1.5, math.nan, -2.0])
    loss = regression_loss_sum(logits, labels)
    torch.testing.assert_close(loss, (logits[0, 0] - 1.5) ** 2 + (logits[2, 0] + 2.0) ** 2)
    assert count_targets(labels) == 2
    loss.backward()
    assert logits.grad is not None and logits.grad[1].item() == 0.0 and torch.isfinite(logits.grad).all()


CASES = [
    ("causal_lm", 2, (3, 5, 7), torch.full((3, 5), -100)),
    ("sequence_classification", 2, (3, 2), torch.full((3,), -100)),
    ("sequence_classification", 1, (3, 1), torch.full((3,), math.nan)),
]


@pytest.mark.parametrize(("task", "num_labels", "shape", "labels"), CASES, ids=["next-token", "classes", "scores"])
def test_nothing_labelled_is_zero_with_zero_gradients(task: str, num_labels: int, shape: tuple[int, ...], labels: Tensor) -> None:
    logits = normal(*shape).requires_grad_()
    loss = loss_sum_for(task, num_labels)(logits, labels)  # type: ignore[arg-type]
    loss.backward()
    assert loss.item() == 0.0 and count_targets(labels) == 0
    assert logits.grad is not None and not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("task", "num_labels", "shape", "labels"), CASES, ids=["next-token", "classes", "scores"])
def test_sums_are_scalars_in_fp32(task: str, num_labels: int, shape: tuple[int, ...], labels: Tensor, dtype: torch.dtype) -> None:
    valid = torch.zeros_like(labels)
    loss = loss_sum_for(task, num_labels)(normal(*shape).to(dtype), valid)  # type: ignore[arg-type]
    assert loss.shape == () and loss.dtype == torch.float32 and loss > 0


@pytest.mark.parametrize(("task", "num_labels", "shape", "labels"), CASES, ids=["next-token", "classes", "scores"])
def test_the_sum_of_the_parts_is_the_sum_of_the_whole(task: str, num_labels: int, shape: tuple[int, ...], labels: Tensor) -> None:
    loss_sum = loss_sum_for(task, num_labels)  # type: ignore[arg-type]
    logits, labels = normal(*shape), torch.zeros_like(labels)
    parts = [loss_sum(logits[row : row + 1], labels[row : row + 1]) for row in range(3)]
    torch.testing.assert_close(torch.stack(parts).sum(), loss_sum(logits, labels))
