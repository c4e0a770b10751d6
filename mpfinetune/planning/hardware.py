"""The cards that a plan is made for: those of the config's ``hardware``, by the data table, or those that are here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from mpfinetune.config import RunConfig
from mpfinetune.errors import ConfigError
from mpfinetune.planning.cards import CARDS, CardSpec

GIB = 2**30
_MAKER = re.compile(r"^(nvidia|geforce|tesla|quadro)+")
_BOARD = re.compile(r"(sxm\d|pcie|nvl)?(\d+gb)?(hbm\d?e?)?")  # what a driver adds to the name of a data centre's card
# What an entry must give for a card that the table does not have; the others have a value that follows from these.
_NEEDED = ("memory_gib", "bandwidth_gb_s", "fp32_tflops", "fp16_tflops")


@dataclass(frozen=True)
class PlanCard:
    """One card of a plan. ``spec`` is None where nothing but its memory is known (a present card that the table does not have)."""

    name: str
    memory_bytes: int
    spec: CardSpec | None
    capability: tuple[int, int] | None = None  # None: not known

    def flops_per_second(self, precision: str) -> float | None:
        """Peak rate of matrix products in ``fp32``, ``bf16`` or ``fp16``; a card without bf16 is refused elsewhere (``capability``)."""
        if self.spec is None:
            return None
        tflops = {"fp32": self.spec.fp32_tflops, "fp16": self.spec.fp16_tflops, "bf16": self.spec.bf16_tflops}[precision]
        return tflops * 1e12 or None


def card_key(name: str) -> str:
    """``NVIDIA GeForce RTX 3090`` and ``rtx-3090`` are ``rtx3090``, the table's key."""
    return _MAKER.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


def cards_of(config: RunConfig) -> tuple[PlanCard, ...]:
    """The cards of ``hardware``, in the order of the pipeline's ranks; empty where the config names none.

    Raises:
        ConfigError: a card that the table does not have, with the nearest names and the figures that would describe it.
    """
    problems: list[str] = []
    cards = [_card(entry, f"hardware[{index}]", problems) for index, entry in enumerate(config.hardware)]
    if problems:
        raise ConfigError(problems)
    return tuple(card for card in cards if card is not None)


def present_card(name: str, capability: tuple[int, int], memory_bytes: int) -> PlanCard:
    """A card that is here, with the table's rates where the table has it; its memory is what the driver says."""
    key = card_key(name)
    known = [prefix for prefix in CARDS if key.startswith(prefix) and _BOARD.fullmatch(key.removeprefix(prefix))]
    spec = CARDS[max(known, key=len)] if known else None
    return PlanCard(name, memory_bytes, spec, capability)


def cards_of_ranks(cards: Sequence[PlanCard], replicas: int) -> list[tuple[PlanCard, ...]]:
    """The cards of each pipeline rank: its replicas are beside each other, and each of them holds and computes the same."""
    return [tuple(cards[first : first + replicas]) for first in range(0, len(cards), replicas)]


def smallest_card(cards: Sequence[PlanCard]) -> PlanCard:
    """The one that decides whether what all of them hold fits."""
    return min(cards, key=lambda card: card.memory_bytes)


def _card(entry: dict[str, Any], path: str, problems: list[str]) -> PlanCard | None:
    given: dict[str, Any] = {name: value for name, value in entry.items() if name != "gpu"}
    if "capability" in given:
        major, minor = str(given["capability"]).split(".")
        given["capability"] = (int(major), int(minor))
    spec = CARDS.get(card_key(str(entry["gpu"])))
    if spec is not None:
        spec = replace(spec, **given)
    elif all(name in given for name in _NEEDED):
        spec = CardSpec(**{"bf16_tflops": 0.0, "pcie_gb_s": CARDS["rtx3090"].pcie_gb_s, "capability": (8, 0), **given})
    else:
        problems.append(_unknown(entry, path))
        return None
    return PlanCard(str(entry["gpu"]), round(spec.memory_gib * GIB), spec, spec.capability)


def _unknown(entry: dict[str, Any], path: str) -> str:
    key = card_key(str(entry["gpu"]))
    near = get_close_matches(key, CARDS, n=3, cutoff=0.5) or sorted(CARDS)
    missing = [name for name in _NEEDED if name not in entry]
    return (
        f"{path}.gpu: '{entry['gpu']}' given, which the table of cards does not have; nearest: {', '.join(near)}. "
        f"Any other card is described by its own figures; add {', '.join(missing)} to the entry"
    )
