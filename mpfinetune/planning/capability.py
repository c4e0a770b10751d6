"""What a card can do at which precision, judged by its compute capability alone: pure, so that it can be said for cards that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpfinetune.errors import ConfigError

BF16_SINCE = (8, 0)  # Ampere
TENSOR_CORES_SINCE = (7, 0)  # Volta
FP16_SINCE = (5, 3)


@dataclass(frozen=True)
class Card:
    """A CUDA card: its name and its compute capability (major, minor)."""

    name: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


def judge_precision(precision: str, cards: Sequence[Card]) -> list[str]:
    """Sentences of advice for a precision (``fp32``, ``bf16``, ``fp16``) on these cards, which all run the same one.

    Raises:
        ConfigError: a card cannot compute in it; each such card is named, and what to take instead.
    """
    problems = [line for index, card in enumerate(cards) for line in [_refusal(precision, index, card)] if line]
    if problems:
        raise ConfigError(problems)
    return [line for index, card in enumerate(cards) for line in [_advice(precision, index, card)] if line]


def _refusal(precision: str, index: int, card: Card) -> str | None:
    if precision == "bf16" and card.capability < BF16_SINCE:
        instead = "precision: fp16" if card.capability >= FP16_SINCE else "precision: fp32"
        return f"precision: bf16 given, but card {index}, {card}, has no bf16 (it needs 8.0, Ampere, or newer); set {instead}"
    if precision == "fp16" and card.capability < FP16_SINCE:
        return f"precision: fp16 given, but card {index}, {card}, has no fp16 arithmetic (it needs 5.3 or newer); set precision: fp32"
    return None


def _advice(precision: str, index: int, card: Card) -> str | None:
    where = f"card {index}, {card}"
    if precision == "fp16" and card.capability < TENSOR_CORES_SINCE:
        return f"{where}: fp16 saves memory there, not time (no tensor cores before Volta)"
    if precision == "fp32" and TENSOR_CORES_SINCE <= card.capability < BF16_SINCE:
        return f"{where}: precision: fp16 would halve the weights' memory and use its tensor cores; it has no bf16"
    if precision == "fp32" and FP16_SINCE <= card.capability < TENSOR_CORES_SINCE:
        return f"{where}: precision: fp16 would halve the weights' memory, at no gain in time"
    if precision == "fp16" and card.capability >= BF16_SINCE:
        return f"{where}: it has bf16, which needs no loss scaling; precision: bf16 is the safer choice if every card of the run has it"
    return None
