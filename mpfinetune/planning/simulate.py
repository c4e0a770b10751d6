"""An event simulation of a pipeline step: which rank does what when, from each rank's order of actions and the seconds of each action.

The model is that of torch's action runtime: a rank does its actions in order, each as soon as what it needs is there; hidden states and
gradients travel while the ranks compute, one after another on each directed link between two ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpfinetune.planning.schedule import Action


@dataclass(frozen=True)
class StageSeconds:
    """One microbatch through one stage. ``input_backward`` and ``weight_backward`` are the halves of a split backward pass (I and W)."""

    forward: float
    backward: float
    input_backward: float = 0.0
    weight_backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def of(self, kind: str) -> float:
        return {"F": self.forward, "B": self.backward, "I": self.input_backward, "W": self.weight_backward}[kind]


@dataclass(frozen=True)
class Event:
    """One executed action, seconds from the start of the step. ``kind``: F forward, B backward, I and W its halves by input and weights."""

    rank: int
    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step without its update."""

    events: tuple[Event, ...]
    seconds: float
    busy_seconds: tuple[float, ...]  # by rank

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """By rank, the share of the step in which it computes nothing."""
        return tuple(1 - busy / self.seconds if self.seconds else 0.0 for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks together."""
        return sum(self.idle_shares) / len(self.busy_seconds)


def simulate(orders: Mapping[int, Sequence[Action]], stages: Sequence[StageSeconds], transfer_seconds: Sequence[float]) -> Timeline:
    """Run the orders of all ranks.

    Args:
        orders: for each rank its actions (stage, kind, microbatch) in the order in which it does them.
        stages: seconds of one microbatch, by stage.
        transfer_seconds: for the boundary after each stage but the last, what hidden states or their gradient take to cross; unused where
            both stages are on one rank.

    Raises:
        ValueError: the orders wait for each other for ever.
    """
    rank_of = {stage: rank for rank, order in orders.items() for stage, _, _ in order}
    free_at = dict.fromkeys(orders, 0.0)
    link_free_at: dict[tuple[int, int], float] = {}
    ready_at: dict[Action, float] = {}  # when the input of an action that needs one has arrived
    done: dict[int, int] = dict.fromkeys(orders, 0)
    events: list[Event] = []
    last = len(stages) - 1

    def needs_input(stage: int, kind: str) -> bool:
        return (kind == "F" and stage > 0) or (kind in ("B", "I") and stage < last)

    def send(stage: int, microbatch: int, target: int, kind: str, end: float) -> None:
        source, destination = rank_of[stage], rank_of[target]
        arrival = end
        if source != destination:
            arrival = max(end, link_free_at.get((source, destination), 0.0)) + transfer_seconds[min(stage, target)]
            link_free_at[source, destination] = arrival
        # Whether the receiver's backward pass is whole or split is its own order's affair.
        for received in ("F",) if kind == "F" else ("B", "I"):
            ready_at[target, received, microbatch] = arrival

    progress = True
    while progress:
        progress = False
        for rank, order in orders.items():
            while done[rank] < len(order):
                stage, kind, microbatch = order[done[rank]]
                if needs_input(stage, kind) and (stage, kind, microbatch) not in ready_at:
                    break
                start = max(free_at[rank], ready_at.get((stage, kind, microbatch), 0.0))
                end = start + stages[stage].of(kind)
                events.append(Event(rank, stage, kind, microbatch, start, end))
                free_at[rank], done[rank], progress = end, done[rank] + 1, True
                if kind == "F" and stage < last:
                    send(stage, microbatch, stage + 1, kind, end)
                elif kind in ("B", "I") and stage > 0:
                    send(stage, microbatch, stage - 1, kind, end)
    stuck = [rank for rank, order in orders.items() if done[rank] < len(order)]
    if stuck:
        raise ValueError(f"the ranks {stuck} wait for inputs that never come: the orders do not fit each other")
    busy = tuple(sum(event.end - event.start for event in events if event.rank == rank) for rank in orders)
    return Timeline(tuple(events), max((event.end for event in events), default=0.0), busy)


def timeline_rows(events: Sequence[Event], width: int = 96) -> list[str]:
    """The step as text, one line a rank: a microbatch's number (its last digit) while its forward pass runs, a letter (a is microbatch 0)
    while its backward pass does, a dot where the rank idles."""
    lines = [["."] * width for _ in range(1 + max(event.rank for event in events))]
    scale = width / max(event.end for event in events)
    for event in events:
        mark = str(event.microbatch % 10) if event.kind == "F" else chr(ord("a") + event.microbatch % 26)
        first = min(width - 1, int(event.start * scale))
        for column in range(first, max(first + 1, min(width, round(event.end * scale)))):
            lines[event.rank][column] = mark
    return ["".join(line) for line in lines]
