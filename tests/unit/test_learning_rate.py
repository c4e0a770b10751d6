"""The learning rate against transformers' own schedules, update by update."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from mpfinetune.config import TrainConfig
from mpfinetune.training.learning_rate import learning_rate, warmup_updates

PEAK = 3e-4
# Ours to transformers' name.
NAMES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup"}


def theirs(name: str, warmup: int, total: int) -> list[float]:
    """The rate at each of ``total`` updates."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=PEAK)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("total", [1, 7, 50])
@pytest.mark.parametrize("warmup", [0, 1, 5, 50, 60])
@pytest.mark.parametrize("scheduler", NAMES)
def test_every_update_has_the_rate_of_transformers(scheduler: str, warmup: int, total: int) -> None:
    settings = TrainConfig(scheduler=scheduler, warmup_steps=warmup)  # type: ignore[arg-type]
    ours = [learning_rate(settings, PEAK, done, total) for done in range(total)]
    assert ours == pytest.approx(theirs(NAMES[scheduler], warmup, total), rel=1e-12, abs=1e-18)


def test_constant_without_warmup_is_constant() -> None:
    settings = TrainConfig(scheduler="constant")
    assert [learning_rate(settings, PEAK, done, 9) for done in range(9)] == theirs("constant", 0, 9) == [PEAK] * 9


@pytest.mark.parametrize(
    ("ratio", "total", "expected"),
    [(0.0, 30, 0), (0.1, 30, 3), (0.1, 31, 4), (0.06, 100, 6), (0.5, 3, 2), (0.001, 10, 1), (0.07, 100, 7)],
)
def test_a_share_of_the_updates_is_rounded_up_but_not_for_a_rounding_error(ratio: float, total: int, expected: int) -> None:
    assert warmup_updates(TrainConfig(warmup_ratio=ratio), total) == expected


def test_warmup_steps_win_over_the_ratio() -> None:
    assert warmup_updates(TrainConfig(warmup_steps=0, warmup_ratio=0.5), 10) == 0
