"""The ranks of all multi-process tests: one pool per size for the whole session, started by the first case that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiproc.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks; see ``RankPool.run``."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks: stages and replicas together. Twice the processes that the machine may have cores: keep its cases tiny."""
    with RankPool(4) as pool:
        yield pool
