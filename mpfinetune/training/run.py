"""What one rank does for ``train`` and ``eval``: join the others, build its stages, fit or score, export."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from mpfinetune.config_files import save_config
from mpfinetune.dist import DistContext, init_distributed
from mpfinetune.errors import CheckpointError, DataError
from mpfinetune.models.quantize import in_words
from mpfinetune.planning.device_map import parameters_by_device
from mpfinetune.planning.engines import engine_lines
from mpfinetune.planning.memory_plan import MEMORY_COLUMNS, host_line, memory_rows, memory_unit
from mpfinetune.planning.plan import plan_rows
from mpfinetune.planning.predict import prediction_lines
from mpfinetune.reports.console import Reporter
from mpfinetune.reports.tracking import Tracker
from mpfinetune.strategies.build import build_strategy
from mpfinetune.training.checkpoint import best_checkpoint, complete_checkpoints, find_checkpoint
from mpfinetune.training.export import export_checkpoint
from mpfinetune.training.loop import Trainer, progress_summary
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.memory import MEASURED_COLUMNS, compare, comparison_rows, measure
from mpfinetune.training.packed_rows import refuse_rows_that_mix
from mpfinetune.training.prepare import PlannedRun, PreparedRun
from mpfinetune.training.shared_folder import check_shared

PLAN_COLUMNS = ("rank", "stages", "holds", "parameters", "weights MiB", "gradients MiB", "optimizer MiB", "sum MiB")


def show_plan(planned: PlannedRun, reporter: Reporter) -> None:
    """The decision, before it is carried out."""
    plan = planned.plan
    reporter.say(
        f"plan: {plan.strategy}, {plan.num_stages} stage(s) by rule '{plan.rule}', schedule {plan.schedule}, {plan.pipeline_ranks} rank(s) x "
        f"{plan.replicas} replica(s) on {plan.device_type}; {planned.facts.model_type}, {plan.total_parameters:,} parameters, {plan.precision}"
    )
    rows = [(row[0], row[1], row[2], *row[3:]) for row in plan_rows(plan)]
    reporter.table("what each rank holds", PLAN_COLUMNS, rows)
    if plan.memory is not None:
        unit, _ = memory_unit(plan.memory)
        reporter.table(f"predicted memory of each card at its fullest, {unit}", MEMORY_COLUMNS, memory_rows(plan.memory))
        reporter.say(host_line(plan.memory))
    for line in (*plan.notes, *engine_lines(plan)):
        reporter.say(line)
    if plan.placement is not None:
        for note in plan.placement.notes:
            reporter.say(note)
        counts = parameters_by_device(plan.placement, planned.facts)
        reporter.say("parameters by device: " + ", ".join(f"{device}: {count:,}" for device, count in counts.items()))
    if planned.config.quantize != "none":
        reporter.say(in_words(planned.facts, planned.config.quantize))
    probed = planned.config.batch.micro_size == "auto"
    reporter.say(
        f"batch: {plan.global_size} rows per update = {plan.microbatches} microbatches x {plan.micro_size} rows x {plan.replicas} replica(s)"
        + (f" (auto: the largest that fits, up to {plan.largest_micro_size}, is looked for before training)" if probed else "")
        + (f"; a rank idles {plan.bubble:.0%} of a step if the stages take equally long" if plan.pipeline_ranks > 1 else "")
    )
    for line in prediction_lines(plan.prediction) if plan.prediction is not None else ():
        reporter.say(line)


def train(run: PreparedRun, reporter: Reporter) -> None:
    """Train to the end and export; collective over the ranks that were started.

    Raises:
        UserError: checkpoint or launch problems.
        Stopped, NotFinite: see ``Trainer.fit``.
    """
    config = run.config
    run_dir = Path(config.run_dir)
    # Before the processes meet: a checkpoint that cannot be used must not leave anything half begun.
    checkpoint, passed_over = find_checkpoint(run_dir / "checkpoints", config.checkpoint.resume)
    for line in passed_over:
        reporter.say(line)
    with _processes(run) as context:
        check_shared(run_dir, checkpoint, context)
        trainer = _trainer(run, context, reporter)
        if checkpoint is not None:
            trainer.resume(checkpoint)
            reporter.say(f"resumed from {checkpoint}, after update {trainer.state.step}")
        if context.rank == 0:
            run_dir.mkdir(parents=True, exist_ok=True)
            save_config(config, run_dir / "config.yaml")
            if checkpoint is None:
                shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        trainer.tracker.truncate_after(trainer.state.step if checkpoint is not None else -1)
        context.barrier()
        trainer.settle_micro_size()
        if context.rank == 0:
            (run_dir / "plan.json").write_text(trainer.strategy.plan.to_json(), encoding="utf-8")
        reporter.say(f"training: {progress_summary(trainer.loader, trainer.total_updates)}")
        try:
            trainer.fit()
            _report_prediction(trainer, reporter)
        finally:
            trainer.tracker.close()
        saved = complete_checkpoints(trainer.checkpoints)
        if not saved:
            reporter.say("no checkpoint was saved (checkpoint.save_final: false), so nothing is exported")
        elif context.rank == 0:
            export(run, saved[-1], run_dir / "export", reporter)
        context.barrier()


def _report_prediction(trainer: Trainer, reporter: Reporter) -> None:
    """What was predicted beside what was measured; collective."""
    measured = trainer.strategy.context.gather_objects(measure(trainer.strategy))
    comparisons = compare(trainer.strategy.plan, measured, trainer.step_seconds)
    if not comparisons:
        return
    reporter.table("predicted against measured", MEASURED_COLUMNS, comparison_rows(comparisons))
    trainer.tracker.log_prediction(trainer.state.step, [entry.as_dict() for entry in comparisons])


def evaluate(run: PreparedRun, which: str, reporter: Reporter) -> dict[str, float]:
    """Score the held-out rows with the weights of a checkpoint (``last``, ``best``, a folder) or with ``base`` weights; collective.

    Raises:
        UserError: no such checkpoint, or launch problems.
    """
    if not run.data.evaluation:
        raise DataError("data.eval_path: there are no held-out rows to score; name a file, or set data.eval_fraction")
    checkpoint = None if which == "base" else choose_checkpoint(run.config.run_dir, which)
    with _processes(run) as context:
        trainer = _trainer(run, context, reporter, tracking=False)
        if checkpoint is not None:
            trainer.load_weights(checkpoint)
            reporter.say(f"weights of {checkpoint}")
        return trainer.evaluate(full_precision=run.config.eval.full_precision_every > 0)


def export(run: PreparedRun, checkpoint: Path, output: Path, reporter: Reporter) -> None:
    """Write a Hugging Face folder from a checkpoint; one process."""
    count = export_checkpoint(run.planned, checkpoint, run.tokenizer, output)
    reporter.say(f"exported {count:,} parameters of {checkpoint.name} to {output} ({kind_of_export(run.planned)})")


def kind_of_export(planned: PlannedRun) -> str:
    """What ``export`` writes, in words."""
    return "a peft adapter folder" if planned.facts.adapted else "a plain Hugging Face folder"


def choose_checkpoint(run_dir: str, which: str) -> Path:
    """``last`` complete one, ``best`` by score, or a folder.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(run_dir) / "checkpoints"
    if which == "best":
        chosen = best_checkpoint(folder)
    else:
        chosen, _ = find_checkpoint(folder, "auto" if which == "last" else which)
    if chosen is None:
        raise CheckpointError(f"run_dir: no checkpoint in {folder}; train first, or name a checkpoint's folder with --checkpoint")
    return chosen


def _trainer(run: PreparedRun, context: DistContext, reporter: Reporter, tracking: bool = True) -> Trainer:
    planned = run.planned
    loss_sum = loss_sum_for(run.config.model.task, planned.num_labels)
    strategy, drawn = build_strategy(run.config, planned.hf_config, planned.facts, planned.plan, context, loss_sum, run.folder)
    all_drawn = sorted({name for names in context.gather_objects(drawn) for name in names})
    if all_drawn and run.folder is not None:
        reporter.say(f"not in the model's files, drawn from train.seed: {', '.join(all_drawn)}")
    trainer = Trainer(run, strategy, reporter, Tracker(Path(run.config.run_dir), enabled=tracking and context.rank == 0))
    if run.config.data.packing:  # after the trainer has made the engine, without which ZeRO-3's parts cannot be run
        refuse_rows_that_mix(strategy, planned.hf_config.get_text_config().vocab_size)
    return trainer


@contextmanager
def _processes(run: PreparedRun) -> Iterator[DistContext]:
    context = init_distributed(run.config, run.planned.plan.pipeline_ranks)
    yield context
    # Not after an error: taking the group down can wait for ranks that are stuck; the command line ends the process instead.
    if dist.is_initialized():
        dist.destroy_process_group()
