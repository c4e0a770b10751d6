"""Checks of CUDA cards: driver and wheel, what each can compute, and whether copies between them are right and fast."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from mpfinetune.doctor.results import GIB, ChildFailure, Machine, Result, run_children
from mpfinetune.planning.capability import BF16_SINCE, Card

INT8_SINCE = (7, 5)  # LLM.int8's kernels: Turing
NF4_SINCE = (6, 0)  # bitsandbytes' other kernels: Pascal
_COPY_SECONDS = 60.0
_SLOW_PEER_GB, _SLOW_BUS_GB, _SLOW_NCCL_GB = 2.0, 3.0, 0.5
_P2P_OFF = "set NCCL_P2P_DISABLE=1 (and if copies are still wrong, switch off the IOMMU / ACS in the firmware)"


def visible_cards() -> list[Card]:
    """The cards that torch can use."""
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Card(card.name, (card.major, card.minor)) for card in properties]


def driver(machine: Machine) -> Result:
    """The driver, the wheel's CUDA and what code the wheel holds for each card."""
    version = driver_version()
    if torch.version.cuda is None:
        if version is None:
            return _no_card("no NVIDIA driver and a torch built for the CPU")
        return Result("warn", f"driver {version}, but torch {torch.__version__} is built for the CPU", "install a CUDA wheel of torch (pytorch.org)")
    if not machine.cards:
        if version is None:
            return _no_card(f"torch is built for CUDA {torch.version.cuda}, but there is no NVIDIA driver")
        return Result(
            "fail",
            f"driver {version} is here, but torch (CUDA {torch.version.cuda}) can use no card",
            "the driver may be too old for this CUDA (update it), or CUDA_VISIBLE_DEVICES hides the cards",
        )
    wheel = torch.cuda.get_arch_list()
    without = [f"card {index}, {card}" for index, card in enumerate(visible_cards()) if not holds_code_for(wheel, card.capability)]
    found = f"driver {version or 'unknown'}, torch {torch.__version__} for CUDA {torch.version.cuda} with code for {', '.join(wheel)}"
    if without:
        return Result(
            "fail",
            f"{found}; none for {'; '.join(without)}",
            "install torch from the index of an older CUDA (cu126 still has Pascal and Volta), or hide the card (CUDA_VISIBLE_DEVICES)",
        )
    return Result("ok", f"{found}: every card is covered")


def _no_card(found: str) -> Result:
    not_checked = "precision per card, copies between cards, NCCL, bus and pinned memory were not checked"
    return Result("warn", f"{found}: no CUDA card; {not_checked}", "runs use the CPU (device: cpu)")


def driver_version() -> str | None:
    """Of the NVIDIA driver, with or without a card that torch can use."""
    path = Path("/proc/driver/nvidia/version")
    if path.is_file():
        match = re.search(r"(?:Kernel Module|x86_64|aarch64)\D*(\d+\.\d+(?:\.\d+)?)", path.read_text(encoding="utf-8", errors="replace"))
        return match.group(1) if match else "of unknown version"
    if shutil.which("nvidia-smi") is None:  # Windows, WSL
        return None
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else None


def holds_code_for(wheel: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a wheel runs on a card: machine code of the same major generation and no newer, or PTX no newer than the card.

    Args:
        wheel: as ``torch.cuda.get_arch_list`` gives it: sm_86, compute_90, sm_90a.
    """
    for entry in wheel:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", entry)
        if match is None:
            continue
        kind, major, minor, specific = match.group(1), int(match.group(2)), int(match.group(3)), match.group(4)
        if specific:  # for one chip and no other
            if (major, minor) == capability:
                return True
        elif (kind == "compute" and (major, minor) <= capability) or (major == capability[0] and minor <= capability[1]):
            return True
    return False


def precisions(machine: Machine) -> Result:
    """bf16, int8 and NF4 of each card."""
    cards = visible_cards()
    lacking = [f"card {index}, {card}: no {', no '.join(names)}" for index, card in enumerate(cards) if (names := lacks(card.capability))]
    if lacking:
        return Result("warn", "; ".join(lacking), "precision: fp16 or fp32 in place of bf16, quantize: nf4 in place of int8, for runs with that card")
    return Result("ok", f"bf16, int8 and NF4 on all {len(cards)} card(s)")


def lacks(capability: tuple[int, int]) -> list[str]:
    """What of bf16, int8 (quantize) and nf4 a card of this compute capability cannot do."""
    needs = {"bf16": BF16_SINCE, "int8": INT8_SINCE, "nf4": NF4_SINCE}
    return [name for name, since in needs.items() if capability < since]


def card_memory(machine: Machine) -> Result:
    parts, full = [], False
    for index, card in enumerate(visible_cards()):
        free, total = torch.cuda.mem_get_info(index)
        parts.append(f"card {index}, {card.name}: {free / GIB:.1f} of {total / GIB:.1f} GiB free")
        full = full or free < total / 2
    return Result("warn" if full else "ok", "; ".join(parts), "another program uses the card: see nvidia-smi" if full else "")


def bus(machine: Machine) -> Result:
    """Pinned memory and PCIe in both directions."""
    try:
        (answer,) = run_children("host", _COPY_SECONDS, device="cuda")
    except ChildFailure as failure:
        todo = "under WSL pinned memory is limited: update WSL and the driver, or use no offload" if is_wsl() else "see dmesg for errors of the bus"
        return Result("fail", f"copies between host and cards: {failure}", todo)
    rates = answer["rates"]
    found = "; ".join(f"card {rate['card']}: {rate['to_card']:.1f} GB/s to the card, {rate['to_host']:.1f} GB/s back" for rate in rates)
    if min(min(rate["to_card"], rate["to_host"]) for rate in rates) < _SLOW_BUS_GB:
        return Result("warn", found, "the slot has few lanes (see nvidia-smi -q -d PCIE under load): offload and pipeline transfers will be slow")
    return Result("ok", f"pinned memory works{' (WSL)' if is_wsl() else ''}; {found}")


def peers(machine: Machine) -> Result:
    """Copies between cards through torch: right, and fast."""
    try:
        (answer,) = run_children("peers", _COPY_SECONDS, device="cuda")
    except ChildFailure as failure:
        return Result("fail", f"copies between cards: {failure}", _P2P_OFF)
    pairs = answer["pairs"]
    wrong = [f"{pair['from']} to {pair['to']}" for pair in pairs if not pair["right"]]
    if wrong:
        return Result("fail", f"copies arrive with wrong bytes: card {', '.join(wrong)}", _P2P_OFF)
    slowest = min(pairs, key=lambda pair: pair["gb_per_second"])
    direct = sum(pair["direct"] for pair in pairs)
    found = f"right in {len(pairs)} directions ({direct} of them directly), at least {slowest['gb_per_second']:.1f} GB/s"
    if slowest["gb_per_second"] < _SLOW_PEER_GB:
        return Result("warn", found, f"card {slowest['from']} to {slowest['to']} is slow: see the slots (nvidia-smi topo -m)")
    return Result("ok", found)


def nccl(machine: Machine) -> Result:
    """Two processes sum a tensor over NCCL; where that fails, again without peer-to-peer copies, to tell the cause."""
    problem = nccl_problem(None)
    if problem is None:
        return Result("ok", "two processes sum over NCCL, right and fast")
    without = nccl_problem({"NCCL_P2P_DISABLE": "1"})
    if without is None:
        return Result("fail", f"NCCL: {problem}; right and fast with NCCL_P2P_DISABLE=1", "export NCCL_P2P_DISABLE=1 before every run")
    return Result("fail", f"NCCL: {problem}; with NCCL_P2P_DISABLE=1: {without}", "see NCCL_DEBUG=INFO; /dev/shm and the driver are the usual causes")


def nccl_problem(environment: dict[str, str] | None) -> str | None:
    """What is wrong with a sum over two cards, or None."""
    try:
        answers = run_children("ranks", _COPY_SECONDS, ranks=2, device="cuda", environment=environment)
    except ChildFailure as failure:
        return str(failure)
    if not all(answer["right"] for answer in answers):
        return "the sum is wrong"
    rate = min(answer["gb_per_second"] for answer in answers)
    return f"{rate:.2f} GB/s only" if rate < _SLOW_NCCL_GB else None


def is_wsl() -> bool:
    path = Path("/proc/version")
    return path.is_file() and "microsoft" in path.read_text(encoding="utf-8", errors="replace").lower()
