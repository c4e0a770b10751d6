"""A plan as a picture: what each card holds beside what it has, and the time line of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GIB = 2**30
# One colour for each kind of action; I and W are the halves of a split backward pass.
_COLOURS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#e7ba52"}
_KINDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}


@dataclass(frozen=True)
class CardBar:
    """One card: named pieces of its fullest moment in bytes, and its memory, if known."""

    name: str
    pieces: Sequence[tuple[str, int]]
    card_bytes: int | None


@dataclass(frozen=True)
class Bar:
    """One action of a rank, in seconds from the start of the step."""

    rank: int
    kind: str
    microbatch: int
    start: float
    end: float


def draw_plan(path: Path, title: str, cards: Sequence[CardBar], bars: Sequence[Bar]) -> None:
    """Write a PNG; without ``bars`` it shows the memory alone."""
    from matplotlib.figure import Figure  # not pyplot: no window system is asked for

    figure = Figure(figsize=(12, 3.2 + 0.5 * len(cards) + (2.0 if bars else 0.0)), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(2 if bars else 1, 1, squeeze=False)[:, 0]
    _draw_memory(axes[0], cards)
    if bars:
        _draw_schedule(axes[1], bars)
    figure.savefig(path, dpi=120, format="png")


def _draw_memory(axes, cards: Sequence[CardBar]) -> None:  # type: ignore[no-untyped-def]
    names = list(dict.fromkeys(name for card in cards for name, _ in card.pieces))
    rows = range(len(cards))
    left = [0.0] * len(cards)
    for name in names:
        widths = [dict(card.pieces).get(name, 0) / _GIB for card in cards]
        axes.barh(rows, widths, left=left, height=0.6, label=name)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for row, card in enumerate(cards):
        if card.card_bytes is not None:
            axes.plot(
                [card.card_bytes / _GIB] * 2, [row - 0.42, row + 0.42], color="black", linewidth=2, label="memory of the card" if row == 0 else None
            )
    axes.set_yticks(rows, [card.name for card in cards])
    axes.invert_yaxis()
    axes.set_xlabel("GiB, at the fullest moment")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")


def _draw_schedule(axes, bars: Sequence[Bar]) -> None:  # type: ignore[no-untyped-def]
    named: set[str] = set()
    for bar in bars:
        label = None if bar.kind in named else _KINDS[bar.kind]
        named.add(bar.kind)
        axes.barh(bar.rank, bar.end - bar.start, left=bar.start, height=0.8, color=_COLOURS[bar.kind], edgecolor="white", linewidth=0.5, label=label)
        axes.text((bar.start + bar.end) / 2, bar.rank, str(bar.microbatch), ha="center", va="center", fontsize=7, color="white", clip_on=True)
    ranks = sorted({bar.rank for bar in bars})
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.invert_yaxis()
    axes.set_xlabel("seconds of forward and backward passes; the numbers are microbatches")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small")
