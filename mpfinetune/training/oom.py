"""How many rows go through the model at once: as given, probed before training, halved after a pass did not fit; never without a word.

No number of a run depends on it: the loss is divided by the targets of the whole global batch, and the random numbers of an update are
drawn anew when it is run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mpfinetune.config import RunConfig
from mpfinetune.config_rules import ZERO_BUBBLE_SCHEDULES
from mpfinetune.data.batches import GlobalBatch
from mpfinetune.planning.plan import Plan
from mpfinetune.reports.console import Reporter
from mpfinetune.reports.tracking import Tracker
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.oom import OutOfMemory, free_memory, out_of_memory_words
from mpfinetune.training.checkpoint import RunState

T = TypeVar("T")

# What would save memory: (whether it is open to this run, what to set). In the order of what it costs.
SAVINGS: tuple[tuple[Callable[[RunConfig, Plan], bool], str], ...] = (
    (lambda c, p: c.precision == "fp32", "precision: bf16"),
    (lambda c, p: c.recompute == "none", "recompute: full"),
    (lambda c, p: p.strategy in ("pipeline", "zero") and p.offload_optimizer == "none" and _plain_adamw(c), "offload.optimizer: cpu"),
    (lambda c, p: p.strategy == "pipeline" and p.offload_optimizer == "cpu" and _gradients_could_leave(p), "offload.gradients: cpu"),
    (lambda c, p: p.strategy in ("pipeline", "local") and p.offload_optimizer == "none" and _plain_adamw(c), "optimizer.name: adamw_8bit"),
    (lambda c, p: p.strategy == "zero" and p.zero_stage < 3, "zero.stage: 3 with offload.parameters: cpu"),
    (lambda c, p: p.zero_stage == 3 and p.offload_parameters == "none", "offload.parameters: cpu"),
    (lambda c, p: c.adapter.type == "none" and p.zero_stage == 0, "adapter.type: lora with quantize: nf4"),
    (lambda c, p: c.adapter.type != "none" and c.quantize == "none", "quantize: nf4"),
    (lambda c, p: p.strategy == "pipeline", "fewer blocks for the rank that ran out (partition.stages)"),
    (lambda c, p: p.strategy == "local" and not c.partition.device_map, "strategy: pipeline over more cards"),
    (lambda c, p: True, "a smaller data.max_length"),
)


def _plain_adamw(config: RunConfig) -> bool:
    return config.optimizer.name == "adamw" and config.adapter.type == "none"


def _gradients_could_leave(plan: Plan) -> bool:
    return plan.offload_gradients == "none" and plan.replicas == 1 and plan.schedule not in ZERO_BUBBLE_SCHEDULES


class DoesNotFit(Exception):
    """Out of memory where nothing can be halved any more; the message says what would help."""


class MicroSize:
    """The micro-batch of one run: its probing, its halving, and what a checkpoint keeps of it. All calls are collective."""

    def __init__(self, strategy: Strategy, config: RunConfig, reporter: Reporter, tracker: Tracker) -> None:
        self.strategy = strategy
        self.config = config
        self.reporter = reporter
        self.tracker = tracker

    @property
    def rows(self) -> int:
        return self.strategy.plan.micro_size

    def attempt(self, work: Callable[[], T], state: RunState) -> T:
        """Do ``work``, which runs a batch or several; where it does not fit, halve the micro-batch and do it again from its beginning.

        Raises:
            DoesNotFit: there is nothing to halve, or the ranks cannot go on together.
        """
        while True:
            try:
                return work()
            except OutOfMemory as error:
                failure = error
            self._halve(failure, state)

    def must_fit(self, work: Callable[[], T], key: str) -> T:
        """Do ``work``, in which the ranks wait for each other at every turn, so that none can begin anew: where it does not fit, the run ends.

        Args:
            key: of the config, that asked for it.

        Raises:
            DoesNotFit: on this rank only.
        """
        try:
            return work()
        except Exception as error:
            words = out_of_memory_words(error)
            if words is None:
                raise
            raise DoesNotFit(
                f"rank {self.strategy.context.rank} ran out of memory ({words}) in what {key} asks for; set batch.micro_size to less than "
                f"{self.rows}, or leave {key} out"
            ) from error

    def settle(self, state: RunState, longest: GlobalBatch) -> None:
        """Before training: the size that the run has found earlier for this layout, or the one that is probed with the ``longest`` batch.

        Raises:
            DoesNotFit: not even one row fits.
        """
        if state.micro_size is not None and state.micro_size_for == self._layout():
            self.strategy.set_micro_size(state.micro_size)
            self._tell(state, "resumed", f"batch: {self._in_words()}, found earlier in this run (batch.micro_size: {self.config.batch.micro_size})")
        elif self.config.batch.micro_size == "auto":
            self._probe(state, longest)

    def _probe(self, state: RunState, longest: GlobalBatch) -> None:
        best, largest = self.rows, self.strategy.plan.largest_micro_size
        rows_in_batch, tokens = longest.tensors["input_ids"].shape
        self.reporter.say(f"batch.micro_size: auto: trying with the {rows_in_batch} longest rows ({tokens} tokens each)")
        failure = self._try(best, longest)
        if failure is None:
            while best < largest and self._try(min(2 * best, largest), longest) is None:
                best = min(2 * best, largest)
        while failure is not None:
            if best == 1:
                raise DoesNotFit(self._last_words(failure))
            best //= 2
            failure = self._try(best, longest)
        self.strategy.set_micro_size(best)
        self._keep(state)
        self._tell(state, "probed", f"batch.micro_size: auto: {self._in_words()}; at most {largest} rows were possible")

    def _try(self, rows: int, batch: GlobalBatch) -> OutOfMemory | None:
        """Forward and backward passes of a whole update at a size; what did not fit, or None."""
        assert self.strategy.update is not None
        self.strategy.set_micro_size(rows)
        ballast = self._stand_in_for_states()
        failure = None
        try:
            self.strategy.accumulate(batch)
        except OutOfMemory as error:
            if not error.agreed:
                raise DoesNotFit(self._last_words(error)) from error
            failure = error
        del ballast
        self.strategy.update.drop_gradients()
        free_memory()
        return failure

    def _stand_in_for_states(self) -> torch.Tensor | None:
        """The optimizer makes its states at its first update: until then something else takes their room on the card."""
        context = self.strategy.context
        if context.device.type != "cuda":
            return None
        row = self.strategy.plan.ranks[context.pipeline_rank]
        missing = row.weight_bytes + row.optimizer_bytes - torch.cuda.memory_allocated(context.device)
        try:
            return torch.empty(max(0, missing), dtype=torch.uint8, device=context.device)
        except torch.OutOfMemoryError:
            return None  # the first update will say so, with what to do about it

    def _halve(self, failure: OutOfMemory, state: RunState) -> None:
        if not failure.agreed or self.rows == 1:
            raise DoesNotFit(self._last_words(failure))
        before = self.rows
        self.strategy.set_micro_size(before // 2)
        self._keep(state)
        self._tell(
            state,
            "out_of_memory",
            f"after update {state.step}: {failure}: micro-batch halved from {before} to {self._in_words()}; the same rows are run again, "
            "global batch and numbers stay as they are",
            ranks=failure.ranks,
        )

    def _keep(self, state: RunState) -> None:
        state.micro_size, state.micro_size_for = self.rows, self._layout()

    def _layout(self) -> dict[str, Any]:
        """What a found size holds for: under another layout, or another wish, it is looked for anew."""
        plan = self.strategy.plan
        given = {"batch.micro_size": self.config.batch.micro_size, "data.max_length": self.config.data.max_length}
        made = {"strategy": plan.strategy, "schedule": plan.schedule, "pipeline_ranks": plan.pipeline_ranks, "replicas": plan.replicas}
        return {**given, **made, "device": plan.device_type}

    def _in_words(self) -> str:
        plan = self.strategy.plan
        return f"{plan.micro_size} row(s) at once, {plan.microbatches} microbatch(es) per update and replica"

    def _tell(self, state: RunState, reason: str, text: str, **more: Any) -> None:
        self.reporter.say(text)
        self.tracker.log_event(state.step, "micro_size", {"reason": reason, "micro_size": self.rows, **more})

    def _last_words(self, failure: OutOfMemory) -> str:
        plan = self.strategy.plan
        savings = "; ".join(text for open_here, text in SAVINGS if open_here(self.config, plan))
        if failure.agreed:
            return f"{failure}, with one row at once (batch.micro_size: 1): nothing is left to halve. What would save memory: {savings}."
        if self.strategy.survives_out_of_memory:
            return f"{failure}. A smaller batch.micro_size would not help there. What would save memory: {savings}."
        return (
            f"{failure}. Under zero.stage: {plan.zero_stage} over {plan.replicas} processes the ranks exchange within the passes and cannot go on "
            f"after that. Start again with batch.micro_size: {max(1, plan.micro_size // 2)}, which goes on from the newest checkpoint with the same "
            f"numbers. What else would save memory: {savings}."
        )
