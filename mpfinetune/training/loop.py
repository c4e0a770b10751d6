"""The one training loop: the same for every strategy."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
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
from mpfinetune.strategies.full_precision import FullPrecisionForward
from mpfinetune.training.checkpoint import RunState, check_identity, complete_checkpoints, load_into, prune, read_state, save_checkpoint, streams_of
from mpfinetune.training.evaluate import evaluate
from mpfinetune.training.leaks import LeakWatch, memory_of_ranks
from mpfinetune.training.learning_rate import learning_rate
from mpfinetune.training.memory import peak_memory_bytes
from mpfinetune.training.oom import MicroSize
from mpfinetune.training.optim import attach_update
from mpfinetune.training.prepare import PreparedRun

FULL_PRECISION_SPLIT = "evaluation_full_precision"  # in metrics.jsonl


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
        self.update = attach_update(strategy, self.config)
        self.skipped_in_a_row = 0
        self.step_seconds: list[float] = []  # of this session's updates
        self.micro_size = MicroSize(strategy, self.config, reporter, tracker)
        self.leaks = LeakWatch(self.config.watch, strategy.context.world_size)

    def fit(self) -> None:
        """Train from the present position to the end, evaluating and saving on the way; collective.

        Raises:
            Stopped: a signal asked for it; the state is saved.
            NotFinite: the gradients stay infinite or NaN; the last checkpoint is left as it is.
            DoesNotFit: out of memory with one row at once.
        """
        every_evaluation, every_save = self.config.eval.every_steps, self.config.checkpoint.every_steps
        if self.state.step == 0 and self.config.eval.at_start:
            self.evaluate()
        with self.reporter.progress(self.total_updates, self.state.step) as bar, _stop_signals() as stop:
            for epoch, index, batch in self._updates():
                started = time.perf_counter()
                lr = learning_rate(self.config.train, self.config.optimizer.lr, self.state.applied_updates, self.total_updates)
                scale_was_smallest = self.update.scale_is_smallest
                outcome = self.micro_size.attempt(partial(self._update_once, batch, lr, lambda: bool(stop)), self.state)
                self._advance(epoch, index, batch, outcome, scale_was_smallest)
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

    def settle_micro_size(self) -> None:
        """Once before training, after a resume: what was found earlier, or ``batch.micro_size: auto``; collective."""
        self.micro_size.settle(self.state, self.loader.longest_batch())

    def _update_once(self, batch: GlobalBatch, lr: float, stop_requested: Callable[[], bool]) -> StepOutcome:
        """The random numbers begin anew each time: an update that is run again is that of a run which had the smaller micro-batch all along."""
        torch.manual_seed(stream_seed(self.config.train.seed, "update", self.state.step, self.strategy.context.rank))
        return self.strategy.train_step(batch, lr, stop_requested=stop_requested)

    def evaluate(self, full_precision: bool | None = None) -> dict[str, float]:
        """Score the held-out rows at the present weights; collective.

        Args:
            full_precision: also with every weight in full precision. Default: at every ``eval.full_precision_every``-th evaluation.
        """
        if self.evaluation_loader is None:
            return {}
        self.state.evaluations += 1
        every = self.config.eval.full_precision_every
        metrics = self.micro_size.attempt(partial(evaluate, self.strategy, self.evaluation_loader, self.run.data), self.state)
        value = metrics[self.run.data.best_metric]
        self.state.score = -value if self.run.data.lower_is_better else value
        self.tracker.log_evaluation(self.state.step, "evaluation", metrics)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.reporter.say(f"evaluation at update {self.state.step} ({len(self.run.data.evaluation)} rows): {shown}")
        if full_precision or (full_precision is None and every and self.state.evaluations % every == 0):
            self._evaluate_at_full_precision(self.evaluation_loader, metrics["loss"])
        return metrics

    def _evaluate_at_full_precision(self, loader: UpdateLoader, loss: float) -> None:
        """The same rows with fp32 weights and the unquantised base; how far ``loss`` is from theirs is the cost of rounding."""
        planned = self.run.planned
        forward = FullPrecisionForward(self.strategy, self.config, planned.hf_config, self.run.folder)
        metrics = self.micro_size.must_fit(partial(evaluate, self.strategy, loader, self.run.data, forward), "eval.full_precision_every")
        difference = loss - metrics["loss"]
        self.tracker.log_evaluation(self.state.step, FULL_PRECISION_SPLIT, {**metrics, "loss_difference": difference})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        held = self.config.precision if self.config.quantize == "none" else f"{self.config.quantize} and {self.config.precision}"
        self.reporter.say(f"  at full precision: {shown}; the loss in {held} is {abs(difference):.5f} {'higher' if difference >= 0 else 'lower'}")

    def save(self) -> None:
        """Write a checkpoint of the present state; collective."""
        scale = self.update.scale_state()
        if scale is not None:
            self.state.loss_scale, self.state.updates_at_loss_scale = scale
        saved = save_checkpoint(self.checkpoints, self.state, streams_of(self.strategy), self.strategy.context)
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
        if state.loss_scale is not None:
            self.update.load_scale_state(state.loss_scale, state.updates_at_loss_scale)

    def load_weights(self, checkpoint: Path) -> None:
        """Weights and optimizer state of a checkpoint, for this rank's parameters."""
        load_into(self.strategy, checkpoint)

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

    def _advance(self, epoch: int, index: int, batch: GlobalBatch, outcome: StepOutcome, scale_was_smallest: bool) -> None:
        state = self.state
        state.step += 1
        state.tokens += batch.token_count
        state.epoch, state.index = (epoch, index + 1) if index + 1 < self.loader.updates_per_epoch else (epoch + 1, 0)
        state.score = None
        if not outcome.skipped:
            state.applied_updates += 1
            self.skipped_in_a_row = 0
            return
        scale = self.update.scale_state()
        now = "" if scale is None else f"; the loss scale is now {scale[0]:g}"
        self.reporter.say(f"update {state.step} skipped: the gradient's norm is {outcome.grad_norm}; weights and optimizer are unchanged{now}")
        # Above the smallest scale an overflow is a part of the search for the scale: fp16 may begin with many.
        self.skipped_in_a_row += scale_was_smallest
        if self.skipped_in_a_row > self.config.train.max_skipped_updates:
            raise NotFinite(self._why_not_finite("" if scale is None else f" at the smallest loss scale, {scale[0]:g}"))

    def _why_not_finite(self, where: str) -> str:
        """The message that ends a run, with the checkpoint to go on from; collective."""
        spoilt = sorted({name for names in self.strategy.context.gather_objects(getattr(self.update, "not_finite", [])) for name in names})
        saved = complete_checkpoints(self.checkpoints)
        # Skipped updates leave the weights alone, so the newest checkpoint is good even if it was saved among them.
        last_good = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint had been saved yet"
        first = f" First of {len(spoilt)} such parameters: {', '.join(spoilt[:5])}." if spoilt else ""
        return (
            f"{self.skipped_in_a_row} updates in a row had a gradient that is not finite{where} (train.max_skipped_updates); {last_good}.{first} "
            f"Try a smaller optimizer.lr, more warm-up, or precision: {'bf16 or fp32' if where else 'fp32'}."
        )

    def _log(self, epoch: float, batch: GlobalBatch, outcome: StepOutcome, lr: float, seconds: float) -> None:
        self.step_seconds.append(seconds)
        context = self.strategy.context
        peaks, held = memory_of_ranks(context, peak_memory_bytes(context.device))
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
            peak_memory_bytes=peaks,
            held_bytes=held,
            skipped=outcome.skipped,
        )
        for leak in self.leaks.note(self.state.step, held):
            self.reporter.say(str(leak))
            self.tracker.log_event(self.state.step, "leak", asdict(leak))

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
            "data.packing": self.config.data.packing,
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
    """The first SIGTERM, SIGINT or SIGHUP (a lost terminal) is noted: finish the update, save, stop. The same signal again acts as usual.

    Under nohup SIGHUP stays ignored. Ctrl-C reaches the ranks twice, from the terminal and as the launcher's SIGTERM, so two different
    signals are one wish.
    """
    noted: list[int] = []
    previous: dict[int, Any] = {}

    def note(number: int, frame: Any) -> None:
        noted.append(number)
        signal.signal(number, previous[number])

    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    for number in numbers:
        previous[number] = signal.signal(number, note)
    try:
        yield noted
    finally:
        for noted_signal, handler in previous.items():
            signal.signal(noted_signal, handler)
