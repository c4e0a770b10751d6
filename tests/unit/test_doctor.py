"""The doctor's checks: what they conclude from what they find, and the lines and exit codes of the command."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mpfinetune import doctor
from mpfinetune.cli import app
from mpfinetune.doctor import cards, host, results
from mpfinetune.doctor.results import ChildFailure, ChildTimeout, Machine, Result, run_children
from mpfinetune.planning.capability import Card

MACHINE = Machine(Path("runs"), cards=0)
TWO_CARDS = Machine(Path("runs"), cards=2)
CU126 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]
CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("wheel", "capability", "covered"),
    [
        (CU126, (6, 1), True),  # 1080 Ti: sm_60 runs on 6.1
        (CU130, (6, 1), False),
        (CU130, (8, 6), True),  # 3090
        (CU130, (8, 9), True),  # 4060: sm_86 runs on 8.9
        (CU130, (7, 0), False),  # sm_75 is newer than 7.0
        (CU126, (12, 0), False),  # 5090: another generation
        (CU130, (12, 1), True),
        (["compute_70"], (8, 0), True),  # PTX is compiled for newer cards
        (["sm_90a"], (9, 0), True),
        (["sm_90a"], (9, 1), False),
        (["something"], (8, 0), False),
    ],
)
def test_which_cards_a_wheel_runs_on(wheel: list[str], capability: tuple[int, int], covered: bool) -> None:
    assert cards.holds_code_for(wheel, capability) is covered


@pytest.mark.parametrize(
    ("capability", "lacking"), [((5, 2), ["bf16", "int8", "nf4"]), ((6, 1), ["bf16", "int8"]), ((7, 5), ["bf16"]), ((8, 6), []), ((9, 0), [])]
)
def test_what_a_card_cannot_do(capability: tuple[int, int], lacking: list[str]) -> None:
    assert cards.lacks(capability) == lacking


@pytest.mark.parametrize(
    ("version", "cuda", "found", "wheel", "status", "words"),
    [
        (None, None, [], [], "warn", "no CUDA card; precision per card"),
        ("550.1", None, [], [], "warn", "built for the CPU"),
        (None, "13.0", [], CU130, "warn", "there is no NVIDIA driver"),
        ("470.1", "13.0", [], CU130, "fail", "can use no card"),
        ("580.1", "13.0", [(8, 6), (6, 1)], CU130, "fail", "none for card 1, GPU (compute capability 6.1)"),
        ("580.1", "12.6", [(8, 6), (6, 1)], CU126, "ok", "every card is covered"),
    ],
)
def test_driver_against_wheel(
    monkeypatch: pytest.MonkeyPatch, version: str | None, cuda: str | None, found: list[tuple[int, int]], wheel: list[str], status: str, words: str
) -> None:
    monkeypatch.setattr(cards, "driver_version", lambda: version)
    monkeypatch.setattr(cards, "visible_cards", lambda: [Card("GPU", capability) for capability in found])
    monkeypatch.setattr(cards.torch.version, "cuda", cuda)
    monkeypatch.setattr(cards.torch.cuda, "get_arch_list", lambda: wheel)
    result = cards.driver(Machine(Path("runs"), len(found)))
    assert result.status == status and words in result.found
    assert bool(result.todo) == (status != "ok")


def answers(monkeypatch: pytest.MonkeyPatch, *values: Any) -> list[dict[str, Any]]:
    """What child processes answer, call by call (an exception is raised); returns the calls."""
    calls: list[dict[str, Any]] = []
    left = list(values)

    def child(task: str, seconds: float, **options: Any) -> Any:
        calls.append({"task": task, **options})
        value = left.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    monkeypatch.setattr(cards, "run_children", child)
    monkeypatch.setattr(host, "run_children", child)
    return calls


def pair(right: bool = True, rate: float = 20.0) -> dict[str, Any]:
    return {"from": 0, "to": 1, "right": right, "direct": True, "gb_per_second": rate}


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ([{"pairs": [pair(), pair()]}], "ok", "right in 2 directions"),
        ([{"pairs": [pair(), pair(rate=0.4)]}], "warn", "at least 0.4 GB/s"),
        ([{"pairs": [pair(right=False)]}], "fail", "wrong bytes: card 0 to 1"),
        (ChildTimeout("not done after 60 s"), "fail", "not done after 60 s"),
    ],
)
def test_copies_between_cards(monkeypatch: pytest.MonkeyPatch, answer: Any, status: str, words: str) -> None:
    answers(monkeypatch, answer)
    result = cards.peers(TWO_CARDS)
    assert result.status == status and words in result.found
    assert ("NCCL_P2P_DISABLE=1" in result.todo) == (status == "fail")


FINE, WRONG = {"right": True, "gb_per_second": 8.0}, {"right": False, "gb_per_second": 8.0}


def test_nccl_is_tried_again_without_peer_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answers(monkeypatch, [FINE, WRONG], [FINE, FINE])
    result = cards.nccl(TWO_CARDS)
    assert [call["environment"] for call in calls] == [None, {"NCCL_P2P_DISABLE": "1"}]
    assert result.status == "fail" and "the sum is wrong" in result.found and result.todo == "export NCCL_P2P_DISABLE=1 before every run"


def test_nccl_without_cure_and_nccl_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ChildFailure("not done after 60 s"), ChildFailure("unhandled system error"), [FINE, FINE])
    result = cards.nccl(TWO_CARDS)
    assert result.status == "fail" and "not done after 60 s" in result.found and "unhandled system error" in result.found
    assert cards.nccl(TWO_CARDS).status == "ok"


@pytest.mark.parametrize(("rate", "status"), [(12.0, "ok"), (0.8, "warn")])
def test_the_bus(monkeypatch: pytest.MonkeyPatch, rate: float, status: str) -> None:
    answers(monkeypatch, [{"pinned": True, "rates": [{"card": 0, "to_card": 12.0, "to_host": rate}]}])
    assert cards.bus(TWO_CARDS).status == status


Memory = namedtuple("Memory", "total available used")


@pytest.mark.parametrize(("available", "swap_used", "status"), [(20, 0, "ok"), (2, 0, "warn"), (20, 7, "warn")], ids=["enough", "little", "swapping"])
def test_host_memory(monkeypatch: pytest.MonkeyPatch, available: int, swap_used: int, status: str) -> None:
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: Memory(32 * results.GIB, available * results.GIB, 0))
    monkeypatch.setattr(host.psutil, "swap_memory", lambda: Memory(8 * results.GIB, 0, swap_used * results.GIB))
    assert host.host_memory(MACHINE).status == status


@pytest.mark.parametrize(("free", "status"), [(50, "ok"), (5, "warn"), (0.5, "fail")])
def test_disk_of_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, status: str) -> None:
    Usage = namedtuple("Usage", "free")
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: Usage(int(free * results.GIB)))
    assert host.run_folder(Machine(tmp_path / "new" / "runs", 0)).status == status


def test_a_missing_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host.shutil, "which", lambda name: None)
    monkeypatch.setattr(host.sys, "executable", str(tmp_path / "python"))
    result = host.compiler(MACHINE)
    assert result.status == "warn" and "apt install g++" in result.found and "pip install ninja" in result.found


@pytest.mark.parametrize(
    ("check", "answer", "status"),
    [
        (host.cpu_adam, [{"error": 1e-7}], "ok"),
        (host.cpu_adam, [{"error": 0.1}], "fail"),
        (host.cpu_adam, [{"error": float("nan")}], "fail"),
        (host.cpu_adam, ChildFailure("fatal error: Python.h"), "fail"),
        (host.cpu_adam, ChildTimeout("not done after 25 s"), "warn"),
        (host.bitsandbytes, ChildTimeout("not done after 25 s"), "warn"),
        (host.libaio, [{"here": True}], "ok"),
        (host.libaio, [{"here": False}], "warn"),
        (host.bitsandbytes, [{"error": 0.13}], "ok"),
        (host.bitsandbytes, [{"error": 0.9}], "fail"),
        (host.bitsandbytes, ChildFailure("no kernel image"), "fail"),
        (host.ranks, [{"right": True, "limit_kept": True}, {"right": True}], "ok"),
        (host.ranks, [{"right": True, "limit_kept": False}, {"right": True}], "fail"),
        (host.ranks, [{"right": True, "limit_kept": True}, {"right": False}], "fail"),
        (host.ranks, ChildTimeout("not done after 50 s"), "fail"),
    ],
)
def test_conclusions_from_child_processes(monkeypatch: pytest.MonkeyPatch, check: Any, answer: Any, status: str) -> None:
    monkeypatch.setattr("mpfinetune.strategies.deepspeed_ops.is_built", lambda name: True)
    answers(monkeypatch, answer)
    result = check(MACHINE)
    assert result.status == status
    assert bool(result.todo) == (status != "ok")


def test_nothing_is_built_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpfinetune.strategies.deepspeed_ops.is_built", lambda name: False)
    calls = answers(monkeypatch, [{"error": 0.0}])
    result = host.cpu_adam(MACHINE)
    assert result.status == "warn" and "--build" in result.todo and not calls
    assert host.cpu_adam(Machine(Path("runs"), 0, build=True)).status == "ok" and len(calls) == 1


def test_a_child_that_hangs_or_fails_is_ended_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    cases = 'hang) exec sleep 60;; fail) echo "Error: no kernel image" >&2; exit 3;; *) echo "{\\"rank\\": $7}";;'
    script.write_text(f'#!/bin/sh\ncase "$3" in {cases} esac\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ChildTimeout, match=r"not done after 0 s"):
        run_children("hang", 0.2)
    with pytest.raises(ChildFailure, match="Error: no kernel image"):
        run_children("fail", 10)
    assert run_children("fine", 10, ranks=2) == [{"rank": 0}, {"rank": 1}]


# --- the command ------------------------------------------------------------------------------------------------------------------


def command(monkeypatch: pytest.MonkeyPatch, statuses: list[str], *arguments: str) -> Any:
    def check(status: Any) -> Any:
        return lambda machine: Result(status, "found", "" if status == "ok" else "do this")

    monkeypatch.setattr(doctor, "CHECKS", tuple(doctor.Check(f"check {index}", check(status)) for index, status in enumerate(statuses)))
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.parametrize(("statuses", "code"), [(["ok", "ok"], 0), (["ok", "warn"], 0), (["fail", "ok"], 1)])
def test_exit_code_and_lines(monkeypatch: pytest.MonkeyPatch, statuses: list[str], code: int) -> None:
    outcome = command(monkeypatch, statuses)
    assert outcome.exit_code == code
    lines = outcome.output.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == statuses
    assert all((" -> do this" in line) == (not line.startswith("ok")) for line in lines[:-1])
    assert lines[-1].startswith("2 checks")


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = command(monkeypatch, ["ok", "fail"], "--json")
    content = json.loads(outcome.output)
    assert outcome.exit_code == 1 and content["failed"] == 1 and content["warned"] == 0
    assert content["checks"][1] == {"name": "check 1", "status": "fail", "found": "found", "todo": "do this"}


def test_a_check_that_breaks_is_a_failure_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: Machine) -> Result:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "CHECKS", (doctor.Check("broken", broken), doctor.Check("port", host.port)))
    first, second = doctor.diagnose(Path("runs"))
    assert first.result.status == "fail" and "OSError: no such thing" in first.result.found
    assert second.result.status == "ok"


def test_checks_of_cards_are_left_out_without_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "visible_cards", lambda: [])
    monkeypatch.setattr(doctor, "_outcome", lambda check, machine: Result("ok", "not run"))
    names = [row.name for row in doctor.diagnose(Path("runs"))]
    assert names == [check.name for check in doctor.CHECKS if check.cards == 0]
    assert "NCCL" not in names and names[0] == "driver and CUDA"


def test_the_clock_and_shared_memory_of_this_machine() -> None:
    assert host.clock(MACHINE).status == "ok"
    assert host.shared_memory(MACHINE).status in ("ok", "warn")
