"""The one training loop: the same for every strategy."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mpfinetune.data.batches import GlobalBatch, UpdateLoader
from mpfinetune.errors import CheckpointError
from mpfinetune.models.load import stream_seed, weight_files
from mpfinetune.planning.tensor_bytes import EIGHT_BIT
from mpfinetune.reports.console import Reporter
from mpfinetune.reports.tracking import Tracker
from mpfinetune.strategies.base import StepOutcome, Strategy
from mpfinetune.strategies.deepspeed_engine import DeepSpeedUpdate
from mpfinetune.strategies.update import LossScale, PlainUpdate, Update
from mpfinetune.training.checkpoint import RunState, check_identity, load_into, prune, read_state, save_checkpoint, tensors_of
from mpfinetune.training.evaluate import evaluate
from mpfinetune.training.learning_rate import learning_rate
from mpfinetune.training.memory import peak_memory_bytes
from mpfinetune.training.optim import NamedOptimizer
from mpfinetune.training.prepare import PreparedRun


class Stopped(Exception):
    """The run was asked to stop by a signal; its state is saved."""


class NotFinite(Exception):
    """Too many updates in a row had a gradient that was not finite."""


class Trainer:
    """A strategy with its optimizer, its data and its place in the run."""

    def __init__(self, run: PreparedRun, strategy: Strategy, reporter: Reporter, tracker: Tracker) -> None:
        self.run = run
        self.config = run.config
        self.strategy = strategy
        self.reporter = reporter
        self.tracker = tracker
        self.loader = run.train_loader()
        self.evaluation_loader = run.evaluation_loader()
        self.total_updates = run.total_updates()
        self.checkpoints = Path(self.config.run_dir) / "checkpoints"
        self.state = RunState(identity=self._identity())
        self.update = self._make_update()
        strategy.update = self.update
        self.skipped_in_a_row = 0

    def fit(self) -> None:
        """Train from the present position to the end, evaluating and saving on the way; collective.

        Raises:
            Stopped: a signal asked for it; the state is saved.
            NotFinite: the gradients stay infinite or NaN; the last checkpoint is left as it is.
        """
        every_evaluation, every_save = self.config.eval.every_steps, self.config.checkpoint.every_steps
        if self.state.step == 0 and self.config.eval.at_start:
            self.evaluate()
        with self.reporter.progress(self.total_updates, self.state.step) as bar, _stop_signals() as stop:
            for epoch, index, batch in self._updates():
                started = time.perf_counter()
                lr = learning_rate(self.config.train, self.config.optimizer.lr, self.state.applied_updates, self.total_updates)
                torch.manual_seed(stream_seed(self.config.train.seed, "update", self.state.step, self.strategy.context.rank))
                outcome = self.strategy.train_step(batch, lr, stop_requested=bool(stop))
                self._advance(epoch, index, batch, outcome)
                seconds = time.perf_counter() - started
                self._log(epoch + (index + 1) / self.loader.updates_per_epoch, batch, outcome, lr, seconds)
                bar.advance(loss=outcome.loss, lr=lr, tokens_per_second=batch.token_count / seconds)
                last = self.state.step == self.total_updates
                if last or (every_evaluation and self.state.step % every_evaluation == 0):
                    self.evaluate()
                if outcome.stop_requested or (self.config.checkpoint.save_final if last else every_save and self.state.step % every_save == 0):
                    self.save()
                if outcome.stop_requested and not last:
                    raise Stopped

    def evaluate(self) -> dict[str, float]:
        """Score the held-out rows at the present weights; collective."""
        if self.evaluation_loader is None:
            return {}
        metrics = evaluate(self.strategy, self.evaluation_loader, self.run.data)
        value = metrics[self.run.data.best_metric]
        self.state.score = -value if self.run.data.lower_is_better else value
        self.tracker.log_evaluation(self.state.step, "evaluation", metrics)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.reporter.say(f"evaluation at update {self.state.step} ({len(self.run.data.evaluation)} rows): {shown}")
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the present state; collective."""
        if isinstance(self.update, PlainUpdate) and self.update.scale.dynamic:
            self.state.loss_scale, self.state.updates_at_loss_scale = self.update.scale.value, self.update.scale.updates_since_change
        saved = save_checkpoint(self.checkpoints, self.state, tensors_of(self.strategy), self.strategy.context)
        if self.strategy.context.rank == 0:
            prune(self.checkpoints, self.config.checkpoint.keep, saved)
        self.reporter.say(f"saved {saved}")

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint, whatever layout wrote it.

        Raises:
            CheckpointError: it belongs to another run, or is broken.
        """
        check_identity(checkpoint, self.state.identity)
        state = read_state(checkpoint)
        if state.step > self.total_updates:
            raise CheckpointError(
                f"checkpoint.resume: {checkpoint} is at update {state.step}, but the run ends at {self.total_updates} "
                "(train.max_steps, train.epochs); nothing would be left to train"
            )
        self.load_weights(checkpoint)
        self.state = replace(state, identity=self.state.identity)
        if isinstance(self.update, PlainUpdate) and self.update.scale.dynamic and state.loss_scale is not None:
            self.update.scale.value, self.update.scale.updates_since_change = state.loss_scale, state.updates_at_loss_scale

    def load_weights(self, checkpoint: Path) -> None:
        """Weights and optimizer state of a checkpoint, for this rank's parameters."""
        load_into(self.strategy, checkpoint)

    def _make_update(self) -> Update:
        if self.strategy.plan.zero_stage:
            return DeepSpeedUpdate(self.strategy, self.config)
        optimizer = NamedOptimizer(self.strategy.named_parameters(), self.config.optimizer, self.run.planned.facts.embeddings)
        return PlainUpdate(self.strategy, optimizer, self.config.train.clip_norm, LossScale.for_precision(self.config.precision))

    def _updates(self) -> Iterator[tuple[int, int, GlobalBatch]]:
        """(epoch, index in the epoch, batch) from the present position to the end of the run."""
        epoch, index = self.state.epoch, self.state.index
        while self.state.step < self.total_updates:
            for batch in self.loader.batches(epoch, index):
                yield epoch, index, batch
                index += 1
                if self.state.step >= self.total_updates:
                    return
            epoch, index = epoch + 1, 0

    def _advance(self, epoch: int, index: int, batch: GlobalBatch, outcome: StepOutcome) -> None:
        state = self.state
        state.step += 1
        state.tokens += batch.token_count
        state.epoch, state.index = (epoch, index + 1) if index + 1 < self.loader.updates_per_epoch else (epoch + 1, 0)
        state.score = None
        if not outcome.skipped:
            state.applied_updates += 1
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        self.reporter.say(f"update {state.step} skipped: the gradient's norm is {outcome.grad_norm}; weights and optimizer are unchanged")
        if self.skipped_in_a_row > self.config.train.max_skipped_updates:
            spoilt = sorted({name for names in self.strategy.context.gather_objects(getattr(self.update, "not_finite", [])) for name in names})
            raise NotFinite(
                f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite (train.max_skipped_updates); the newest checkpoint "
                f"in {self.checkpoints} is from before. First of {len(spoilt)} such parameters: {', '.join(spoilt[:5])}. "
                "Try a smaller optimizer.lr, more warm-up, or precision: fp32."
            )

    def _log(self, epoch: float, batch: GlobalBatch, outcome: StepOutcome, lr: float, seconds: float) -> None:
        context = self.strategy.context
        peaks = torch.zeros(context.world_size, dtype=torch.float64, device=context.device)
        peaks[context.rank] = peak_memory_bytes(context.device)
        self.tracker.log_update(
            step=self.state.step,
            epoch=epoch,
            loss=outcome.loss,
            lr=lr,
            grad_norm=outcome.grad_norm,
            tokens=self.state.tokens,
            samples_per_second=batch.real_rows / seconds,
            tokens_per_second=batch.token_count / seconds,
            step_seconds=seconds,
            peak_memory_bytes=[int(value) for value in context.sum_over_world(peaks).tolist()],
            skipped=outcome.skipped,
        )

    def _adapter_identity(self) -> dict[str, Any]:
        """A checkpoint of an adapter run holds what learns; the base is read from the model's files, and must be the same one."""
        identity: dict[str, Any] = {"adapter.type": self.config.adapter.type, "quantize": self.config.quantize}
        if self.config.optimizer.name in EIGHT_BIT:
            identity["optimizer.stable_embedding"] = self.config.optimizer.stable_embedding
        if self.config.adapter.type != "none":
            adapter = self.config.adapter
            identity |= {"adapter.rank": adapter.rank, "adapter.alpha": adapter.alpha, "adapter.targets": adapter.targets}
            identity["base weights, which are not in the checkpoint"] = _base_identity(self.run.folder)
        return identity

    def _identity(self) -> dict[str, Any]:
        """What the order of the rows and the meaning of the state depend on; strategy, map and micro size are free to change."""
        return {
            **self._adapter_identity(),
            "model": self.run.planned.facts.model_type,
            "optimizer.name": self.config.optimizer.name,
            "batch.global_size": self.config.batch.global_size,
            "train.seed": self.config.train.seed,
            "data.padding": self.config.data.padding,
            "data.max_length": self.config.data.max_length,
            "number of training rows": len(self.run.data.train),
        }


def _base_identity(folder: Path | None) -> Any:
    """What an adapter run's checkpoints do not hold, and from where it comes; the size of each file tells another base."""
    return "drawn from train.seed" if folder is None else {file.name: file.stat().st_size for file in weight_files(folder)}


def progress_summary(loader: UpdateLoader, total_updates: int) -> str:
    """``60 updates of 16 rows, 1.2 epochs``."""
    epochs = total_updates / loader.updates_per_epoch
    return f"{total_updates} updates, {math.floor(epochs * 100) / 100:g} epochs of {loader.updates_per_epoch} updates"


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """The first SIGTERM or SIGINT is noted (finish the update, save, stop); the same signal again acts as usual.

    Ctrl-C reaches the ranks twice, from the terminal and as the launcher's SIGTERM, so two different signals are one wish.
    """
    noted: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.signal(number, previous[number])

    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for noted_signal, handler in previous.items():
            signal.signal(noted_signal, handler)
