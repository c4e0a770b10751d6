"""What a check of the machine finds, and the way to child processes for what may hang or crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "warn", "fail"]
GIB = 2**30


@dataclass(frozen=True)
class Result:
    """One check: what was found, and for ``warn`` and ``fail`` what to do."""

    status: Status
    found: str
    todo: str = ""


@dataclass(frozen=True)
class Row:
    """A result under its check's name, as it is printed."""

    name: str
    result: Result

    def __str__(self) -> str:
        todo = f" -> {self.result.todo}" if self.result.todo else ""
        return f"{self.result.status:4}  {self.name}: {self.result.found}{todo}"

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, **asdict(self.result)}


@dataclass(frozen=True)
class Machine:
    """What the checks are told."""

    run_dir: Path
    cards: int  # visible CUDA cards that torch can use
    build: bool = False  # whether compiled parts may be built now


class ChildFailure(Exception):
    """A child process raised, crashed or did not end in time; the message says which."""


def run_children(task: str, seconds: float, ranks: int = 1, device: str = "cpu", environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run a task of ``doctor.child`` in ``ranks`` processes that can meet; returns what each has found.

    Raises:
        ChildFailure: any of them failed, or was not done after ``seconds``; all are ended.
    """
    with tempfile.TemporaryDirectory(prefix="mpfinetune_doctor_", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "mpfinetune.doctor.child", task, device, str(ranks), str(Path(folder) / "store")]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        processes: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                process = subprocess.Popen(
                    [*command, str(rank)], env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
                processes.append(process)
            return [_answer(process, seconds) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()


def _answer(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ChildFailure(f"not done after {seconds:.0f} s") from None
    if process.returncode != 0:
        lines = [line.strip() for line in errors.splitlines() if line.strip()] or [f"ended with exit code {process.returncode}"]
        raise ChildFailure(lines[-1][:300])
    answer: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return answer
