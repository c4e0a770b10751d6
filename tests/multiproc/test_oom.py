"""A rank that runs out of memory takes no other with it: all agree, and the update is that of the smaller micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mpfinetune.strategies.deepspeed_ops import prepare_ops
from tests.multiproc.layouts import GRADIENTS_OFFLOADED
from tests.multiproc.oom_cases import Injection, train
from tests.multiproc.rank_pool import RankFailure, RankPool
from tests.multiproc.training_cases import Problem, adapter_problem

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = "tests.multiproc.oom_cases:train"
LIMIT_SECONDS = 60.0
SHAPES = ((8, 12), (8, 9), (8, 12))
FOUR_STAGES = {"partition": {"rule": "uniform", "num_stages": 4}}
OFFLOADED: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 2}, "offload": {"optimizer": "cpu"}}
LOOPED = {schedule: {"schedule": schedule, **FOUR_STAGES} for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zbv")}


def micro(size: int) -> dict[str, Any]:
    return {"batch": {"global_size": 8, "micro_size": size}}


def check_recovery(pool: RankPool, problem: Problem, changes: dict[str, Any], injection: Injection) -> None:
    """Against the run that has the halved micro-batch all along: losses, norms and weights."""
    arguments = {"problem": problem}
    hit = pool.run(CASE, {**arguments, "changes": {**changes, **micro(2)}, "injection": injection}, LIMIT_SECONDS)
    small = pool.run(CASE, {**arguments, "changes": {**changes, **micro(1)}}, LIMIT_SECONDS)
    for result, reference in zip(hit, small, strict=True):
        ((step, ranks, agreed, words),) = result["failures"]
        assert (step, ranks, agreed) == (injection.update, [injection.rank], True)
        assert f"rank {injection.rank} ran out of memory" in words
        assert result["sizes"] == [2] * injection.update + [1] * (len(SHAPES) - injection.update)
        for key in ("losses", "norms"):
            assert result[key] == pytest.approx(reference[key], abs=1e-6)
        for name, value in reference["parameters"].items():
            torch.testing.assert_close(result["parameters"][name], value, atol=1e-6, rtol=0)


ROWS = [
    pytest.param("gpt2", {}, Injection(1, 1, 3), id="last-forward"),
    pytest.param("gpt2", {}, Injection(1, 1, 1, "backward"), id="last-backward"),
    pytest.param("gpt2", {}, Injection(0, 1, 2), id="first-forward"),
    pytest.param("gpt2", {}, Injection(0, 1, 2, "backward"), id="first-backward"),
    pytest.param("llama", {}, Injection(0, 0, 0), id="at-the-very-first-pass"),
    pytest.param("bert", {}, Injection(1, 2, 3, "backward"), id="at-the-very-last-pass"),
    pytest.param("bert", {"schedule": "gpipe"}, Injection(1, 1, 2, kind="cpu"), id="gpipe"),
    pytest.param("gpt2", {}, Injection(1, 1, 0, "buffers"), id="no-room-for-buffers"),
    pytest.param("llama", {"trainable": ["last_1_blocks", "head"]}, Injection(1, 1, 1), id="no-gradient-crosses"),
    *(
        pytest.param("gpt2", changes, Injection(rank, 1, 5, where), id=f"{schedule}-{where}")
        for schedule, changes in LOOPED.items()
        for rank, where in ((0, "forward"), (1, "backward"))
    ),
]


@pytest.mark.parametrize(("family", "changes", "injection"), ROWS)
def test_a_pipeline_goes_on(two_ranks: RankPool, family: str, changes: dict[str, Any], injection: Injection) -> None:
    check_recovery(two_ranks, Problem(family, shapes=SHAPES), changes, injection)


def test_replicas_agree_too(four_ranks: RankPool) -> None:
    check_recovery(four_ranks, Problem("gpt2", shapes=SHAPES), {}, Injection(3, 1, 1))


def test_dropout_is_that_of_the_smaller_size(two_ranks: RankPool) -> None:
    changes = (("resid_pdrop", 0.3), ("embd_pdrop", 0.3), ("attn_pdrop", 0.3))
    check_recovery(two_ranks, Problem("gpt2", shapes=SHAPES, model_changes=changes), {}, Injection(1, 0, 2, "backward"))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "changes",
    [OFFLOADED, {**OFFLOADED, **GRADIENTS_OFFLOADED}, {"strategy": "zero", "zero": {"stage": 1}}],
    ids=["pipeline-offload", "pipeline-gradients", "zero-1"],
)
def test_an_engine_drops_what_it_has_gathered(two_ranks: RankPool, changes: dict[str, Any], where: str) -> None:
    prepare_ops("cpu", "none", "cpu", print)
    check_recovery(two_ranks, Problem("gpt2", shapes=SHAPES), changes, Injection(1, 1, 1, where))


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.mark.parametrize(
    ("stage", "offload", "problem", "where"),
    [
        (1, "none", Problem("gpt2"), "backward"),
        (1, "none", Problem("gpt2", precision="bf16"), "forward"),
        (2, "none", Problem("gpt2"), "forward"),
        (2, "cpu", Problem("gpt2", precision="bf16"), "backward"),
        (3, "none", Problem("gpt2"), "backward"),
        (3, "cpu", Problem("gpt2", precision="bf16"), "forward"),
        (3, "cpu", adapter_problem("gpt2"), "backward"),
    ],
    ids=["1-fp32", "1-bf16", "2-fp32", "2-offload-bf16", "3-fp32", "3-offload-bf16", "3-offload-lora"],
)
def test_an_engine_of_one_process_goes_on(one_rank: RankPool, stage: int, offload: str, problem: Problem, where: str) -> None:
    """Its buckets, partitions and gathered weights are as if the broken pass had never been."""
    places = {"optimizer": offload, "parameters": offload if stage == 3 else "none"}
    changes = {"strategy": "zero", "zero": {"stage": stage}, "offload": places, **micro(2)}
    arguments = {"problem": replace(problem, shapes=SHAPES), "changes": changes}
    (hit,) = one_rank.run(CASE, {**arguments, "injection": Injection(0, 1, 2, where)}, LIMIT_SECONDS)
    (halved,) = one_rank.run(CASE, {**arguments, "halved_at": 1}, LIMIT_SECONDS)
    assert [(step, ranks, agreed) for step, ranks, agreed, _ in hit["failures"]] == [(1, [0], True)]
    for key in ("losses", "norms"):
        assert hit[key] == pytest.approx(halved[key], abs=1e-6)
    for name, value in halved["parameters"].items():
        torch.testing.assert_close(hit["parameters"][name], value, atol=1e-6, rtol=0)


def test_an_engine_that_cannot_go_on_ends_instead_of_hanging() -> None:
    """The ranks meet within the passes of stages 2 and 3; a pool of its own, since the other rank is killed in one."""
    changes = {"strategy": "zero", "zero": {"stage": 3}, **micro(2)}
    arguments = {"problem": Problem("gpt2", shapes=SHAPES), "changes": changes, "injection": Injection(1, 1, 1)}
    with RankPool(2) as pool, pytest.raises(RankFailure) as failure:
        pool.run("tests.multiproc.oom_cases:train_without_retry", arguments, LIMIT_SECONDS)
    assert (failure.value.rank, failure.value.type_name) == (1, "OutOfMemory")


@pytest.mark.parametrize("changes", [{}, {"partition": {"local_overlap": True, "num_stages": 2}, "devices": 2}], ids=["one-device", "overlap"])
@pytest.mark.parametrize(("where", "kind"), [("forward", "torch"), ("backward", "cpu")])
def test_one_process_goes_on(changes: dict[str, Any], where: str, kind: str) -> None:
    local = {"strategy": "local", "partition": {}, **changes}
    problem = Problem("llama", shapes=SHAPES)
    hit = train(problem, {**local, **micro(2)}, Injection(0, 1, 1, where, kind))
    small = train(problem, {**local, **micro(1)})
    assert [(step, ranks, agreed) for step, ranks, agreed, _ in hit["failures"]] == [(1, [0], True)]
    assert hit["losses"] == pytest.approx(small["losses"], abs=1e-6)
    for name, value in small["parameters"].items():
        torch.testing.assert_close(hit["parameters"][name], value, atol=1e-6, rtol=0)
