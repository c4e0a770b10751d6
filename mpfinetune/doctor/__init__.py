"""``mpfinetune doctor``: is this machine fit for a run? One line for each check: ok, warn or fail, and what to do.

A new check is a function ``Machine -> Result`` and a row in ``CHECKS``. What may hang or crash runs in a child process with a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mpfinetune.doctor import cards, host
from mpfinetune.doctor.results import Machine, Result, Row

__all__ = ["CHECKS", "Check", "Machine", "Result", "Row", "diagnose"]


@dataclass(frozen=True)
class Check:
    """``cards``: how many CUDA cards there must be for the check to mean anything."""

    name: str
    run: Callable[[Machine], Result]
    cards: int = 0


CHECKS: tuple[Check, ...] = (
    Check("driver and CUDA", cards.driver),
    Check("precisions", cards.precisions, 1),
    Check("card memory", cards.card_memory, 1),
    Check("pinned memory and bus", cards.bus, 1),
    Check("copies between cards", cards.peers, 2),
    Check("NCCL", cards.nccl, 2),
    Check("host memory", host.host_memory),
    Check("/dev/shm", host.shared_memory),
    Check("run folder", host.run_folder),
    Check("compiler", host.compiler),
    Check("CPUAdam", host.cpu_adam),
    Check("libaio", host.libaio),
    Check("bitsandbytes", host.bitsandbytes),
    Check("port", host.port),
    Check("two processes", host.ranks),
    Check("clock", host.clock),
)


def diagnose(run_dir: Path, build: bool = False) -> Iterator[Row]:
    """The rows one by one, as they are found. A check that needs more cards than there are is left out; the first row says so.

    Args:
        run_dir: where runs would be written.
        build: build what is compiled on this machine, where that has not been done.
    """
    machine = Machine(run_dir, len(cards.visible_cards()), build)
    for check in CHECKS:
        if check.cards <= machine.cards:
            yield Row(check.name, _outcome(check, machine))


def _outcome(check: Check, machine: Machine) -> Result:
    try:
        return check.run(machine)
    except Exception as error:  # one broken check must not hide what the others find
        return Result("fail", f"the check itself failed: {type(error).__name__}: {error}", "report this, with the line")
