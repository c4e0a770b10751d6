"""Gloo ranks that are started once and fed test cases.

Importing torch, transformers and DeepSpeed costs seconds a process, so the ranks are kept between cases. A case that fails or hangs
on any rank kills all of them (the others may be stuck in a collective), and the next case gets fresh ones.

    with RankPool(2) as pool:
        losses = pool.run("tests.multiproc.some_cases:train_three_steps", {"schedule": "1f1b"})   # one result per rank

A case is a module-level function of keyword arguments; ``torch.distributed`` is initialised, with one thread per rank, and the
variables that torchrun would set are in the environment. Its module is imported before its time limit begins.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.multiproc.rank_worker import STACK_DUMP_SIGNAL

REPOSITORY = Path(__file__).resolve().parents[2]
# After one rank has failed: how long the others may still report the same mistake before all are killed.
GRACE_SECONDS = 0.5
LOG_TAIL_CHARACTERS = 8000
STOP_SECONDS = 3.0
PROCESS_DIED = "ProcessDied"


class RankFailure(AssertionError):
    """A case raised, or its process died, on at least one rank.

    ``rank``, ``type_name`` and ``message`` are those of the rank that reported first; the text holds every rank that did.
    """

    def __init__(self, text: str, rank: int, type_name: str, message: str) -> None:
        super().__init__(text)
        self.rank, self.type_name, self.message = rank, type_name, message


class RankTimeout(AssertionError):
    """A case did not end within its limit; the text holds the stack of every rank that was still busy. ``ranks`` names them."""

    def __init__(self, text: str, ranks: list[int]) -> None:
        super().__init__(text)
        self.ranks = ranks


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    connection: Connection
    log_file: Path
    stack_file: Path


class RankPool:
    """``world_size`` ranks in one gloo group over the loopback interface; started by the first ``run``.

    Args:
        world_size: Number of ranks.
        threads_per_rank: torch threads of each.
        start_timeout_seconds: Limit for starting the ranks, and for importing a case's module.
        environment: Variables to add to the ranks' environment.
    """

    def __init__(
        self, world_size: int, threads_per_rank: int = 1, start_timeout_seconds: float = 180.0, environment: Mapping[str, str] | None = None
    ) -> None:
        assert world_size >= 1 and threads_per_rank >= 1
        self.world_size = world_size
        self.threads_per_rank = threads_per_rank
        self.start_timeout_seconds = start_timeout_seconds
        self.last_start_seconds = 0.0
        self._environment = dict(environment or {})
        self._ranks: list[_Rank] = []
        self._store: Any = None  # torch.distributed.TCPStore: the meeting point lives here, so that no port can be lost between bind and use
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks that run now, in rank order; empty before the first case and after a failure."""
        return [rank.process.pid for rank in self._ranks]

    def run(self, case: str, kwargs: Mapping[str, Any] | None = None, timeout_seconds: float = 60.0) -> list[Any]:
        """Runs ``"package.module:function"`` with the same keyword arguments on every rank.

        Returns:
            What each rank's function returned, in rank order.

        Raises:
            RankFailure: the case raised on a rank, or a rank died.
            RankTimeout: a rank was not done after ``timeout_seconds``.
        """
        module_name, separator, function_name = case.partition(":")
        assert separator and function_name, f"case '{case}' must have the form package.module:function"
        request = pickle.dumps(("run", case, dict(kwargs or {})))
        try:
            if not self._ranks:
                self._start()
            self._ask(pickle.dumps(("import", module_name)), f"import of {module_name}", self.start_timeout_seconds)
            return self._ask(request, f"case {case}", timeout_seconds)
        except BaseException:  # KeyboardInterrupt and pytest's time limit too: the ranks are then in an unknown state
            self._kill()
            raise

    def close(self) -> None:
        """Ends the ranks; the pool can be used again afterwards and then starts fresh ones."""
        for rank in self._ranks:
            rank.connection.close()
        deadline = time.monotonic() + STOP_SECONDS
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    # --- starting and ending ----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from torch.distributed import TCPStore

        began = time.monotonic()
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_", ignore_cleanup_errors=True)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        for number in range(self.world_size):
            self._ranks.append(self._start_rank(number, Path(self._folder.name)))
        self._collect("start of the ranks", self.start_timeout_seconds)
        self.last_start_seconds = time.monotonic() - began

    def _start_rank(self, number: int, folder: Path) -> _Rank:
        ours, theirs = Pipe()
        stack_file = folder / f"rank{number}.stacks"
        log_file = folder / f"rank{number}.log"
        environment = {
            **os.environ,
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "OMP_NUM_THREADS": str(self.threads_per_rank),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            "RANK_POOL_CONNECTION_FD": str(theirs.fileno()),
            "RANK_POOL_STACK_FILE": str(stack_file),
            **self._environment,
        }
        with open(log_file, "wb") as log, theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.multiproc.rank_worker"],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,  # never written to: its closing, also by our death, ends the rank
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return _Rank(number, process, ours, log_file, stack_file)

    def _kill(self) -> None:
        for rank in self._ranks:
            # The whole group: a case may have started a compiler. Already gone: nothing to do.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
            if rank.process.stdin is not None:
                rank.process.stdin.close()
        self._ranks = []
        self._store = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    # --- asking -----------------------------------------------------------------------------------------------------------------

    def _ask(self, request: bytes, what: str, timeout_seconds: float) -> list[Any]:
        for rank in self._ranks:
            # A rank that died since the last case is reported by _collect, which sees its connection closed.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.connection.send_bytes(request)
        return self._collect(what, timeout_seconds)

    def _collect(self, what: str, timeout_seconds: float) -> list[Any]:
        """One reply of every rank. Returns their values, or raises when one failed or time is up."""
        deadline = time.monotonic() + timeout_seconds
        pending = {rank.connection: rank for rank in self._ranks}
        values: dict[int, Any] = {}
        failures: list[tuple[int, str, str, str]] = []
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                reply = _receive(rank)
                if reply[0] == "ok":
                    values[rank.number] = reply[1]
                else:
                    failures.append((rank.number, *reply[1:]))
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        busy = sorted(rank.number for rank in pending.values())
        if failures:
            # The end of a process breaks the others' connections, and they may report that first.
            failures.sort(key=lambda failure: failure[1] != PROCESS_DIED)
            raise self._failure(what, failures, busy)
        if busy:
            raise self._timeout(what, timeout_seconds, busy)
        return [values[number] for number in range(self.world_size)]

    def _failure(self, what: str, failures: list[tuple[int, str, str, str]], busy: list[int]) -> RankFailure:
        first, type_name, message, _ = failures[0]
        lines = [f"{what}: rank {first} raised {type_name}: {message}"]
        if busy:
            lines.append(f"(killed while still busy: {_ranks_in_words(busy)})")
        for number, _, _, trace in failures:
            lines.append(f"--- rank {number}: traceback\n{trace.rstrip()}")
        lines += self._logs()
        return RankFailure("\n".join(lines), first, type_name, message)

    def _timeout(self, what: str, timeout_seconds: float, busy: list[int]) -> RankTimeout:
        lines = [f"{what}: not done after {timeout_seconds:g} s on {_ranks_in_words(busy)}"]
        stuck = [self._ranks[number] for number in busy]
        for rank in stuck:
            rank.process.send_signal(STACK_DUMP_SIGNAL)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any(_size(rank.stack_file) == 0 for rank in stuck):
            time.sleep(0.05)
        time.sleep(0.1)  # the dump is written frame by frame
        for rank in stuck:
            lines.append(f"--- rank {rank.number}: stacks\n{_tail(rank.stack_file) or '(no answer to the signal)'}")
        lines += self._logs()
        return RankTimeout("\n".join(lines), busy)

    def _logs(self) -> list[str]:
        texts = [(rank.number, _tail(rank.log_file)) for rank in self._ranks]
        return [f"--- rank {number}: output\n{text}" for number, text in texts if text]


def _receive(rank: _Rank) -> tuple[Any, ...]:
    """A rank's reply; the end of its process counts as an error reply."""
    try:
        reply = pickle.loads(rank.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        try:
            code: int | None = rank.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        message = f"the rank's process ended with {code}" if code is None or code >= 0 else f"the rank's process was ended by signal {-code}"
        return ("error", PROCESS_DIED, message, message)
    assert isinstance(reply, tuple)
    return reply


def _ranks_in_words(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    text = path.read_bytes().decode("utf-8", errors="replace").strip()
    return text if len(text) <= LOG_TAIL_CHARACTERS else "[...] " + text[-LOG_TAIL_CHARACTERS:]
