"""DeepSpeed's compiled parts: built in one process before the ranks start, with the first real cause where that fails."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpfinetune.errors import LaunchError

# A build's lock is there for a moment before its compiler runs.
_YOUNG_SECONDS = 10.0
# What to do about a cause: the first row whose pattern is in the text.
_CURES = (
    (r"Python\.h", "install Python's headers (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)"),
    (r"[Nn]inja is required|ninja not being installed|No module named .ninja", "install ninja (pip install ninja)"),
    (r"does not match the version torch was compiled with", "install the CUDA toolkit of torch's version, or set DS_SKIP_CUDA_CHECK=1"),
    (r"CUDA_HOME|nvcc", "install the CUDA toolkit (nvcc) of torch's version, or set CUDA_HOME to it"),
    (r"(c\+\+|g\+\+|cc1plus|compiler).*(not found|No such file)|(not found|No such file).*(c\+\+|g\+\+)", "install a C++ compiler (apt install g++)"),
    (r"No space left", "make room, or set TORCH_EXTENSIONS_DIR to a folder on another disk"),
    (r"Permission denied", "set TORCH_EXTENSIONS_DIR to a folder that you may write to"),
)
_CAUSE = re.compile(r"error|not found|No such file|does not match|No space left|Permission denied|required|unable|cannot", re.IGNORECASE)
_NOT_THE_CAUSE = re.compile(r"^\s*(File \"|Traceback|The above exception|During handling|ninja: build stopped|Error building extension)")


def choose_accelerator(device_type: str) -> None:
    """Before deepspeed is imported: on the CPU it would else take a card that the run was told to leave alone."""
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def prepare_ops(optimizer: str, parameters: str, device_type: str, say: Callable[[str], None]) -> None:
    """Build what the offload needs (``none``, ``cpu`` or ``nvme`` for each); a second process waits for the first and finds it built.

    Raises:
        LaunchError: it cannot be built or used here, with the first real cause and what to do.
    """
    choose_accelerator(device_type)
    if "nvme" in (optimizer, parameters):
        check_async_io()
        build_op("async_io", "AsyncIOBuilder", say)
    if optimizer != "none":
        build_op("cpu_adam", "CPUAdamBuilder", say)


def check_async_io() -> None:
    """NVMe offload reads and writes with libaio.

    Raises:
        LaunchError: its headers or library are missing.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise LaunchError(
            "offload: nvme needs libaio, which is not here: install its development package (Debian, Ubuntu: apt install libaio-dev; Fedora: "
            "dnf install libaio-devel; Arch: pacman -S libaio), or set offload.optimizer and offload.parameters to cpu"
        )


def build_op(name: str, builder_name: str, say: Callable[[str], None]) -> Any:
    """Load one compiled part, building it first where the cache does not have it.

    Raises:
        LaunchError: see ``prepare_ops``.
    """
    from filelock import FileLock

    folder = _build_folder(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The system gives this lock back when its holder dies; torch's own lock file stays, and every later run would wait for it for ever.
        with FileLock(folder / "mpfinetune.lock"):
            if clear_stale_lock(folder):
                say(f"removed the lock file that a killed build of DeepSpeed's {name} had left in {folder}")
            if not (folder / f"{name}.so").exists():
                say(f"building DeepSpeed's {name} with the C++ compiler, once for this machine (about a minute; kept in {folder})")
            from deepspeed.ops import op_builder

            return getattr(op_builder, builder_name)().load(verbose=False)
    except Exception as error:  # the builder, torch and the compiler each have their own kinds
        text = "\n".join(_chain(error))
        cause, cure = first_cause(text), cure_for(text)
        raise LaunchError(
            f"offload: DeepSpeed's {name} could not be built: {cause}. {cure[0].upper()}{cure[1:]}; or set offload.optimizer: none"
        ) from error


def is_built(name: str) -> bool:
    """Whether the cache has a compiled part, so that a run does not have to build it."""
    return (_build_folder(name) / f"{name}.so").exists()


def cpu_adam_error(say: Callable[[str], None]) -> float:
    """Whether CPUAdam works here: the largest difference of two updates from torch's AdamW; builds it first where need be.

    Raises:
        LaunchError: it cannot be built or loaded.
    """
    import torch

    prepare_ops("cpu", "none", "cpu", say)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    ours, theirs = (torch.nn.Parameter(torch.linspace(-1.0, 1.0, 1024)) for _ in range(2))
    for kind, parameter in ((DeepSpeedCPUAdam, ours), (torch.optim.AdamW, theirs)):
        optimizer = kind([parameter], lr=1e-2, weight_decay=0.01)
        for _ in range(2):
            parameter.grad = parameter.detach().cos()
            optimizer.step()
    return float((ours - theirs).abs().max())


def clear_stale_lock(folder: Path) -> bool:
    """Remove the lock file of a build that is not running any more; whether there was one."""
    lock = folder / "lock"
    try:
        age = time.time() - lock.stat().st_mtime
    except OSError:
        return False
    if age < _YOUNG_SECONDS or _someone_builds_in(folder):
        return False
    with suppress(OSError):
        lock.unlink()
    return True


def first_cause(text: str) -> str:
    """Of a build's output the first line that names a cause; what follows it (unloaded modules, missing attributes) is a consequence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if _CAUSE.search(line) and not _NOT_THE_CAUSE.search(line)]
    # A compiler's own word before that of whoever called it.
    compiler = [line for line in told if re.search(r"(fatal )?error: ", line)]
    return (compiler or told or lines or ["no reason was given"])[0][:300].rstrip(".")


def cure_for(text: str) -> str:
    """What to do about the first cause that is known."""
    return next((cure for pattern, cure in _CURES if re.search(pattern, text)), "see the compiler's message")


def _build_folder(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def _someone_builds_in(folder: Path) -> bool:
    """ninja and the compilers that it starts work in the folder of the build."""
    import psutil

    for process in psutil.process_iter(["cwd"]):
        cwd = process.info["cwd"]
        if cwd is not None and process.pid != os.getpid() and os.path.realpath(cwd) == os.path.realpath(folder):
            return True
    return False


def _chain(error: BaseException | None) -> list[str]:
    """The texts of an error and of what caused it, the deepest first."""
    texts: list[str] = []
    while error is not None:
        texts.insert(0, str(error))
        error = error.__cause__ or error.__context__
    return texts
