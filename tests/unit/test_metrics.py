"""Scores against values worked out by hand, and nothing of the logits kept."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import weakref

import pytest
import torch

from mpfinetune.data.tasks import GLUE_TASKS
from mpfinetune.training.metrics import METRIC_NAMES, StreamingMetrics, compute_from


def logits_for(predictions: list[int], classes: int = 2) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(predictions), classes).float()


def test_classification_scores_by_hand() -> None:
    # class 1: 3 true positives, 1 false positive, 2 false negatives; 4 true negatives
    predictions = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0, 0])
    labels = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0, 0, 0])
    scores = compute_from(predictions, labels, ("accuracy", "f1", "matthews_correlation"))
    assert scores["accuracy"] == pytest.approx(0.7)
    assert scores["f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 2))
    assert scores["matthews_correlation"] == pytest.approx((3 * 4 - 1 * 2) / math.sqrt(4 * 5 * 5 * 6))
    assert all(type(score) is float for score in scores.values())


def test_correlations_by_hand() -> None:
    predictions = torch.tensor([1.0, 2.0, 3.0, 4.0, 50.0], dtype=torch.float64)
    labels = torch.tensor([1.0, 3.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    scores = compute_from(predictions, labels, ("pearson", "spearmanr"))
    assert scores["spearmanr"] == pytest.approx(1 - 6 * 2 / (5 * 24))
    centred = [predictions - predictions.mean(), labels - labels.mean()]
    assert scores["pearson"] == pytest.approx(float(centred[0] @ centred[1] / (centred[0].norm() * centred[1].norm())))


def test_batches_add_up_and_ignored_rows_are_left_out() -> None:
    metrics = StreamingMetrics(("accuracy", "f1"), regression=False)
    metrics.update(logits_for([1, 0, 1]).bfloat16(), torch.tensor([1, 1, -100]))
    metrics.update(logits_for([0, 1]), torch.tensor([-100, 0]))
    predictions, labels = metrics.predictions()
    assert (predictions.tolist(), labels.tolist()) == ([1, 0, 1], [1, 1, 0])
    assert metrics.compute() == pytest.approx({"accuracy": 1 / 3, "f1": 0.5})
    metrics.reset()
    metrics.update(logits_for([1, 0]), torch.tensor([1, 0]))
    assert metrics.compute() == {"accuracy": 1.0, "f1": 1.0}


def test_regression_leaves_nan_labels_out() -> None:
    metrics = StreamingMetrics(("pearson", "spearmanr"), regression=True)
    metrics.update(torch.tensor([[1.0], [2.0], [99.0]]), torch.tensor([1.0, 2.0, math.nan]))
    metrics.update(torch.tensor([[3.0]]), torch.tensor([3.0]))
    assert metrics.predictions()[0].dtype == torch.float64
    assert metrics.compute() == pytest.approx({"pearson": 1.0, "spearmanr": 1.0}, abs=1e-5)


def test_gathered_replicas_equal_one_process() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(40, 2, generator=generator), torch.randint(0, 2, (40,), generator=generator)
    names = ("accuracy", "f1", "matthews_correlation")
    whole, *replicas = [StreamingMetrics(names, regression=False) for _ in range(3)]
    whole.update(logits, labels)
    replicas[0].update(logits[:13], labels[:13])
    replicas[1].update(logits[13:], labels[13:])
    parts = [replica.predictions() for replica in replicas]
    gathered = compute_from(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), names)
    assert gathered == pytest.approx(whole.compute())


def test_pearson_of_a_nearly_constant_model() -> None:
    predictions = 3.0 + 1e-6 * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    labels = torch.tensor([1.0, 2.0, 3.0, 5.0], dtype=torch.float64)
    assert compute_from(predictions, labels, ("pearson",))["pearson"] == pytest.approx(0.98270763)


@pytest.mark.filterwarnings("ignore:The variance of predictions")
def test_undefined_correlations_are_zero_and_diverged_ones_nan() -> None:
    constant, varied = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 0, 1])
    assert compute_from(constant, varied, ("matthews_correlation",)) == {"matthews_correlation": 0.0}
    assert compute_from(constant, constant, ("matthews_correlation", "accuracy")) == {"matthews_correlation": 0.0, "accuracy": 1.0}
    assert compute_from(constant.double(), varied.double(), ("pearson", "spearmanr")) == {"pearson": 0.0, "spearmanr": 0.0}
    diverged = torch.full((4,), math.nan, dtype=torch.float64)
    assert math.isnan(compute_from(diverged, varied.double(), ("pearson",))["pearson"])


def test_nothing_scored_is_an_error_and_an_empty_replica_is_not() -> None:
    metrics = StreamingMetrics(("accuracy",), regression=False)
    assert metrics.predictions()[0].shape == (0,)
    with pytest.raises(ValueError, match="no labelled row"):
        metrics.compute()
    assert StreamingMetrics((), regression=False).compute() == {}


def test_logits_die_after_the_batch() -> None:
    for regression in (False, True):
        metrics = StreamingMetrics(("accuracy",), regression)
        logits = torch.randn(4, 1 if regression else 3, requires_grad=True) * 1.0
        storage = weakref.ref(logits)
        metrics.update(logits, torch.zeros(4) if regression else torch.zeros(4, dtype=torch.int64))
        kept = metrics.predictions()[0]
        assert not kept.requires_grad
        del logits
        gc.collect()
        assert storage() is None
    assert len(metrics.predictions()[0].untyped_storage()) == 4 * 8


def test_all_glue_metrics_exist() -> None:
    assert {name for task in GLUE_TASKS.values() for name in (*task.metrics, task.best_metric)} == set(METRIC_NAMES)
    assert all(task.best_metric in task.metrics for task in GLUE_TASKS.values())


def test_torchmetrics_is_imported_lazily() -> None:
    heavy = ("torchmetrics", "datasets", "transformers")
    code = f"import sys, mpfinetune.training.metrics, mpfinetune.data.tasks; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
