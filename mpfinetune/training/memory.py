"""Memory before and after a run: the prediction for a plan, the refusal of what cannot fit, and what was measured beside what was predicted."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
import torch

from mpfinetune.config import RunConfig
from mpfinetune.errors import LaunchError, ModelError
from mpfinetune.models.architecture import TORCH_DTYPES
from mpfinetune.models.costs import CostMeter, CostQuestion
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.quantize import statistics_of
from mpfinetune.planning.hardware import cards_of_ranks, smallest_card
from mpfinetune.planning.memory import predict_memory
from mpfinetune.planning.memory_plan import GIB, MIB, MemoryPlan
from mpfinetune.planning.plan import Plan, World
from mpfinetune.planning.tensor_bytes import learning_names
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.orders import schedule_orders
from mpfinetune.strategies.partitioned import own_bytes
from mpfinetune.training.loss import loss_sum_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_WARM_UP_UPDATES = 2
MEASURED_COLUMNS = ("rank", "what", "unit", "predicted", "measured", "error")


def cost_meter(
    config: RunConfig,
    hf_config: PretrainedConfig,
    facts: ModelFacts,
    num_labels: int,
    device_type: str,
    capability: tuple[int, int] | None = None,
) -> CostMeter:
    """What measures this run's model at any size of microbatch.

    Raises:
        ModelError: the model cannot be run with fake tensors.
    """
    question = CostQuestion(
        task=config.model.task,
        attention=config.model.attention,
        dtype=TORCH_DTYPES[config.precision],
        learning=learning_names(config, facts),
        quantize=config.quantize,
        adapter=config.adapter if config.adapter.type != "none" else None,
        target="cuda" if device_type == "cuda" else "cpu",
        capability=capability,
        packed=config.data.packing,
    )
    return CostMeter(hf_config, facts, question, loss_sum_for(config.model.task, num_labels))


def plan_with_memory(
    config: RunConfig, facts: ModelFacts, plan: Plan, world: World, meter: Callable[[], CostMeter], host_total_bytes: int | None = None
) -> Plan:
    """The plan with its predicted bytes; where the model cannot be measured, with a note that activations are not known.

    Args:
        host_total_bytes: memory of the host that the run will be on; None: not known.
    """
    notes = plan.notes
    try:
        costs = meter().measure(plan.micro_size, config.data.max_length)
    except ModelError as error:
        costs = None
        notes = (*notes, f"memory: {error}; the prediction is without activations and workspace")
    orders = {}
    if plan.strategy == "pipeline":
        orders = schedule_orders(plan.schedule, plan.pipeline_ranks, plan.stages_per_rank, plan.microbatches)
    groups = cards_of_ranks(world.cards, plan.replicas) if plan.device_type == "cuda" else []
    sizes = [smallest_card(group).memory_bytes for group in groups]
    memory = predict_memory(config, facts, plan, world, costs, orders, sizes, host_total_bytes)
    return replace(plan, memory=memory, notes=(*notes, *_warnings(plan, memory)))


def _warnings(plan: Plan, memory: MemoryPlan) -> list[str]:
    lines = []
    for card in memory.cards:
        if card.fits is False:
            missing = card.needed_bytes - (card.card_bytes or 0)
            lines.append(
                f"memory: rank {card.rank} needs {card.needed_bytes / GIB:.1f} GiB of a card of {(card.card_bytes or 0) / GIB:.1f} GiB "
                f"({missing / GIB:.1f} GiB too much, during {card.peak.name}); smaller: batch.micro_size, data.max_length, recompute: full, "
                "offload.optimizer: cpu, quantize with an adapter"
            )
    if memory.host_fits is False:
        lines.append(f"memory: {_host_problem(plan, memory)}")
    return lines


def _host_problem(plan: Plan, memory: MemoryPlan) -> str:
    cause = "device: cpu" if plan.device_type == "cpu" else "offload"
    return (
        f"the processes of one host need {memory.fullest_host_bytes / GIB:.1f} GiB of host memory, but it has "
        f"{(memory.host_total_bytes or 0) / GIB:.1f} GiB ({cause}); take a smaller model, batch.micro_size or data.max_length, fewer processes, "
        "or less offload"
    )


def refuse_what_cannot_fit(plan: Plan) -> None:
    """Before anything is started. A card is refused only for what is counted exactly; what is estimated is warned of.

    Raises:
        LaunchError: the host's memory, or the weights, gradients and optimizer states alone on a card, are too much.
    """
    memory = plan.memory
    if memory is None:
        return
    if memory.host_fits is False:
        raise LaunchError(_host_problem(plan, memory))
    for card in memory.cards:
        step = card.phase("update")
        held = step.weight_bytes + step.gradient_bytes + step.optimizer_bytes + card.context_bytes
        if card.card_bytes is not None and held > card.card_bytes:
            raise LaunchError(
                f"rank {card.rank} would hold {held / GIB:.1f} GiB of weights, gradients and optimizer states on a card of "
                f"{card.card_bytes / GIB:.1f} GiB; use more stages, offload.optimizer: cpu, precision: bf16, or quantize with an adapter"
            )


def refuse_disk_that_cannot_swap(plan: Plan, nvme_path: str | None) -> None:
    """Before anything is started; makes the folder.

    Raises:
        LaunchError: nothing can be written there, or the disk has less room than will be offloaded to it.
    """
    if "nvme" not in (plan.offload_optimizer, plan.offload_parameters) or nvme_path is None:
        return
    try:
        Path(nvme_path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=nvme_path) as file:
            file.write(b"tried")
            file.flush()
        free = shutil.disk_usage(nvme_path).free
    except OSError as failure:
        raise LaunchError(
            f"offload.nvme_path: {nvme_path} given, but nothing can be written there ({failure}); give a folder on a local disk"
        ) from failure
    needed = sum(row.disk_bytes for row in plan.ranks) * plan.replicas
    if needed > free:
        raise LaunchError(
            f"offload.nvme_path: {nvme_path} given, which has {free / GIB:.1f} GiB free, but {needed / GIB:.1f} GiB will be offloaded to it; "
            "make room, give a folder on another disk, or set offload.optimizer or offload.parameters to cpu"
        )


@dataclass(frozen=True)
class MeasuredMemory:
    """What one rank's tensors hold at the end of a run, counted from the tensors; ``peak_bytes`` is of the device, or resident on the CPU."""

    weight_bytes: int
    gradient_bytes: int  # of the last update
    optimizer_bytes: int  # states and masters on the card; step counters, single numbers on the host, are left out
    offloaded_bytes: int
    peak_bytes: int


def measure(strategy: Strategy) -> MeasuredMemory:
    """Count this rank's tensors."""
    update = strategy.update
    assert update is not None
    optimizer, offloaded = update.optimizer_bytes()
    return MeasuredMemory(
        weight_bytes=_weight_bytes(strategy),
        gradient_bytes=update.gradient_bytes,
        optimizer_bytes=optimizer,
        offloaded_bytes=offloaded,
        peak_bytes=peak_memory_bytes(strategy.context.device),
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes allocated on the card so far; on the CPU the most bytes that the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _weight_bytes(strategy: Strategy) -> int:
    """Parameters with the statistics of those that are quantised; partitioned ones with this rank's part."""
    parameters = strategy.named_parameters().values()
    statistics = [tensor for stage in strategy.stages.values() for tensor in statistics_of(stage)]
    parts = sum(own_bytes(parameter) for parameter in parameters if hasattr(parameter, "ds_tensor"))
    whole = [parameter for parameter in parameters if not hasattr(parameter, "ds_tensor")]
    return parts + sum({tensor.data_ptr(): tensor.nbytes for tensor in (*whole, *statistics)}.values())


@dataclass(frozen=True)
class Comparison:
    """One predicted number of one rank beside the measured one, in ``unit``."""

    rank: int
    what: str
    predicted: float
    measured: float
    unit: str = "bytes"

    @property
    def relative_error(self) -> float | None:
        """(predicted - measured) / measured; None where nothing was measured."""
        return (self.predicted - self.measured) / self.measured if self.measured else None

    def as_dict(self) -> dict[str, Any]:
        """For the run's record."""
        return {**asdict(self), "relative_error": self.relative_error}


def compare(plan: Plan, measured: list[MeasuredMemory], step_seconds: Sequence[float] = ()) -> list[Comparison]:
    """Prediction beside measurement, by rank of the whole run; empty where nothing was predicted.

    Args:
        step_seconds: of the updates so far; the first ones, which build and warm up, are left out of the median.
    """
    memory = plan.memory
    if memory is None:
        return []
    found = []
    for rank, seen in enumerate(measured):
        row = plan.ranks[rank // plan.replicas]
        cards = [card for card in memory.cards if card.rank == row.rank]
        found += [
            Comparison(rank, "weights", row.weight_bytes + row.offloaded_weight_bytes, seen.weight_bytes),
            Comparison(rank, "gradients", row.gradient_bytes, seen.gradient_bytes),
            Comparison(rank, "optimizer", row.optimizer_bytes, seen.optimizer_bytes),
        ]
        if plan.device_type == "cuda":
            found.append(Comparison(rank, "peak on the card", max(card.peak.total_bytes for card in cards), seen.peak_bytes))
        elif memory.activations_known:
            resident = sum(card.peak.total_bytes for card in cards) + memory.host_pinned_bytes[row.rank] + memory.host_pageable_bytes[row.rank]
            found.append(Comparison(rank, "resident peak of the process", resident, seen.peak_bytes))
        if seen.offloaded_bytes:
            found.append(Comparison(rank, "offloaded", row.offloaded_bytes - row.offloaded_weight_bytes, seen.offloaded_bytes))
    settled = step_seconds[_WARM_UP_UPDATES:]
    if plan.prediction is not None and settled:
        # Predicted for rows at full length; shorter ones take less.
        found.append(Comparison(0, "median update, predicted for full rows", plan.prediction.step_seconds, median(settled), "seconds"))
    return found


def comparison_rows(comparisons: list[Comparison]) -> list[tuple[str, ...]]:
    """For a table of ``MEASURED_COLUMNS``; bytes as MiB."""
    rows: list[tuple[str, ...]] = []
    for entry in comparisons:
        size, unit, digits = (MIB, "MiB", 1) if entry.unit == "bytes" else (1, entry.unit, 3)
        error = "-" if entry.relative_error is None else f"{entry.relative_error:+.1%}"
        rows.append((str(entry.rank), entry.what, unit, f"{entry.predicted / size:,.{digits}f}", f"{entry.measured / size:,.{digits}f}", error))
    return rows
