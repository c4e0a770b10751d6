"""The harness of the multi-process tests: what it promises, and that nothing hangs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch

from tests.multiproc.rank_pool import REPOSITORY, RankFailure, RankPool, RankTimeout

CASES = "tests.multiproc.pool_cases"


def test_results_come_back_in_rank_order(two_ranks: RankPool) -> None:
    answers = two_ranks.run(f"{CASES}:who_am_i")
    assert [answer["rank"] for answer in answers] == [0, 1]
    assert [answer["env"] for answer in answers] == [("0", "2", "0"), ("1", "2", "1")]
    assert all(answer["world_size"] == 2 and answer["threads"] == 1 for answer in answers)
    assert [answer["pid"] for answer in answers] == two_ranks.process_ids


def test_ranks_are_reused(two_ranks: RankPool) -> None:
    first = [answer["pid"] for answer in two_ranks.run(f"{CASES}:who_am_i")]
    second = [answer["pid"] for answer in two_ranks.run(f"{CASES}:who_am_i")]
    assert first == second


def test_tensors_are_reduced_over_the_ranks(two_ranks: RankPool) -> None:
    values = torch.tensor([1.0, 2.0, -0.5])
    results = two_ranks.run(f"{CASES}:sum_over_ranks", {"values": values})
    assert all(torch.equal(result, values * 3) for result in results)


def test_ranks_send_to_each_other(two_ranks: RankPool) -> None:
    assert two_ranks.run(f"{CASES}:send_to_next", {"value": 10.0}) == [11.0, 10.0]


def test_state_does_not_leak_into_the_next_case(two_ranks: RankPool) -> None:
    two_ranks.run(f"{CASES}:leave_state_behind")
    assert two_ranks.run(f"{CASES}:state") == [(torch.float32, True)] * 2


def test_failure_on_one_rank_while_the_other_waits_ends_fast_and_is_named(two_ranks: RankPool) -> None:
    before = [answer["pid"] for answer in two_ranks.run(f"{CASES}:who_am_i")]
    began = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 raised ValueError: wrong on purpose") as caught:
        two_ranks.run(f"{CASES}:fail_on_rank_while_others_wait", {"failing_rank": 1})
    assert time.monotonic() - began < 10.0
    assert (caught.value.rank, caught.value.type_name, caught.value.message) == (1, "ValueError", "wrong on purpose")
    text = str(caught.value)
    assert "fail_on_rank_while_others_wait" in text and 'raise ValueError("wrong on purpose")' in text
    assert "killed while still busy: rank 0" in text
    assert "a line printed by rank 0" in text and "a line printed by rank 1" in text
    after = [answer["pid"] for answer in two_ranks.run(f"{CASES}:who_am_i")]
    assert not set(before) & set(after)


def test_hang_is_cut_at_its_limit_and_the_next_case_works(two_ranks: RankPool) -> None:
    two_ranks.run(f"{CASES}:who_am_i")
    began = time.monotonic()
    with pytest.raises(RankTimeout, match="not done after 2 s on ranks 0, 1") as caught:
        two_ranks.run(f"{CASES}:hang_in_collective", timeout_seconds=2.0)
    assert time.monotonic() - began < 10.0
    text = str(caught.value)
    assert caught.value.ranks == [0, 1]
    stacks_of_rank_0, stacks_of_rank_1 = text.split("--- rank 1: stacks")
    assert "barrier" in stacks_of_rank_0 and "hang_in_collective" in stacks_of_rank_0 and "hang_in_collective" in stacks_of_rank_1
    assert [answer["rank"] for answer in two_ranks.run(f"{CASES}:who_am_i")] == [0, 1]


def test_failure_on_every_rank_shows_every_rank() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankFailure) as caught:
            pool.run(f"{CASES}:fail_everywhere")
        assert "rank 0 cannot" in str(caught.value) and "rank 1 cannot" in str(caught.value)
        assert pool.process_ids == []


def test_death_of_a_rank_is_reported() -> None:
    with RankPool(2) as pool, pytest.raises(RankFailure, match="rank 0 raised ProcessDied: the rank's process was ended by signal 9"):
        pool.run(f"{CASES}:die_on_rank", {"dying_rank": 0})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (f"{CASES}:return_something_unpicklable", "pickle"),
        (f"{CASES}:no_such_case", "no_such_case"),
        ("tests.multiproc.no_such_module:case", "No module named 'tests.multiproc.no_such_module'"),
    ],
)
def test_case_that_cannot_be_run_says_why(case: str, message: str) -> None:
    with RankPool(1) as pool, pytest.raises(RankFailure, match=message):
        pool.run(case)


def test_closed_pool_leaves_no_process() -> None:
    with RankPool(1) as pool:
        pool.run(f"{CASES}:who_am_i")
        process_ids = pool.process_ids
    assert process_ids and not any(_is_alive(process_id) for process_id in process_ids)


def test_ranks_end_when_the_process_that_owns_the_pool_is_killed() -> None:
    program = (
        "import os, signal\n"
        "from tests.multiproc.rank_pool import RankPool\n"
        "pool = RankPool(1)\n"
        f"print(pool.run('{CASES}:who_am_i')[0]['pid'], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=120)
    process_id = int(done.stdout)
    deadline = time.monotonic() + 10.0
    while _is_alive(process_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _is_alive(process_id)


def _is_alive(process_id: int) -> bool:
    """An orphan that nobody reaps stays as a zombie in some containers; that counts as ended."""
    try:
        os.kill(process_id, 0)
        with open(f"/proc/{process_id}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
