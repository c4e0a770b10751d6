"""Checkpoints: written atomically, complete or not there, addressed by parameter name so that any layout can go on from them.

``checkpoints/step-00000100/`` holds, for each pipeline rank, the weights (fp32 masters) and the optimizer's state of the parameters
of which it is the first holder, as safetensors (no pickle; much of it in several files), and ``state.json``: the position of the run and the
size of every file. The folder is written under another name and renamed when every rank is done, so a killed run leaves no half checkpoint
behind.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpfinetune.dist import DistContext
from mpfinetune.errors import CheckpointError
from mpfinetune.training.tensor_files import RankFiles, Stream, read_tensors

if TYPE_CHECKING:
    from mpfinetune.strategies.base import Strategy

FORMAT = 1
STATE_FILE = "state.json"
_PREFIX = "step-"
_UNFINISHED = ".unfinished"


@dataclass
class RunState:
    """Where a run is. ``epoch`` and ``index`` are those of the next batch; ``applied_updates`` leaves skipped ones out."""

    step: int = 0
    applied_updates: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    evaluations: int = 0
    score: float | None = None  # of the evaluation at this step, by the task's metric; higher is better
    loss_scale: float | None = None  # of an fp16 run, and its updates since the last change
    updates_at_loss_scale: int = 0
    micro_size: int | None = None  # found by probing or after an out-of-memory error, and for which layout; None: as the config says
    micro_size_for: dict[str, Any] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)  # what must not change between stop and resume


@dataclass(frozen=True)
class RankTensors:
    """What one rank takes from a checkpoint, by canonical parameter name (states: ``name/state``)."""

    weights: dict[str, Tensor]
    states: dict[str, Tensor]


def streams_of(strategy: Strategy) -> dict[str, Stream]:
    """What this rank gives to a checkpoint, by kind of file: of the parameters of which it is the first holder, weights in full precision
    (``weights``) and states (``optimizer``).

    Under ZeRO the tensors are gathered one by one as they are asked for, so all ranks must take all of them, in this order.
    """
    assert strategy.update is not None
    own = strategy.first_held_names() & strategy.saved_names()
    return {"weights": _weights_of(strategy, own), "optimizer": _states_of(strategy, own)}


def _weights_of(strategy: Strategy, own: set[str]) -> Iterator[tuple[str, Tensor]]:
    assert strategy.update is not None
    given = set()
    for name, tensor in strategy.update.weight_stream():
        given.add(name)
        if name in own:
            yield name, tensor
    for name, parameter in strategy.named_parameters().items():
        if name in own - given and parameter.numel():  # of what ZeRO has in parts, the first replica alone has been given the whole
            yield name, parameter.detach()


def _states_of(strategy: Strategy, own: set[str]) -> Iterator[tuple[str, Tensor]]:
    assert strategy.update is not None
    for key, tensor in strategy.update.state_stream():
        if key.rpartition("/")[0] in own:
            yield key, tensor


def load_into(strategy: Strategy, checkpoint: Path) -> None:
    """Weights and optimizer states of a checkpoint, for this rank's parameters; collective.

    Raises:
        CheckpointError: see ``restore``.
    """
    assert strategy.update is not None
    shapes, saved = strategy.parameter_shapes(), strategy.saved_names()
    for names in strategy.loading_groups():
        tensors = restore(checkpoint, {name: shapes[name] for name in names if name in saved})
        strategy.set_weights(tensors.weights)
        strategy.update.load(tensors.weights, tensors.states)


def save_checkpoint(folder: Path, state: RunState, streams: dict[str, Stream], context: DistContext) -> Path:
    """Write one checkpoint; collective over all ranks, of which the first replica of each pipeline rank writes.

    Raises:
        CheckpointError: on every rank, if any could not write (disk full); what was written is removed, older checkpoints stay.
    """
    final = folder / f"{_PREFIX}{state.step:08d}"
    unfinished = folder / f"{final.name}{_UNFINISHED}"
    parts = [RankFiles(unfinished, kind, stream, context) for kind, stream in streams.items()]
    problems: list[str] = []
    for write in (
        lambda: _make_anew(unfinished) if context.rank == 0 else None,
        *(part.write for part in parts),
        lambda: _finish(unfinished, final, state) if context.rank == 0 else None,
    ):
        problems = _on_all_ranks(write, context)
        if problems:
            break
    if problems:
        if context.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        context.barrier()
        needed = sum(part.whole_bytes() for part in parts)
        free = shutil.disk_usage(_nearest_folder(folder)).free
        raise CheckpointError(
            f"run_dir: the checkpoint of step {state.step} could not be written to {folder} ({'; '.join(problems)}); this rank's part needs "
            f"{needed:,} bytes ({needed / 2**20:.0f} MiB), {free / 2**20:.0f} MiB are free. Older checkpoints are untouched."
        )
    return final


def _on_all_ranks(write: Callable[[], None], context: DistContext) -> list[str]:
    """Run ``write`` on each rank and tell every rank what went wrong on any: no rank may wait for one that has failed."""
    problem = None
    try:
        write()
    except Exception as error:
        problem = f"rank {context.rank}: {error}"
    return [text for text in context.gather_objects(problem) if text]


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _nearest_folder(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _finish(unfinished: Path, final: Path, state: RunState) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
    content = {"format": FORMAT, "state": asdict(state), "files": sizes}
    with (unfinished / STATE_FILE).open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    shutil.rmtree(final, ignore_errors=True)
    unfinished.rename(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- finding ----------------------------------------------------------------------------------------------------------------------


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, oldest first, complete or not."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith(_PREFIX) and path.name.removeprefix(_PREFIX).isdigit())


def what_is_missing(checkpoint: Path) -> str | None:
    """Why a checkpoint is not complete, or None."""
    try:
        content = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
        sizes = content["files"]
        RunState(**content["state"])
    except FileNotFoundError:
        return f"{STATE_FILE} is missing"
    except OSError as error:
        return f"{STATE_FILE} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{STATE_FILE} is broken: {error}"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None


def find_checkpoint(folder: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to go on from and what was passed over on the way.

    Args:
        folder: the run's ``checkpoints`` folder.
        resume: ``auto``, ``never`` or a checkpoint's folder.

    Raises:
        CheckpointError: the named one is not complete, or there are checkpoints but none is complete.
    """
    if resume == "never":
        return None, []
    if resume != "auto":
        problem = what_is_missing(Path(resume))
        if problem:
            raise CheckpointError(f"checkpoint.resume: '{resume}' is no complete checkpoint: {problem}")
        return Path(resume), []
    skipped: list[str] = []
    for checkpoint in reversed(list_checkpoints(folder)):
        problem = what_is_missing(checkpoint)
        if problem is None:
            return checkpoint, skipped
        skipped.append(f"{checkpoint} is not complete ({problem}); passed over")
    if skipped:
        raise CheckpointError(
            f"checkpoint.resume: none of the {len(skipped)} checkpoints in {folder} is complete: {'; '.join(skipped)}. "
            "Set checkpoint.resume: never to start anew."
        )
    return None, []


def best_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest score."""
    return _best(complete_checkpoints(folder))


def _best(complete: list[Path]) -> Path | None:
    scored = [(read_state(path).score, path) for path in complete]
    # A NaN compares with nothing: once in front it would stay the best for ever.
    comparable = [(score, path) for score, path in scored if score is not None and not math.isnan(score)]
    return max(comparable, default=(0.0, None), key=lambda pair: pair[0])[1]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return [path for path in list_checkpoints(folder) if what_is_missing(path) is None]


def prune(folder: Path, keep: int, newest: Path) -> None:
    """Delete all but the best and the last ``keep`` complete ones up to ``newest``, which has just been saved.

    What lies beyond it is of a continuation that was given up (the run went on from an older checkpoint) and must not be taken for the
    newest; what is not complete, of a run that was killed.
    """
    complete = [path for path in complete_checkpoints(folder) if path.name <= newest.name]
    kept = {*complete[-keep:], _best(complete)}
    for path in [*(path for path in list_checkpoints(folder) if path not in kept), *folder.glob(f"{_PREFIX}*{_UNFINISHED}")]:
        shutil.rmtree(path, ignore_errors=True)


# --- reading ----------------------------------------------------------------------------------------------------------------------


def read_state(checkpoint: Path) -> RunState:
    """The position of the run, from a complete checkpoint."""
    return RunState(**json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["state"])


def check_identity(checkpoint: Path, now: dict[str, Any]) -> None:
    """A run may change its layout (strategy, stages, replicas, micro size) on resume, but not what its numbers depend on.

    Raises:
        CheckpointError: naming every key that differs, with both values.
    """
    before = read_state(checkpoint).identity
    differing = [key for key in now if key in before and before[key] != now[key]]
    if differing:
        lines = "; ".join(f"{key} was {before[key]!r} and is {now[key]!r}" for key in differing)
        raise CheckpointError(
            f"checkpoint.resume: {checkpoint} belongs to a run with another setting: {lines}. Put the setting back, take another run_dir, "
            "or set checkpoint.resume: never to start anew."
        )


@torch.no_grad()
def restore(checkpoint: Path, shapes: dict[str, tuple[int, ...]]) -> RankTensors:
    """What a rank that holds the parameters ``shapes`` (by name) needs of a checkpoint, whatever layout wrote it.

    Raises:
        CheckpointError: a parameter is not in it, or has another shape there.
    """
    weights = read_tensors(checkpoint, "weights", set(shapes))
    missing = sorted(set(shapes) - set(weights))
    if missing:
        raise CheckpointError(f"checkpoint.resume: {checkpoint} does not hold {', '.join(missing[:5])}; it belongs to another model")
    # copy_ would broadcast a head of one label to one of two without a word.
    differing = [
        f"{name} is {list(weights[name].shape)} there and {list(shape)} here" for name, shape in shapes.items() if tuple(weights[name].shape) != shape
    ]
    if differing:
        raise CheckpointError(
            f"checkpoint.resume: {checkpoint} belongs to another model: {'; '.join(differing[:5])}. Put model.path, model.num_labels and "
            "model.overrides back, take another run_dir, or set checkpoint.resume: never to start anew."
        )
    return RankTensors(weights, read_tensors(checkpoint, "optimizer", set(shapes)))
