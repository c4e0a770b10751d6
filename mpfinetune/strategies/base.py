"""What every strategy does: one training step with the numbers of one big card, and evaluation.

The step: the sum of the loss over the valid targets of the whole global batch, divided by their number; gradients summed over
replicas and over the copies of shared parameters; one norm over all parameters; one optimizer update. Strategies differ in where
tensors live. A new strategy is one module here and one row in ``build.STRATEGIES``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpfinetune.data.batches import GlobalBatch, pad_rows, slice_rows
from mpfinetune.dist import DistContext, all_reduce_buckets, broadcast_buckets
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.stage import StageModule
from mpfinetune.planning.memory_plan import CHECKPOINT_BYTES_AT_ONCE
from mpfinetune.planning.plan import Plan
from mpfinetune.strategies.oom import MemoryGuard, OutOfMemory, free_memory, out_of_memory_words
from mpfinetune.strategies.update import Update, zero_gradient

# (logits [rows, T, V] or [rows, C], labels [rows, T] or [rows]) -> sum of the loss over the valid targets, a scalar in fp32.
LossSum = Callable[[Tensor, Tensor], Tensor]
# Called with each microbatch's (logits, labels) where the logits are.
Observer = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class StepOutcome:
    """One update, the same on every rank."""

    loss: float  # mean over the valid targets of the update
    grad_norm: float  # over all parameters, before clipping
    skipped: bool  # the norm was not finite: nothing was changed
    stop_requested: bool  # some rank asked to stop after this update


@dataclass(frozen=True)
class SharedParameter:
    """A parameter that several pipeline ranks hold a copy of: tied to another stage's, or used by every stage."""

    name: str
    pipeline_ranks: tuple[int, ...]


class Strategy(ABC):
    """The stages of this rank and the step over them."""

    def __init__(self, plan: Plan, facts: ModelFacts, context: DistContext, stages: dict[int, StageModule], loss_sum: LossSum) -> None:
        self.plan = plan
        self.facts = facts
        self.context = context
        self.stages = stages
        self.loss_sum = loss_sum
        self.update: Update | None = None
        self.drawn: frozenset[str] = frozenset()  # names that no file of the base model holds
        self.memory = MemoryGuard()
        self._tie_local_stages()
        self.shared = shared_parameters(plan, facts)
        self._shared_groups = self._make_shared_groups()
        self._align_shared_copies()

    # --- what a strategy defines ---

    @abstractmethod
    def _forward_backward(self, batch: GlobalBatch, loss_scale: float) -> Tensor:
        """Accumulate gradients of the mean loss times ``loss_scale``; returns this rank's part of the mean itself, a scalar."""

    @abstractmethod
    def _forward(self, batch: GlobalBatch, observe: Observer) -> None:
        """Forward passes only; ``observe`` sees each microbatch's logits where they are."""

    def _guarded(self, work: Callable[[], object]) -> None:
        """Run the passes of a batch so that a want of memory ends in ``memory.failure``; here, where no rank waits for another in them."""
        self.memory.runs(work)

    def _forget_shapes(self) -> None:  # noqa: B027 (most strategies have nothing to drop)
        """Drop what was made for the present size of a microbatch."""

    @property
    def survives_out_of_memory(self) -> bool:
        """Whether all ranks reach the end of a batch when one has run out of memory on the way."""
        return True

    # --- what all share ---

    @property
    def has_logits(self) -> bool:
        """Whether this rank holds the model's end."""
        return any(stage.span.has_epilogue for stage in self.stages.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank by canonical Hugging Face name, each once."""
        named: dict[str, nn.Parameter] = {}
        for stage in self.stages.values():
            for name, parameter in stage.model.named_parameters():
                named.setdefault(self.facts.canonical_name(name), parameter)
        return named

    def first_held_names(self) -> set[str]:
        """Names of which this rank is the first holder along the pipeline: each parameter of the model is in exactly one rank's set."""
        shared = {parameter.name: parameter.pipeline_ranks[0] for parameter in self.shared}
        return {name for name in self.named_parameters() if shared.get(name, self.context.pipeline_rank) == self.context.pipeline_rank}

    def saved_names(self) -> set[str]:
        """The names that a checkpoint holds: all, but with adapters only what learns and what no file of the base model holds."""
        parameters = self.named_parameters()
        if not self.facts.adapted:
            return set(parameters)
        kept = self.drawn | self.facts.adapter_names
        return {name for name, parameter in parameters.items() if parameter.requires_grad or name in kept}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of this rank's parameters by canonical name."""
        return {name: tuple(parameter.shape) for name, parameter in self.named_parameters().items()}

    def loading_groups(self) -> list[list[str]]:
        """The names in the groups in which a checkpoint is read, so that no rank holds its weights and states twice on the way."""
        groups: list[list[str]] = [[]]
        size = 0
        for name, shape in self.parameter_shapes().items():
            own = 12 * math.prod(shape)  # an fp32 weight and two moments
            if groups[-1] and size + own > CHECKPOINT_BYTES_AT_ONCE:
                groups.append([])
                size = 0
            groups[-1].append(name)
            size += own
        return groups

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        """Give parameters the values of whole tensors by canonical name, in the parameters' own type."""
        parameters = self.named_parameters()
        for name, value in weights.items():
            parameters[name].copy_(value)

    def train_step(self, batch: GlobalBatch, lr: float, stop_requested: Callable[[], bool] = lambda: False) -> StepOutcome:
        """One optimizer update over a whole global batch; collective over all ranks.

        Args:
            stop_requested: asked after the passes, so that a signal that came while they ran is seen by all ranks at that same update.

        Raises:
            OutOfMemory: a pass did not fit (``agreed``: on every rank, and nothing was changed), or the update itself did not.
        """
        assert self.update is not None, "set the update before the first step"
        loss, stops = self.accumulate(batch, stop_requested)
        try:
            norm, skipped = self.update.apply(lr)
        except Exception as error:
            words = out_of_memory_words(error)
            if words is None:
                raise
            # Weights may have moved already, so there is no way back; and a smaller microbatch would not help.
            raise OutOfMemory([(self.context.rank, f"in the optimizer's update: {words}")], agreed=False) from error
        return StepOutcome(loss, norm, skipped, stops)

    def accumulate(self, batch: GlobalBatch, stop_requested: Callable[[], bool] = lambda: False) -> tuple[float, bool]:
        """The gradients of the mean loss over a whole global batch; collective over all ranks.

        Returns:
            The mean loss, and whether some rank asked to stop.

        Raises:
            OutOfMemory: see ``train_step``; the gradients are dropped.
        """
        assert self.update is not None
        loss_scale = self.update.loss_scale
        for stage in self.stages.values():
            stage.train()
        loss = torch.zeros((), device=self.context.device)

        def passes() -> None:
            loss.add_(self._forward_backward(batch, loss_scale))

        self._guarded(passes)
        mean_loss, stops = self._agree(loss.double(), float(stop_requested()))
        return mean_loss, stops > 0

    @torch.no_grad()
    def evaluate(self, batch: GlobalBatch, observe: Observer) -> None:
        """Forward passes over a global batch; collective over all ranks.

        Raises:
            OutOfMemory: a pass did not fit; ``observe`` may have seen a part of the batch.
        """
        for stage in self.stages.values():
            stage.eval()
        self._guarded(lambda: self._forward(batch, observe))
        self._agree()

    def set_micro_size(self, rows: int) -> None:
        """Rows in one forward pass from now on; the same on every rank. No number of the run depends on it."""
        self.plan = self.plan.with_micro_size(rows)
        self._forget_shapes()

    def _agree(self, *values: Tensor | float) -> list[float]:
        """The sums of some numbers over all ranks, if none has run out of memory.

        Raises:
            OutOfMemory: on every rank, if any has.
        """
        failed = self.memory.failure is not None
        if failed and not self.survives_out_of_memory:
            raise OutOfMemory([(self.context.rank, str(self.memory.failure))], agreed=False)
        parts = [value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64) for value in (*values, float(failed))]
        *sums, failures = self.context.sum_over_world(torch.stack([part.to(self.context.device) for part in parts])).tolist()
        if failures:
            self._give_up_batch()
        return sums

    def _give_up_batch(self) -> NoReturn:
        failure, self.memory.failure = self.memory.failure, None
        if self.update is not None:
            self.update.drop_gradients()
        self._forget_shapes()
        free_memory()
        told = self.context.gather_objects(failure)
        raise OutOfMemory([(rank, words) for rank, words in enumerate(told) if words is not None], agreed=True)

    def own_microbatches(self, batch: GlobalBatch) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """This replica's rows as (inputs, labels), the same number of microbatches on every one: a rank with fewer would leave the others waiting."""
        padded = pad_rows(batch, self.plan.padded_rows(batch.row_count))
        rows = padded.row_count // self.context.replicas
        own = slice_rows(padded, self.context.replica * rows, (self.context.replica + 1) * rows)
        for start in range(0, rows, self.plan.micro_size):
            part = {name: t[start : start + self.plan.micro_size].to(self.context.device) for name, t in own.tensors.items()}
            labels = part.pop("labels")
            yield part, labels

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of shared parameters over their copies, so that every copy has the whole."""
        parameters = self.named_parameters()
        for names, group in self._shared_groups:
            held = [parameters[name] for name in names if parameters[name].requires_grad]
            for parameter in held:
                if parameter.grad is None:
                    parameter.grad = zero_gradient(parameter)
            all_reduce_buckets([parameter.grad for parameter in held if parameter.grad is not None], group)

    def _tie_local_stages(self) -> None:
        """A shared parameter whose holders are stages of this rank (V-shaped schedules) is one parameter, without any exchange."""
        first: dict[str, nn.Parameter] = {}
        for stage in self.stages.values():
            for name, parameter in list(stage.model.named_parameters(remove_duplicate=False)):
                kept = first.setdefault(self.facts.canonical_name(name), parameter)
                if kept is not parameter:
                    owner, _, leaf = name.rpartition(".")
                    setattr(stage.model.get_submodule(owner), leaf, kept)

    def _make_shared_groups(self) -> list[tuple[list[str], Any]]:
        """(names, process group) for each set of pipeline ranks that share parameters; new_group is collective, so all ranks make all."""
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for parameter in self.shared:
            by_ranks.setdefault(parameter.pipeline_ranks, []).append(parameter.name)
        mine: list[tuple[list[str], Any]] = []
        for pipeline_ranks, names in by_ranks.items():
            for replica in range(self.context.replicas):
                ranks = [self.context.global_rank(pipeline_rank, replica) for pipeline_rank in pipeline_ranks]
                group = dist.new_group(ranks, timeout=self.context.timeout)
                if self.context.rank in ranks:
                    mine.append((names, group))
        return mine

    @torch.no_grad()
    def _align_shared_copies(self) -> None:
        """Make the copies equal before the first step: what the first holder has."""
        parameters = self.named_parameters()
        holders = {parameter.name: parameter.pipeline_ranks for parameter in self.shared}
        for names, group in self._shared_groups:
            source = self.context.global_rank(holders[names[0]][0], self.context.replica)
            broadcast_buckets([parameters[name].data for name in names], source, group)


def shared_parameters(plan: Plan, facts: ModelFacts) -> list[SharedParameter]:
    """The parameters that more than one pipeline rank holds."""
    holders: dict[str, set[int]] = {}
    for rank in range(plan.pipeline_ranks):
        for stage in plan.stages_of(rank):
            for name in plan.spans[stage].parameter_names(facts):
                holders.setdefault(facts.canonical_name(name), set()).add(rank)
    return [SharedParameter(name, tuple(sorted(ranks))) for name, ranks in holders.items() if len(ranks) > 1]
