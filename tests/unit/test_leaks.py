"""Growth of memory: what is steady is told from noise, from a jump and from settling."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from mpfinetune.config import WatchConfig
from mpfinetune.training.leaks import Growth, Leak, LeakWatch

MIB = 2**20
BASE = 2000 * MIB
NOISE = random.Random(4)
FLAT: dict[str, Callable[[int], float]] = {
    "constant": lambda step: BASE,
    "noise": lambda step: BASE + NOISE.uniform(0, 200) * MIB,
    "falling": lambda step: BASE - step * MIB,
    "one jump": lambda step: BASE + (500 * MIB if step > 60 else 0),
    "two jumps": lambda step: BASE + (step > 40) * 300 * MIB + (step > 60) * 300 * MIB,
    "settling": lambda step: BASE + 300 * MIB * (1 - math.exp(-step / 8)),
    "below the floor": lambda step: BASE + step * 0.5 * MIB,
    "waves": lambda step: BASE + 300 * MIB * math.sin(step / 5),
}


def first_report(value: Callable[[int], float], updates: int = 300) -> tuple[int, int, float] | None:
    """(update of the report, update where the growth began, bytes an update)."""
    growth = Growth(steps=50, floor_bytes=64 * MIB)
    for step in range(1, updates + 1):
        seen = growth.note(step, value(step))
        if seen is not None:
            return step, *seen
    return None


@pytest.mark.parametrize("name", FLAT)
def test_what_does_not_grow_steadily_is_not_reported(name: str) -> None:
    assert first_report(FLAT[name]) is None


@pytest.mark.parametrize("began", [1, 30, 117])
@pytest.mark.parametrize("rate", [3.0, 40.0])
@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_steady_growth_is_reported_with_its_beginning(began: int, rate: float, noise: float) -> None:
    generator = random.Random(began)
    report = first_report(lambda step: BASE + max(0, step - began) * rate * MIB + generator.uniform(0, noise) * MIB)
    assert report is not None
    at, found, bytes_per_update = report
    assert at <= began + 60
    assert abs(found - began) <= 10  # a part of the window
    assert bytes_per_update == pytest.approx(rate * MIB, rel=0.35)


def test_a_leak_in_a_noisy_series_is_found() -> None:
    generator = random.Random(1)
    report = first_report(lambda step: BASE + max(0, step - 50) * 5 * MIB + (generator.random() < 0.5) * 400 * MIB)
    assert report is not None and 40 <= report[1] <= 60


def test_each_kind_of_each_rank_is_reported_once() -> None:
    watch = LeakWatch(WatchConfig(leak_steps=10, leak_mib=1.0), world_size=2)
    found: list[Leak] = []
    for step in range(1, 60):
        found += watch.note(step, {"allocated": [BASE, BASE + step * 10 * MIB], "reserved": [BASE, BASE], "host": [BASE + step * MIB, BASE]})
    assert [(leak.rank, leak.kind, leak.began, leak.bytes_per_update) for leak in found] == [
        (1, "allocated", 1, pytest.approx(10 * MIB)),
        (0, "host", 1, pytest.approx(MIB)),
    ]
    assert "rank 1: the memory in use on the card has grown steadily since update 1, by 10.00 MiB an update" in str(found[0])


def test_it_can_be_switched_off() -> None:
    watch = LeakWatch(WatchConfig(leak_steps=0), world_size=1)
    assert all(not watch.note(step, {"allocated": [0], "reserved": [0], "host": [step * BASE]}) for step in range(200))
