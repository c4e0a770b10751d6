"""The record of a run: metrics.jsonl, one strict JSON object per line, and the same scalars for TensorBoard.

A line is complete on disk as soon as the call returns, so that a run that is killed keeps what it logged. A run that goes on from a
checkpoint calls ``truncate_after`` first; then the file has each step once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
BYTES_PER_GIB = 2**30


class Tracker:
    """Writes to ``run_dir``, which is made if needed, on the rank that reports; does nothing on the others.

    Args:
        run_dir: The run's folder.
        enabled: True on the one rank that writes.
        tensorboard: False leaves the TensorBoard files out.
    """

    def __init__(self, run_dir: Path, enabled: bool, tensorboard: bool = True) -> None:
        self._run_dir = run_dir
        self._enabled = enabled
        self._tensorboard = tensorboard
        self._file: IO[str] | None = None
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        return self._run_dir / METRICS_FILE

    def log_update(
        self,
        *,
        step: int,
        epoch: float,
        loss: float,
        lr: float,
        grad_norm: float,
        tokens: int,
        samples_per_second: float,
        tokens_per_second: float,
        step_seconds: float,
        peak_memory_bytes: Sequence[int],
        held_bytes: Mapping[str, Sequence[int]] | None = None,
        skipped: bool = False,
    ) -> None:
        """One optimizer update.

        Args:
            step: Updates done so far, from 1.
            epoch: Passes over the data done so far.
            loss: Mean over the valid tokens or rows of the global batch. NaN and infinities become null in the file.
            grad_norm: Before clipping, over all parameters of all stages.
            tokens: Valid tokens of this update.
            peak_memory_bytes: Of each rank, in rank order.
            held_bytes: Of each rank, what is held after the update, by kind: allocated and reserved on the card, resident on the host.
            skipped: The gradient was not finite, and the weights were left as they were.
        """
        if not self._enabled:
            return
        scalars = {"loss": loss, "lr": lr, "grad_norm": grad_norm}
        speeds = {"samples_per_second": samples_per_second, "tokens_per_second": tokens_per_second, "step_seconds": step_seconds}
        held = {"peak": peak_memory_bytes, **(held_bytes or {})}
        memory = {"peak_memory_bytes" if kind == "peak" else f"{kind}_bytes": list(sizes) for kind, sizes in held.items()}
        self._write({"step": step, "epoch": epoch, **scalars, "tokens": tokens, **speeds, **memory, "skipped": skipped})
        self._mirror(step, "train", {**scalars, **speeds, "epoch": epoch})
        gib = {f"{kind}_gib_rank{rank}": size / BYTES_PER_GIB for kind, sizes in held.items() for rank, size in enumerate(sizes)}
        self._mirror(step, "memory", gib)

    def log_evaluation(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
        """The metrics of one evaluation after ``step`` updates (0: before the first)."""
        if not self._enabled:
            return
        self._write({"step": step, "split": split, "metrics": dict(metrics)})
        self._mirror(step, split, metrics)

    def log_event(self, step: int, event: str, values: Mapping[str, Any]) -> None:
        """Something that happened after ``step`` updates besides training and scoring, such as a smaller micro-batch."""
        if self._enabled:
            self._write({"step": step, "event": event, **values})

    def log_prediction(self, step: int, comparisons: Sequence[Mapping[str, Any]]) -> None:
        """At the end of a run, what was predicted beside what was measured: per entry rank, what, unit, predicted, measured, relative_error."""
        if self._enabled:
            self._write({"step": step, "predicted_against_measured": [dict(entry) for entry in comparisons]})

    def truncate_after(self, step: int) -> None:
        """Drop what was logged for later steps, for a run that goes on from ``step``; -1 drops everything, for one that starts anew.

        The file is replaced at once or not at all. A last line that was cut off by a crash goes too.
        """
        if not self._enabled:
            return
        self.close()
        self._purge_step = step + 1
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines() if _step_of(line) <= step]
        temporary = self.path.with_suffix(".jsonl.tmp")
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path)

    def close(self) -> None:
        """Ends both files; a later call of a log method opens them again."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is None:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            _end_last_line(self.path)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close())
        self._file.write(json.dumps(_strict(entry), allow_nan=False) + "\n")
        self._file.flush()

    def _mirror(self, step: int, group: str, scalars: Mapping[str, float]) -> None:
        if not self._tensorboard:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # takes a second, so only on the rank that writes

            self._writer = SummaryWriter(str(self._run_dir / TENSORBOARD_FOLDER), purge_step=self._purge_step)
        for name, value in scalars.items():
            self._writer.add_scalar(f"{group}/{name}", float(value), step)


def _strict(value: Any) -> Any:
    """Plain JSON: numbers of torch and numpy as Python's, NaN and infinities as null."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    number = value.item() if hasattr(value, "item") else float(value)
    return None if isinstance(number, float) and not math.isfinite(number) else number


def _step_of(line: str) -> float:
    """The step of a line, infinity where it is no complete object."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


def _end_last_line(path: Path) -> None:
    """A crash may have left half a line: what is appended must not be joined to it."""
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        start = content.rfind(b"\n") + 1
        with open(path, "r+b") as file:
            if _step_of(content[start:].decode("utf-8", errors="replace")) == math.inf:
                file.truncate(start)
            else:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
