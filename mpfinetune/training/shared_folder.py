"""Whether the ranks of a run see one run_dir: on several machines a folder of the same name may be another on each."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpfinetune.dist import DistContext
from mpfinetune.errors import CheckpointError

# A network file system may take as long to show a folder that was looked for before it was made (NFS: 30 s by default).
_VISIBLE_SECONDS = 40.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class _Found:
    """What one rank has found: the checkpoint it would go on from, and whether rank 0's file is in its run_dir."""

    host: str
    checkpoint: str
    visible: bool


def check_shared(run_dir: Path, checkpoint: Path | None, context: DistContext) -> None:
    """Before anything is built: all ranks see one run_dir and go on from one checkpoint; collective. What is written for it is removed again.

    Raises:
        CheckpointError: on every rank, if one has another folder or another checkpoint than rank 0, or if rank 0 cannot write there.
    """
    if context.world_size == 1:
        return
    marker, problem = Path(), ""
    with contextlib.ExitStack() as until_all_have_looked:
        if context.rank == 0:
            try:
                marker = until_all_have_looked.enter_context(_marker_file(run_dir))
            except OSError as error:
                problem = f"run_dir: '{run_dir}' cannot be written to ({error}); name another folder"
        name, problem = context.gather_objects((marker.name, problem))[0]
        own = _Found(socket.gethostname(), checkpoint.name if checkpoint is not None else "none", not problem and _is_visible(run_dir / name))
        found: list[_Found] = context.gather_objects(own)
    if problem:
        raise CheckpointError(problem)
    first = found[0]
    differing = [rank for rank, other in enumerate(found) if not other.visible or other.checkpoint != first.checkpoint]
    if differing:
        other = found[differing[0]]
        sees = "" if other.visible else f" does not see what rank 0 (on {first.host}) writes there"
        goes = "" if other.checkpoint == first.checkpoint else f" would go on from checkpoint '{other.checkpoint}', rank 0 from '{first.checkpoint}'"
        raise CheckpointError(
            f"run_dir: '{run_dir}' must be one folder that all machines see: rank {differing[0]} (on {other.host})"
            f"{' and'.join(filter(None, (sees, goes)))}; name a folder on a file system that they share"
        )


@contextlib.contextmanager
def _marker_file(run_dir: Path) -> Iterator[Path]:
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    # A name of its own each time: that a file is not there may be remembered, too.
    marker = run_dir / f".shared-{uuid.uuid4().hex}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        marker.touch()
        yield marker
    finally:
        marker.unlink(missing_ok=True)
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def _is_visible(marker: Path) -> bool:
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not marker.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_SECONDS)
        # Opening a folder makes the client ask the server for its present state.
        for folder in (marker.parent.parent, marker.parent):
            with contextlib.suppress(OSError):
                os.listdir(folder)
    return True
