"""The picture of a planned run."""

from __future__ import annotations

from pathlib import Path

from mpfinetune.errors import ConfigError
from mpfinetune.planning.plan import Plan
from mpfinetune.reports.picture import Bar, CardBar, draw_plan


def picture_of(plan: Plan, path: Path) -> None:
    """Draw each card's predicted memory and, where it is known, the predicted schedule into a PNG.

    Raises:
        ConfigError: the file cannot be written there.
    """
    assert plan.memory is not None, "a plan made with its memory"
    cards = []
    for card in plan.memory.cards:
        peak = card.peak
        pieces = [
            ("weights", peak.weight_bytes),
            ("gradients", peak.gradient_bytes),
            ("optimizer", peak.optimizer_bytes),
            ("activations", peak.activation_bytes),
            ("workspace", peak.workspace_bytes),
            ("buffers", peak.buffer_bytes),
            ("context, fragmentation", card.context_bytes + card.fragmentation_bytes),
        ]
        cards.append(CardBar(f"rank {card.rank}" + (f", device {card.device}" if card.device else ""), pieces, card.card_bytes))
    events = plan.prediction.events if plan.prediction is not None else ()
    bars = [Bar(event.rank, event.kind, event.microbatch, event.start, event.end) for event in events]
    title = f"{plan.strategy}, {plan.num_stages} stage(s), {plan.schedule}, {plan.total_parameters / 1e9:.2f}B parameters, {plan.precision}"
    try:
        draw_plan(path, title, cards, bars)
    except OSError as error:
        raise ConfigError(f"--picture: '{path}' cannot be written: {error.strerror or error}; give a file in a folder that exists") from error
