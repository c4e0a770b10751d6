"""The command line: ``python -m mpfinetune plan|train|eval|export CONFIG [key=value ...]``, and ``doctor``.

Exit codes: 0 done, 2 a mistake of the user's (config, model, data, world size, checkpoint), 1 anything else.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mpfinetune.config import RunConfig, load_config
from mpfinetune.errors import EXIT_DONE, EXIT_FAILURE, EXIT_USER_ERROR, ConfigError, OwnLaunchError, UserError
from mpfinetune.reports.console import Reporter, print_error

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Fine-tune Hugging Face transformers split over two ordinary graphics cards.",
)
ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
OverridesArgument = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="Config keys to change, like train.epochs=1.")]
CheckpointOption = Annotated[str, typer.Option(help="last, best, or a checkpoint's folder.")]

# After an error that all ranks of a host find alike, the silent ones wait for the first, whose message would else be cut off by the launcher.
_SILENT_RANK_SECONDS = 5.0


@app.command()
def plan(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    calibrate: Annotated[
        bool, typer.Option(help="Measure the present devices for a few seconds, keep the times in run_dir/calibration.json and plan with them.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Also draw each card's memory and the schedule into this PNG.")] = None,
) -> None:
    """Show what each rank would hold and how long a step would take; needs no GPU, reads no weights."""

    def run(settings: RunConfig, reporter: Reporter) -> None:
        from mpfinetune.dist import launched_by_torchrun
        from mpfinetune.training.calibrate import calibrate_run
        from mpfinetune.training.prepare import plan_run, refuse_run_dir_under_a_file
        from mpfinetune.training.run import show_plan
        from mpfinetune.training.show import picture_of

        refuse_run_dir_under_a_file(settings.run_dir)
        if calibrate:
            if launched_by_torchrun():
                calibrate_run(settings)
                return
            _calibrate_here(settings, reporter, [str(config), *(overrides or [])])
        planned = plan_run(settings, None, with_memory=True, for_hardware=True)
        show_plan(planned, reporter)
        run_dir = Path(settings.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "plan.json").write_text(planned.plan.to_json(), encoding="utf-8")
        reporter.say(f"written to {run_dir / 'plan.json'}")
        if picture is not None:
            picture_of(planned.plan, picture)
            reporter.say(f"drawn into {picture}")

    _run(config, overrides, run)


def _calibrate_here(settings: RunConfig, reporter: Reporter, arguments: list[str]) -> None:
    """Measure in as many processes as the run will have.

    Raises:
        _Launched: the processes failed, and have said why.
    """
    from mpfinetune.launcher import start_processes
    from mpfinetune.training.calibrate import calibrate_run
    from mpfinetune.training.prepare import plan_run

    if settings.hardware:
        raise ConfigError("hardware: names the cards of the plan, and --calibrate measures those that are here; leave one of them out")
    processes = plan_run(settings, None).plan.world_size
    reporter.say(f"measuring on {processes} process(es) ...")
    if processes == 1:
        calibrate_run(settings)
        return
    exit_code = start_processes(processes, ["plan", *arguments, "--calibrate"], settings.dist, reporter.say)
    if exit_code != EXIT_DONE:
        raise _Launched(exit_code)


@app.command()
def train(config: ConfigArgument, overrides: OverridesArgument = None) -> None:
    """Fine-tune; starts the planned number of processes unless torchrun has."""

    def run(settings: RunConfig, reporter: Reporter) -> None:
        from mpfinetune.training.run import train as train_rank

        prepared = _prepare_or_launch(settings, reporter, ["train", str(config), *(overrides or [])])
        train_rank(prepared, reporter)

    _run(config, overrides, run)


@app.command("eval")
def evaluate(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    checkpoint: Annotated[str, typer.Option(help="last, best, a checkpoint's folder, or base for the model as it was.")] = "last",
) -> None:
    """Score the held-out rows with a checkpoint of the run."""

    def run(settings: RunConfig, reporter: Reporter) -> None:
        from mpfinetune.training.run import evaluate as evaluate_rank

        prepared = _prepare_or_launch(settings, reporter, ["eval", str(config), *(overrides or []), "--checkpoint", checkpoint])
        evaluate_rank(prepared, checkpoint, reporter)

    _run(config, overrides, run)


@app.command()
def export(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    checkpoint: CheckpointOption = "last",
    output: Annotated[
        Path | None, typer.Option(help="New folder to write. Default: run_dir/export, with --merge run_dir/merged, which is replaced.")
    ] = None,
    merge: Annotated[bool, typer.Option(help="Of an adapter run: merge the adapter into the unquantised base, and compare the outputs.")] = False,
) -> None:
    """Write a checkpoint as a plain Hugging Face folder (of an adapter run, as peft's adapter folder), in one process."""

    def run(settings: RunConfig, reporter: Reporter) -> None:
        from mpfinetune.models.architecture import load_tokenizer
        from mpfinetune.training.export import export_checkpoint
        from mpfinetune.training.export_adapter import export_merged
        from mpfinetune.training.export_folder import check_output
        from mpfinetune.training.prepare import plan_run
        from mpfinetune.training.run import choose_checkpoint, kind_of_export

        chosen = choose_checkpoint(settings.run_dir, checkpoint)
        if output is not None:
            check_output(output)
        target = output or Path(settings.run_dir) / ("merged" if merge else "export")
        planned = plan_run(settings, None)
        if merge:
            merged = export_merged(planned, chosen, load_tokenizer(settings.model), target)
            reporter.say(merged.in_words(settings.precision))
            reporter.say(f"exported {merged.parameters:,} parameters of {chosen.name} to {target} (a plain Hugging Face folder)")
            return
        count = export_checkpoint(planned, chosen, load_tokenizer(settings.model), target)
        reporter.say(f"exported {count:,} parameters of {chosen.name} to {target} ({kind_of_export(planned)})")

    _run(config, overrides, run)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in place of lines.")] = False,
    build: Annotated[bool, typer.Option(help="Build what is compiled on this machine (CPUAdam), where it is not yet; minutes.")] = False,
    run_dir: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path("runs"),
) -> None:
    """Check this machine: driver, cards, copies, memory, disk, compilers, libraries. Exit code 1 if a check fails."""
    from mpfinetune.doctor import diagnose

    _quiet_libraries()
    rows = []
    for row in diagnose(run_dir, build):
        rows.append(row)
        if not as_json:
            print(row, flush=True)
    failed = sum(row.result.status == "fail" for row in rows)
    warned = sum(row.result.status == "warn" for row in rows)
    if as_json:
        print(json.dumps({"failed": failed, "warned": warned, "checks": [row.as_dict() for row in rows]}, indent=2))
    else:
        print(f"{len(rows)} checks, {warned} with a warning, {failed} failed")
    raise typer.Exit(EXIT_FAILURE if failed else EXIT_DONE)


def main() -> None:
    """Entry point of the ``mpfinetune`` command."""
    app()


class _Launched(Exception):
    """The processes were started and have ended."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code


def _run(config_path: Path, overrides: list[str] | None, body: Callable[[RunConfig, Reporter], None]) -> None:
    """Load the config, run the body, turn what is raised into one message and an exit code."""
    _quiet_libraries()
    rank = os.environ.get("RANK", "0")
    try:
        settings = load_config(config_path, overrides)
        body(settings, Reporter(enabled=rank == "0"))
    except _Launched as launched:
        raise typer.Exit(launched.exit_code) from None
    except UserError as error:
        _end_process(_tell_once(error))
    except Exception as error:
        from mpfinetune.training.loop import NotFinite, Stopped
        from mpfinetune.training.oom import DoesNotFit

        if isinstance(error, DoesNotFit):
            _end_process(_tell_once(error, EXIT_FAILURE))
        if isinstance(error, (NotFinite, Stopped)):  # on all ranks at once
            if rank == "0":
                said = "stopped by a signal; the state is saved and `mpfinetune train` goes on from it" if isinstance(error, Stopped) else error
                print(f"mpfinetune: {said}", file=sys.stderr)
            _end_process(EXIT_FAILURE)
        _end_process(_tell_defect_once(error, rank))
    raise typer.Exit(EXIT_DONE)


def _end_process(exit_code: int) -> None:
    """A rank that failed must not wait in a destructor for the others, so it ends without the interpreter's usual tidying."""
    from mpfinetune.dist import is_met

    if is_met():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    raise typer.Exit(exit_code)


def _tell_once(error: Exception, exit_code: int = EXIT_USER_ERROR) -> int:
    """Before the processes meet all of a host find the same, and its first says it; later the first that fails does. Returns the exit code."""
    from mpfinetune.dist import first_failure, is_met, is_silent_rank

    before = first_failure(exit_code)
    if before is None and (is_met() or not is_silent_rank() or isinstance(error, OwnLaunchError)):
        print_error(error)
        return exit_code
    time.sleep(_SILENT_RANK_SECONDS)
    return exit_code if before is None else before


def _tell_defect_once(error: Exception, rank: str) -> int:
    """Most ranks only fail since another has: those say nothing, and end as it did."""
    from mpfinetune.dist import first_failure

    before = first_failure(EXIT_FAILURE)
    if before is None:
        print(f"mpfinetune: rank {rank} failed; this is a defect of mpfinetune or of a library below it", file=sys.stderr)
        traceback.print_exception(error)
        return EXIT_FAILURE
    time.sleep(_SILENT_RANK_SECONDS)
    return before


def _prepare_or_launch(settings: RunConfig, reporter: Reporter, arguments: list[str]):  # type: ignore[no-untyped-def]
    """Check everything; then either go on as one of torchrun's ranks (or as the only process), or start the ranks and wait."""
    from mpfinetune.dist import environment_int, launched_by_torchrun
    from mpfinetune.launcher import end_with_launcher, start_processes
    from mpfinetune.planning.memory_plan import host_line
    from mpfinetune.strategies.deepspeed_ops import prepare_ops
    from mpfinetune.training.memory import refuse_disk_that_cannot_swap, refuse_what_cannot_fit
    from mpfinetune.training.prepare import plan_run, prepare_run, refuse_run_dir_under_a_file
    from mpfinetune.training.run import show_plan

    refuse_run_dir_under_a_file(settings.run_dir)
    as_rank = launched_by_torchrun()
    started_here = os.environ.get(_STARTED_HERE) == "1"
    # Ranks by torchrun must all refuse alike; of those started here one is enough, which sets it beside what was measured.
    with_memory = not started_here or os.environ.get("RANK", "0") == "0"
    planned = plan_run(settings, environment_int("WORLD_SIZE") if as_rank else None, with_memory)
    if started_here:
        end_with_launcher()
    if not started_here:
        show_plan(planned, reporter)
        refuse_what_cannot_fit(planned.plan)
        refuse_disk_that_cannot_swap(planned.plan, settings.offload.nvme_path)
    # The starting process has said what there is to say about the data.
    prepared = prepare_run(planned, reporter.say if not started_here else lambda text: None)
    # In every process: the first builds, the others wait for it and find it built.
    prepare_ops(planned.plan.offload_optimizer, planned.plan.offload_parameters, planned.plan.device_type, reporter.say)
    if as_rank or planned.plan.world_size == 1:
        return prepared
    os.environ[_STARTED_HERE] = "1"
    expected = host_line(planned.plan.memory) if planned.plan.memory is not None else ""
    raise _Launched(start_processes(planned.plan.world_size, arguments, settings.dist, reporter.say, expected))


_STARTED_HERE = "MPFINETUNE_STARTED_RANKS"


def _quiet_libraries() -> None:
    """Progress bars and notices of the libraries would tear ours apart; errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
