"""Weights and optimizer states on a disk: against the plain loop, with a model wide enough that DeepSpeed really swaps (1 MiB and more)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mpfinetune.errors import LaunchError
from mpfinetune.strategies.deepspeed_ops import check_async_io, prepare_ops
from tests.multiproc.layouts import zero
from tests.multiproc.rank_pool import RankPool
from tests.multiproc.training_cases import Problem, plain_loop

pytestmark = pytest.mark.slow  # compiles an op for minutes
CASE = "tests.multiproc.training_cases:train"
LIMIT_SECONDS = 240.0
IN_MEMORY = zero(3, optimizer="cpu", parameters="cpu")
LOSS = {"fp32": 1e-5, "bf16": 1e-2}


@pytest.fixture(scope="module", autouse=True)
def built_async_io() -> None:
    try:
        check_async_io()
    except LaunchError as missing:
        pytest.skip(str(missing))
    prepare_ops("nvme", "nvme", "cpu", print)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


def problem(precision: str = "fp32") -> Problem:
    return Problem("gpt2", precision=precision, model_changes=(("n_embd", 768), ("n_head", 8), ("n_layer", 2)))


@cache
def expected(precision: str) -> dict[str, Any]:
    return plain_loop(problem(precision))


def swapped_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.swp"))


def check(results: list[dict[str, Any]], losses: list[float], precision: str) -> None:
    wanted = expected(precision)
    assert losses == pytest.approx(wanted["losses"], abs=LOSS[precision])
    if precision == "fp32":
        found = {name: value for result in results for name, value in result["parameters"].items()}
        for name, value in wanted["parameters"].items():
            torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["none", "cpu", "nvme"])
def test_weights_on_a_disk_equal_the_plain_loop(one_rank: RankPool, tmp_path: Path, optimizer: str, precision: str) -> None:
    changes = zero(3, optimizer=optimizer, parameters="nvme", nvme_path=str(tmp_path))
    results = one_rank.run(CASE, {"problem": problem(precision), "changes": changes}, LIMIT_SECONDS)
    check(results, results[0]["losses"], precision)
    assert swapped_bytes(tmp_path) > 10 * 2**20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_processes_have_their_parts_of_the_weights_on_a_disk(two_ranks: RankPool, tmp_path: Path, precision: str) -> None:
    changes = zero(3, optimizer="cpu", parameters="nvme", nvme_path=str(tmp_path))
    results = two_ranks.run(CASE, {"problem": problem(precision), "changes": changes}, LIMIT_SECONDS)
    check(results, results[0]["losses"], precision)
    assert swapped_bytes(tmp_path) > 10 * 2**20


@pytest.mark.parametrize(("first", "then"), [("disk", "disk"), ("disk", "memory"), ("memory", "disk")])
def test_a_run_is_resumed_from_and_on_a_disk(one_rank: RankPool, tmp_path: Path, first: str, then: str) -> None:
    where = {"disk": zero(3, optimizer="nvme", parameters="nvme", nvme_path=str(tmp_path / "swap")), "memory": IN_MEMORY}
    saved = {"updates": (0, 1), "save": str(tmp_path / "run")}
    before = one_rank.run(CASE, {"problem": problem(), "changes": where[first], **saved}, LIMIT_SECONDS)
    resumed = {"updates": (1, None), "resume": str(tmp_path / "run" / "step-00000001")}
    after = one_rank.run(CASE, {"problem": problem(), "changes": where[then], **resumed}, LIMIT_SECONDS)
    check(after, before[0]["losses"] + after[0]["losses"], "fp32")
