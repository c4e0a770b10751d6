"""What a person sees while a run goes: sentences, tables, one progress line, errors without a traceback.

Every rank makes a ``Reporter`` and calls the same methods; only the one made with ``enabled=True`` prints. In a terminal the progress is
a bar; elsewhere (a log file, a pipe) it is a plain line now and then.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from mpfinetune.errors import UserError

PLAIN_INTERVAL_SECONDS = 10.0
# Outside a terminal rich assumes 80 columns, which breaks the rows of a partition table.
PLAIN_WIDTH_CHARACTERS = 150


class ProgressReport(Protocol):
    """What ``Reporter.progress`` hands out."""

    def advance(self, *, loss: float, lr: float, tokens_per_second: float) -> None:
        """One update is done. ``loss``: mean over its tokens or rows; may be NaN for a skipped update."""


class Reporter:
    """Prints on the rank that reports and stays silent on the others.

    Args:
        enabled: True on the one rank that prints.
        file: Where to print. Default: stdout.
        plain_interval_seconds: Least time between two progress lines outside a terminal.
        clock: Seconds; replaced in tests.
    """

    def __init__(
        self,
        enabled: bool,
        file: IO[str] | None = None,
        plain_interval_seconds: float = PLAIN_INTERVAL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled = enabled
        self._plain_interval_seconds = plain_interval_seconds
        self._clock = clock
        self._console = Console(file=file, highlight=False)
        if not self._console.is_terminal:
            self._console.width = PLAIN_WIDTH_CHARACTERS

    def say(self, text: str) -> None:
        """One message, as it is: brackets and long paths are not touched. Above the bar while one is shown."""
        if self.enabled:
            self._console.print(Text(text), soft_wrap=True)  # as Text: no markup, no emoji codes

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table; columns whose cells are all numbers are set flush right."""
        if not self.enabled:
            return
        table = Table(title=Text(title), title_justify="left")
        for index, name in enumerate(columns):
            numeric = bool(rows) and all(isinstance(row[index], (int, float)) for row in rows)
            table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            assert len(row) == len(columns), f"{title}: a row of {len(row)} cells under {len(columns)} heads"
            table.add_row(*(Text(str(cell)) for cell in row))
        self._console.print(table)

    @contextmanager
    def progress(self, total_updates: int, start: int = 0) -> Iterator[ProgressReport]:
        """Progress over updates ``start`` (done already, when a run goes on) to ``total_updates``; call ``advance`` after each."""
        if not self.enabled:
            yield _NoProgress()
        elif self._console.is_terminal:
            with Progress(*_bar_columns(), console=self._console) as bar:
                task = bar.add_task("updates", total=total_updates, completed=start, loss="-", lr="-", speed="-")
                yield _BarProgress(bar, task)
        else:
            yield _PlainProgress(self, total_updates, start, self._plain_interval_seconds, self._clock)


def print_error(error: Exception, file: IO[str] | None = None) -> None:
    """``mpfinetune: config error:`` (for a ``UserError``; else ``error:``) and the lines of the message on stderr; no traceback."""
    heading = error.heading if isinstance(error, UserError) else "error"
    heading = "error" if heading == "error" else f"{heading} error"
    lines = str(error).splitlines() or [type(error).__name__]
    print(f"mpfinetune: {heading}:", *(f"  {line}" for line in lines), sep="\n", file=file or sys.stderr, flush=True)


def duration_in_words(seconds: float) -> str:
    """3725.4 -> '1:02:05'."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class _NoProgress:
    def advance(self, *, loss: float, lr: float, tokens_per_second: float) -> None:
        pass


class _BarProgress:
    def __init__(self, bar: Progress, task: TaskID) -> None:
        self._bar, self._task = bar, task

    def advance(self, *, loss: float, lr: float, tokens_per_second: float) -> None:
        self._bar.update(self._task, advance=1, loss=f"{loss:.4f}", lr=f"{lr:.2e}", speed=f"{tokens_per_second:,.0f}")


class _PlainProgress:
    """A line for the first update, for the last, and for one every few seconds between."""

    def __init__(self, reporter: Reporter, total_updates: int, start: int, interval_seconds: float, clock: Callable[[], float]) -> None:
        self._reporter, self._total_updates, self._start = reporter, total_updates, start
        self._interval_seconds, self._clock = interval_seconds, clock
        self._done = start
        self._began_seconds = clock()
        self._printed_seconds = float("-inf")

    def advance(self, *, loss: float, lr: float, tokens_per_second: float) -> None:
        self._done += 1
        now_seconds = self._clock()
        if self._done < self._total_updates and now_seconds - self._printed_seconds < self._interval_seconds:
            return
        self._printed_seconds = now_seconds
        seconds_an_update = (now_seconds - self._began_seconds) / (self._done - self._start)
        remaining = duration_in_words(seconds_an_update * max(0, self._total_updates - self._done))
        self._reporter.say(
            f"update {self._done}/{self._total_updates}  loss {loss:.4f}  lr {lr:.2e}  {tokens_per_second:,.0f} tokens/s  remaining {remaining}"
        )


def _bar_columns() -> list[TextColumn | BarColumn | MofNCompleteColumn | TimeElapsedColumn | TimeRemainingColumn]:
    return [
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("lr {task.fields[lr]}"),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("remaining"),
        TimeRemainingColumn(),
    ]
