"""The build of DeepSpeed's compiled parts: stale locks, and the first real cause of a failure."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpfinetune.errors import LaunchError
from mpfinetune.strategies import deepspeed_ops
from mpfinetune.strategies.deepspeed_ops import build_op, clear_stale_lock, cure_for, first_cause

COMPILER_OUTPUT = """Error building extension 'cpu_adam': [1/3] c++ -MMD -DTORCH_EXTENSION_NAME=cpu_adam
FAILED: [code=1] cpu_adam.o
In file included from torch/csrc/utils/python_arg_parser.h:
torch/csrc/python_headers.h:12:10: fatal error: Python.h: No such file or directory
   12 | #include <Python.h>
compilation terminated.
ninja: build stopped: subcommand failed.
DeepSpeedCPUAdam requires the cpu_adam op, which failed to build/load.
'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"""


def test_first_cause_is_the_compilers_own_word() -> None:
    assert first_cause(COMPILER_OUTPUT) == "torch/csrc/python_headers.h:12:10: fatal error: Python.h: No such file or directory"
    assert "python3-dev" in cure_for(COMPILER_OUTPUT)


@pytest.mark.parametrize(
    ("text", "cause", "cure"),
    [
        ("Ninja is required to load C++ extensions (pip install ninja to get it)\nUnable to JIT load the cpu_adam op", "Ninja is required", "ninja"),
        (
            "Installed CUDA version 11.0 does not match the version torch was compiled with 10.1, unable to compile\nno attribute 'ds_opt_adam'",
            "Installed CUDA version 11.0 does not match",
            "DS_SKIP_CUDA_CHECK",
        ),
        ("/bin/sh: 1: c++: not found\nninja: build stopped: subcommand failed.", "/bin/sh: 1: c++: not found", "C++ compiler"),
    ],
)
def test_known_causes_have_a_cure(text: str, cause: str, cure: str) -> None:
    assert first_cause(text).startswith(cause)
    assert cure in cure_for(text)


def test_a_failing_build_is_one_message_with_its_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deepspeed_ops.choose_accelerator("cpu")
    from deepspeed.ops import op_builder

    def fails(self: object, verbose: bool = True) -> None:
        try:
            raise RuntimeError(COMPILER_OUTPUT)
        except RuntimeError as error:
            raise AttributeError("'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'") from error

    monkeypatch.setattr(op_builder.CPUAdamBuilder, "load", fails)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    said: list[str] = []
    with pytest.raises(LaunchError, match=r"cpu_adam could not be built: .*fatal error: Python.h.*python3-dev.*offload.optimizer: none"):
        build_op("cpu_adam", "CPUAdamBuilder", said.append)
    assert said[0].startswith("building DeepSpeed's cpu_adam with the C++ compiler")


def test_missing_libaio_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed_ops.choose_accelerator("cpu")
    from deepspeed.ops import op_builder

    monkeypatch.setattr(op_builder.AsyncIOBuilder, "is_compatible", lambda self, verbose=False: False)
    with pytest.raises(LaunchError, match=r"nvme needs libaio.*apt install libaio-dev"):
        deepspeed_ops.check_async_io()


def aged_lock(folder: Path, seconds: float) -> Path:
    lock = folder / "lock"
    lock.touch()
    os.utime(lock, (time.time() - seconds, time.time() - seconds))
    return lock


def test_a_lock_without_a_builder_is_cleared(tmp_path: Path) -> None:
    assert not clear_stale_lock(tmp_path)
    lock = aged_lock(tmp_path, 60)
    assert clear_stale_lock(tmp_path) and not lock.exists()


def test_the_lock_of_a_running_or_young_build_stays(tmp_path: Path) -> None:
    lock = aged_lock(tmp_path, 1)
    assert not clear_stale_lock(tmp_path) and lock.exists()
    aged_lock(tmp_path, 60)
    builder = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], cwd=tmp_path, stdout=subprocess.PIPE)
    try:
        assert builder.stdout is not None
        builder.stdout.readline()
        assert not clear_stale_lock(tmp_path) and lock.exists()
    finally:
        builder.kill()
        builder.wait()
