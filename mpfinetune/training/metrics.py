"""GLUE's scores, streamed: of each batch only the predictions are kept (8 bytes a row), never the logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpfinetune.data.rows import IGNORED  # of a class label; a score's is NaN


class StreamingMetrics:
    """Collects predictions batch by batch.

    With several replicas, each updates its own and the loop gathers ``predictions()``; ``compute_from`` then scores them all: a mean of the
    replicas' F1 or correlations would be wrong.
    """

    def __init__(self, metric_names: Sequence[str], regression: bool) -> None:
        unknown = [name for name in metric_names if name not in METRIC_NAMES]
        assert not unknown, f"unknown metrics {unknown}"
        self.metric_names = tuple(metric_names)
        self.regression = regression
        self.reset()

    def reset(self) -> None:
        self._predictions: list[Tensor] = []
        self._labels: list[Tensor] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits [R, C], labels [R] int64 (-100 = left out) or, for regression, C = 1 and labels [R] float (NaN = left out)."""
        if self.regression:
            predictions, labels = logits.detach()[:, 0].to("cpu", torch.float64), labels.to("cpu", torch.float64)
            scored = ~labels.isnan()  # [R]
        else:
            predictions, labels = logits.detach().argmax(dim=-1).cpu(), labels.to("cpu", torch.int64)
            scored = labels != IGNORED  # [R]
        self._predictions.append(predictions[scored])
        self._labels.append(labels[scored])

    def predictions(self) -> tuple[Tensor, Tensor]:
        """Predictions [N] and labels [N] so far, int64 (classes) or float64 (scores), on the CPU; N = 0 where no row was scored."""
        dtype = torch.float64 if self.regression else torch.int64
        empty = torch.empty(0, dtype=dtype)
        return torch.cat([empty, *self._predictions]), torch.cat([empty, *self._labels])

    def compute(self) -> dict[str, float]:
        """The scores of everything since the last reset.

        Raises:
            ValueError: no row was scored.
        """
        return compute_from(*self.predictions(), self.metric_names)


def compute_from(predictions: Tensor, labels: Tensor, metric_names: Sequence[str]) -> dict[str, float]:
    """The named scores of predictions [N] against labels [N], as plain floats; order of the rows does not matter.

    Raises:
        ValueError: N is 0.
    """
    if metric_names and len(labels) == 0:
        raise ValueError("no labelled row to score")
    return {name: float(METRIC_NAMES[name](predictions, labels)) for name in metric_names}


# torchmetrics takes seconds to import, so each score does it when it is wanted.


def _accuracy(predictions: Tensor, labels: Tensor) -> Tensor:
    from torchmetrics.functional.classification import multiclass_accuracy

    return multiclass_accuracy(predictions, labels, num_classes=_class_count(predictions, labels), average="micro")


def _f1(predictions: Tensor, labels: Tensor) -> Tensor:
    """F1 of class 1, as GLUE scores MRPC."""
    from torchmetrics.functional.classification import binary_f1_score

    return binary_f1_score((predictions == 1).long(), (labels == 1).long())


def _matthews_correlation(predictions: Tensor, labels: Tensor) -> Tensor:
    if _is_constant(predictions) or _is_constant(labels):
        return torch.zeros(())  # undefined; torchmetrics has cases of its own here, sklearn (and so GLUE) says 0
    from torchmetrics.functional.classification import multiclass_matthews_corrcoef

    return multiclass_matthews_corrcoef(predictions, labels, num_classes=_class_count(predictions, labels))


def _pearson(predictions: Tensor, labels: Tensor) -> Tensor:
    if _is_constant(predictions) or _is_constant(labels):
        return torch.zeros(())  # undefined; 0 and not NaN, so that "best so far" can compare it
    from torchmetrics.functional.regression import pearson_corrcoef

    # torchmetrics answers NaN below a fixed variance (1.5e-8): the scores of a nearly constant model must be spread first.
    return pearson_corrcoef(_standardised(predictions), _standardised(labels))


def _spearmanr(predictions: Tensor, labels: Tensor) -> Tensor:
    if _is_constant(predictions) or _is_constant(labels):
        return torch.zeros(())
    from torchmetrics.functional.regression import spearman_corrcoef

    return spearman_corrcoef(predictions, labels)


def _class_count(predictions: Tensor, labels: Tensor) -> int:
    return max(2, int(predictions.max()) + 1, int(labels.max()) + 1)


def _standardised(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std()


def _is_constant(values: Tensor) -> bool:
    return bool((values == values[0]).all())  # False for NaN: a model that diverged must show as NaN


METRIC_NAMES = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews_correlation,
    "pearson": _pearson,
    "spearmanr": _spearmanr,
}
