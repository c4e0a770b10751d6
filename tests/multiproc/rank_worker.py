"""One gloo rank: started by ``RankPool``, runs the cases it is handed until its pool goes away.

Run as ``python -m tests.multiproc.rank_worker``; everything it needs comes in the environment (see ``RankPool._start``).
Requests and replies are plain pickles: ("import", module) and ("run", "module:function", kwargs), answered by ("ok", value) or
("error", type name, message, traceback text).
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

STACK_DUMP_SIGNAL = signal.SIGUSR1
# Longer than any case's own limit: it is the pool that cuts a case, with the stacks of all ranks, not gloo.
GROUP_TIMEOUT = timedelta(hours=1)


def _die_with_pool() -> None:
    """Ends this process and what it started as soon as the pool's end of stdin closes, even while a collective hangs."""
    while os.read(0, 4096):
        pass
    # The pool made this process the leader of its own group, so that compilers started by a case die with it.
    if os.getpgid(0) == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _join_group(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=GROUP_TIMEOUT)


def _reset_state() -> None:
    """What a case may have changed must not reach the next one."""
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)
    random.seed(0)
    _end_engines()
    _destroy_groups()
    gc.collect()
    # What is left are modules and caches that outlive the case. Without them a collection takes no time, and DeepSpeed asks for many.
    gc.freeze()


def _end_engines() -> None:
    """DeepSpeed's, which would live on: hooks in their parameters' autograd nodes hold them, where Python's collector does not look."""
    for engine in [found for found in gc.get_objects() if type(found).__name__ == "DeepSpeedEngine"]:
        engine.destroy()
        vars(engine).clear()


def _destroy_groups() -> None:
    """Those of the case before: each has threads of gloo's that wake a hundred times a second, and a few hundred of them keep a core busy."""
    import torch.distributed as dist

    # DeepSpeed's function is torch's, and forgets what DeepSpeed has cached of the group.
    deepspeed_comm = sys.modules.get("deepspeed.comm")
    destroy = dist.destroy_process_group if deepspeed_comm is None else deepspeed_comm.destroy_process_group
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            destroy(group)


def _ask_for_the_processor_once() -> None:
    """Each CPUAdam asks py-cpuinfo for the vendor, which starts a process that measures the clock for a second."""
    import cpuinfo

    cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def _answer(request: tuple[Any, ...]) -> Any:
    if request[0] == "import":
        importlib.import_module(request[1])
        return None
    module_name, _, function_name = request[1].partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    _reset_state()
    return function(**request[2])


def _reply_to(request: tuple[Any, ...]) -> bytes:
    try:
        # Pickled here, so that a result that cannot be pickled is the case's failure and not the worker's end.
        return pickle.dumps(("ok", _answer(request)))
    except BaseException as error:
        return pickle.dumps(("error", type(error).__name__, str(error), traceback.format_exc()))


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Held open for the life of the process: faulthandler writes to its file descriptor from the signal handler.
    with open(os.environ["RANK_POOL_STACK_FILE"], "w", encoding="utf-8") as stack_file:
        faulthandler.register(STACK_DUMP_SIGNAL, file=stack_file, all_threads=True)
        threading.Thread(target=_die_with_pool, daemon=True).start()
        requests = Connection(int(os.environ["RANK_POOL_CONNECTION_FD"]))
        try:
            _join_group(rank, world_size)
            _ask_for_the_processor_once()
            requests.send_bytes(pickle.dumps(("ok", os.getpid())))
        except BaseException as error:
            requests.send_bytes(pickle.dumps(("error", type(error).__name__, str(error), traceback.format_exc())))
        while True:
            try:
                request = pickle.loads(requests.recv_bytes())
            except EOFError:
                break
            requests.send_bytes(_reply_to(request))
            sys.stdout.flush()
            sys.stderr.flush()
    # Without the interpreter's tear-down: destroying groups there waits for ranks that may be gone already.
    os._exit(0)


if __name__ == "__main__":
    main()
