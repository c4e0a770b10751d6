"""Checks that need no card: memory, disk, compilers, libraries, ports, clock."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import sysconfig
import time
from datetime import datetime
from pathlib import Path

import psutil
import torch

from mpfinetune.config import DistConfig
from mpfinetune.dist import host_memory_bytes
from mpfinetune.doctor.results import GIB, ChildFailure, ChildTimeout, Machine, Result, run_children

_CHILD_SECONDS = 25.0
_BUILD_SECONDS = 300.0
_TRY_AGAIN = "the machine is busy, or the library hangs while it loads: run the doctor again when nothing else runs"
# The largest error of values in [-1, 1] in NF4, whose widest step is 0.30.
_NF4_ERROR = 0.16


def host_memory(machine: Machine) -> Result:
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    total = host_memory_bytes()  # a container may have less than the machine
    available = min(memory.available, total)
    found = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available, swap {swap.used / GIB:.1f} of {swap.total / GIB:.1f} GiB in use"
    if available < 4 * GIB:
        return Result("warn", found, "end other programs; a run that finds no host memory is killed by the kernel (signal 9)")
    if swap.total and swap.used > swap.total / 2:
        return Result("warn", found, "the machine swaps: offloading would be slow; end other programs")
    return Result("ok", found)


def shared_memory(machine: Machine) -> Result:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return Result("ok", "no /dev/shm on this system")
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in /dev/shm"
    if free < GIB:
        return Result("warn", found, "NCCL and data loaders exchange there; in a container give more (docker run --shm-size=8g, or --ipc=host)")
    return Result("ok", found)


def run_folder(machine: Machine) -> Result:
    existing = next(path for path in (machine.run_dir.absolute(), *machine.run_dir.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    found = f"{free / GIB:.1f} GiB free for {machine.run_dir}"
    if not os.access(existing, os.W_OK):
        return Result("fail", f"{existing} cannot be written to", "take another run_dir")
    if free < GIB:
        return Result("fail", found, "make room, or take another run_dir: a checkpoint holds 12 bytes for each parameter that learns")
    if free < 10 * GIB:
        return Result("warn", found, "a checkpoint holds 12 bytes for each parameter that learns, and checkpoint.keep of them are kept")
    return Result("ok", found)


def compiler(machine: Machine) -> Result:
    missing = []
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")):
        missing.append("a C++ compiler (apt install g++)")
    if not (shutil.which("ninja") or (Path(sys.executable).parent / "ninja").exists()):
        missing.append("ninja (pip install ninja)")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("Python's headers (apt install python3-dev)")
    if missing:
        return Result("warn", f"missing: {', '.join(missing)}", "install them for offload.optimizer: cpu, whose CPUAdam is compiled here")
    return Result("ok", "C++ compiler, ninja and Python.h are here")


def cpu_adam(machine: Machine) -> Result:
    from mpfinetune.strategies.deepspeed_ops import is_built

    built = is_built("cpu_adam")
    if not built and not machine.build:
        todo = "the first run with offload.optimizer: cpu builds it (a minute or more), or: mpfinetune doctor --build"
        return Result("warn", "CPUAdam is not built yet", todo)
    try:
        (answer,) = run_children("cpu_adam", _CHILD_SECONDS if built else _BUILD_SECONDS)
    except ChildTimeout as late:
        return Result("warn", f"CPUAdam: {late}", _TRY_AGAIN)
    except ChildFailure as failure:
        return Result("fail", f"CPUAdam does not run: {failure}", "see the message; or leave offload.optimizer: none")
    if not answer["error"] < 1e-4:
        return Result("fail", f"CPUAdam differs from torch's AdamW by {answer['error']:.1e}", "do not use offload.optimizer on this machine")
    return Result("ok", "CPUAdam runs and agrees with torch's AdamW")


def libaio(machine: Machine) -> Result:
    try:
        (answer,) = run_children("libaio", _CHILD_SECONDS)
    except ChildFailure as failure:
        return Result("warn", f"could not be looked for: {failure}", "needed for offload to nvme only")
    if not answer["here"]:
        return Result("warn", "libaio's development package is not here", "for offload to nvme only: apt install libaio-dev")
    return Result("ok", "libaio is here (offload to nvme)")


def bitsandbytes(machine: Machine) -> Result:
    device = "cuda" if machine.cards else "cpu"
    try:
        (answer,) = run_children("bitsandbytes", _CHILD_SECONDS, device=device)
    except ChildTimeout as late:
        return Result("warn", f"bitsandbytes: {late}", _TRY_AGAIN)
    except ChildFailure as failure:
        return Result("fail", f"bitsandbytes does not load: {failure}", "reinstall it; quantize and the 8-bit optimizers need it")
    if not answer["error"] < _NF4_ERROR:
        return Result("fail", f"bitsandbytes' NF4 is wrong by {answer['error']:.2f} on {device}", "do not use quantize on this machine")
    return Result("ok", f"bitsandbytes loads, and NF4 works on {device}")


def port(machine: Machine) -> Result:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as caller:
            listener.bind(("localhost", 0))
            listener.listen(1)
            number = listener.getsockname()[1]
            caller.settimeout(5.0)
            caller.connect(("localhost", number))
    except OSError as error:
        return Result("fail", f"no port on localhost can be reached: {error}", "the ranks meet there: see /etc/hosts and the firewall")
    return Result("ok", f"a free one ({number}) can be bound and reached on localhost")


def ranks(machine: Machine) -> Result:
    try:
        answers = run_children("ranks", 2 * _CHILD_SECONDS, ranks=2)
    except ChildFailure as failure:
        return Result("fail", f"two processes over gloo: {failure}", "see GLOO_SOCKET_IFNAME (lo for one host) and the firewall")
    if not all(answer["right"] for answer in answers):
        return Result("fail", "two processes over gloo sum to a wrong result", "reinstall torch")
    if not answers[0]["limit_kept"]:
        found = "a process that waits for a silent one is not let go by the group's time limit"
        return Result("fail", found, "reinstall torch; a hang would never end")
    limit = f"dist.timeout_seconds, {DistConfig().timeout_seconds:.0f} by default"
    return Result("ok", f"two processes meet and exchange over gloo; a silent one is given up after the time limit ({limit})")


def clock(machine: Machine) -> Result:
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.2)
    drift = (time.time() - wall) - (time.monotonic() - steady)
    newest = Path(torch.__file__).stat().st_mtime
    if abs(drift) > 0.05:
        todo = "let it settle (NTP; under WSL: wsl --shutdown): rendezvous and logs use it"
        return Result("warn", f"the clock moved by {drift:+.2f} s within 0.2 s", todo)
    if time.time() < newest - 86400:
        return Result("warn", f"the clock says {datetime.now():%Y-%m-%d}, before torch was installed", "set it: hosts must agree on the time")
    return Result("ok", f"{datetime.now():%Y-%m-%d %H:%M:%S}, steady")
