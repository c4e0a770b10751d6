"""The tensor files of a checkpoint: written while the tensors come, read by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from mpfinetune.dist import DistContext
from mpfinetune.errors import CheckpointError
from mpfinetune.planning.memory_plan import CHECKPOINT_BYTES_AT_ONCE

Stream = Iterable[tuple[str, Tensor]]  # names with their tensors, made as they are asked for


class RankFiles:
    """The tensors of one kind of one rank, in files of up to ``CHECKPOINT_BYTES_AT_ONCE``: no more of them are held beside the run's own."""

    def __init__(self, folder: Path, kind: str, stream: Stream, context: DistContext) -> None:
        self._stream = iter(stream)
        self._given_bytes = 0
        self._writes = context.replica == 0
        self._path = folder / f"{kind}-{context.pipeline_rank:05d}-of-{context.pipeline_ranks:05d}.safetensors"

    def write(self) -> None:
        """Take the stream to its end, also where nothing is written or writing has failed: the other replicas gather its tensors with this rank."""
        problem: Exception | None = None
        for number, tensors in enumerate(self._groups()):
            if self._writes and problem is None:
                try:
                    _write_tensors(self._path.with_suffix(f".{number}.safetensors") if number else self._path, tensors)
                except Exception as error:  # safetensors raises its own kinds
                    problem = error
        if problem is not None:
            raise problem

    def _groups(self) -> Iterator[dict[str, Tensor]]:
        """At least one, so that a rank on which nothing learns has its files."""
        group: dict[str, Tensor] = {}
        held = 0
        for name, tensor in self._stream:
            if group and held + tensor.nbytes > CHECKPOINT_BYTES_AT_ONCE:
                yield group
                group.clear()  # the receiver has it, too
                held = 0
            group[name] = tensor
            held += tensor.nbytes
            self._given_bytes += tensor.nbytes
        yield group

    def whole_bytes(self) -> int:
        """Of all tensors; takes what is left of the stream, so it is collective, too."""
        self._given_bytes += sum(tensor.nbytes for _, tensor in self._stream)
        return self._given_bytes


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu", backend="pread") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"checkpoint.resume: {path} cannot be read: {error}") from error


def tensor_names(checkpoint: Path, kind: str) -> set[str]:
    """The keys of all tensors of ``kind`` (``weights`` or ``optimizer``).

    Raises:
        CheckpointError: a file is broken.
    """
    names: set[str] = set()
    for path in checkpoint.glob(f"{kind}-*.safetensors"):
        with _opened(path) as file:
            names.update(file.keys())
    return names


def read_tensors(checkpoint: Path, kind: str, wanted: set[str] | None = None) -> dict[str, Tensor]:
    """Tensors of ``kind`` for the parameter names ``wanted`` (None: all), on the CPU, from every rank's files.

    Raises:
        CheckpointError: a file is broken.
    """
    found: dict[str, Tensor] = {}
    for path in sorted(checkpoint.glob(f"{kind}-*.safetensors")):
        with _opened(path) as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                name = key.rpartition("/")[0] if kind == "optimizer" else key
                if wanted is None or name in wanted:
                    found[key] = file.get_tensor(key)
    return found
