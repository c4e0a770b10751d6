"""Starts the planned number of processes, as torchrun would, and says in one sentence why a run ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from mpfinetune.config import DistConfig
from mpfinetune.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USER_ERROR

_WATCH_SECONDS = 0.5
_ENDED_BY_SIGNAL = {
    -signal.SIGKILL: "killed (signal 9): most often the kernel, for want of host memory; take a smaller batch.micro_size or data.max_length",
    -signal.SIGSEGV: "crashed (signal 11) in native code",
    -signal.SIGBUS: "crashed (signal 7): most often /dev/shm or the disk is full",
    -signal.SIGABRT: "aborted (signal 6) in native code",
}


def start_processes(world_size: int, arguments: list[str], settings: DistConfig, say: Callable[[str], None], expected: str = "") -> int:
    """Run ``python -m mpfinetune ARGUMENTS`` in ``world_size`` processes on this host.

    Args:
        settings: ``port``: where they meet; None, or one that is in use, means a free one. ``timeout_seconds``: how long they have, after a
            signal, to finish their update and save before they are killed; torch's 30 s would cut a large checkpoint short.
        expected: what the plan expects of the host's memory, said where the kernel may have killed a rank for want of it.

    Returns:
        The exit code of the run: 0 done, 2 a mistake of the user's, 1 anything else.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    port = settings.port
    if port is not None and not _is_free(port):
        say(f"dist.port: {port} is in use; a free port is taken instead")
        port = None
    # Each rank would start a thread per core otherwise, and the ranks would fight for them.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world_size)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world_size,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port or 0}",
        run_id=f"mpfinetune-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
        shutdown_timeout=int(settings.timeout_seconds),
    )
    with _quiet_launcher():
        try:
            elastic_launch(config, sys.executable)("-m", "mpfinetune", *arguments)
        except ChildFailedError as failure:
            rank, first = failure.get_first_failure()
            if first.exitcode in (EXIT_USER_ERROR, EXIT_FAILURE):
                return first.exitcode
            reason = _ENDED_BY_SIGNAL.get(first.exitcode, f"ended with exit code {first.exitcode}")
            print(f"mpfinetune: rank {rank} was {reason}", file=sys.stderr)
            if first.exitcode == -signal.SIGKILL and expected:
                print(f"mpfinetune: the plan expected {expected}; `dmesg | grep -i oom` tells whether the kernel did it", file=sys.stderr)
            return EXIT_FAILURE
        except SignalException as stopped:
            print(f"mpfinetune: stopped by signal {int(stopped.sigval)}", file=sys.stderr)
            return EXIT_FAILURE
    return EXIT_DONE


def end_with_launcher() -> None:
    """Called by a rank that the command has started: when the launcher is killed, the rank gets one SIGTERM, so it saves and stops.

    The launcher gives each rank a session of its own; without this it would train on, unseen, into a folder that the next run uses.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    # Not the kernel's parent-death signal: it may come once for each thread of the launcher, and a second SIGTERM ends at once.
    threading.Thread(target=watch, daemon=True).start()


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        with contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


@contextlib.contextmanager
def _quiet_launcher():  # type: ignore[no-untyped-def]
    """The launcher's own log repeats a rank's error as a page of text; the rank has said it already."""
    logger = logging.getLogger("torch.distributed.elastic")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
