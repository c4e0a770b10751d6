"""The memory prediction against the real step: weights, gradients and optimizer to the byte, what autograd keeps within 5 %."""

from __future__ import annotations

import pytest

from tests.multiproc.memory_cases import ONE_PROCESS, TWO_RANKS, Numbers, compare, table_row
from tests.multiproc.rank_pool import RankPool

pytestmark = pytest.mark.usefixtures("built_ops")
CASE = "tests.multiproc.memory_cases:compare"
# Of what autograd keeps, and of the passes' peak.
TOLERANCE = 0.05
LIMIT_SECONDS = 180.0


def check(predicted: Numbers, measured: Numbers) -> None:
    exact = ("weights", "gradients", "optimizer", "offloaded")
    assert {name: getattr(predicted, name) for name in exact} == {name: getattr(measured, name) for name in exact}
    assert measured.saved > 0
    assert predicted.saved == pytest.approx(measured.saved, rel=TOLERANCE)
    assert predicted.peak == pytest.approx(measured.peak, rel=TOLERANCE)


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name: str) -> None:
    family, changes = ONE_PROCESS[name]
    predicted, measured = compare(family, changes)
    assert measured.peak > 0
    check(predicted, measured)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(two_ranks: RankPool, name: str) -> None:
    family, changes = TWO_RANKS[name]
    for rank, (predicted, measured) in enumerate(two_ranks.run(CASE, {"family": family, "changes": changes}, timeout_seconds=LIMIT_SECONDS)):
        print(table_row(name, rank, family, predicted, measured))  # -s shows the table of docs/benchmarks
        check(predicted, measured)
