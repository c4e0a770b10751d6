"""What a check of the machine finds, and the way to child processes for what may hang or crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
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


class ChildTimeout(ChildFailure):
    """It did not end in time: it hangs, or the machine is busy."""


def run_children(task: str, seconds: float, ranks: int = 1, device: str = "cpu", environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run a task of ``doctor.child`` in ``ranks`` processes that can meet; returns what each has found.

    Raises:
        ChildFailure: any of them failed, or (``ChildTimeout``) was not done after ``seconds``; all are ended.
    """
    with tempfile.TemporaryDirectory(prefix="mpfinetune_doctor_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        command = [sys.executable, "-m", "mpfinetune.doctor.child", task, device, str(ranks), str(folder / "store")]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(ranks):
                # Files, not pipes: a full pipe (NCCL_DEBUG) would stop the child.
                with open(folder / f"{rank}.out", "wb") as output, open(folder / f"{rank}.err", "wb") as errors:
                    processes.append(subprocess.Popen([*command, str(rank)], env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=errors))
            _wait(processes, folder, seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(_lines(folder / f"{rank}.out")[-1]) for rank in range(ranks)]


def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, seconds: float) -> None:
    """Until all have ended well; the first that fails is the cause, and the others may be waiting for it."""
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0)), None)
        if failed is not None:
            lines = _lines(folder / f"{failed}.err") or [f"ended with exit code {codes[failed]}"]
            raise ChildFailure(lines[-1][:300])
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise ChildTimeout(f"not done after {seconds:.0f} s")
        time.sleep(0.05)


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
