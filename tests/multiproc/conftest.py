"""The ranks of all multi-process tests: one pool per size for the whole session, started by the first case that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpfinetune.strategies.deepspeed_ops import prepare_ops
from tests.multiproc.rank_pool import RankPool
from tests.threads import one_thread


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


@pytest.fixture(scope="module", name="one_thread")
def one_thread_for_the_module() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def built_ops() -> None:
    """DeepSpeed's, built in one process before any rank needs them."""
    prepare_ops("cpu", "none", "cpu", print)
