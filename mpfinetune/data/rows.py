"""A tokenised row, and the few calls of a tokenizer that all tasks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORED = -100  # label of a token or row without a loss; torch's cross_entropy default
CHUNK_ROWS = 1000  # rows per tokenizer call: its Encoding objects take kilobytes each until they are dropped

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of length T.

    ``labels``: one id per token (causal LM, [T], -100 = ignored), a class (int), or a score (float, NaN = ignored).
    """

    input_ids: list[int]  # [T]
    labels: list[int] | int | float
    token_type_ids: list[int] | None = None  # [T]
    position_ids: list[int] | None = None  # [T]; of a packed row, beginning at 0 with each row in it


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[Any], **options: Any) -> list[dict[str, list[int]]]:
    """Tokenise texts (or pairs of texts) as lists, neither padded nor cut unless the options say so."""
    # verbose=False: "sequence longer than the maximum" would be printed before the rows are cut.
    settings = {"padding": False, "truncation": False, "return_attention_mask": False, "verbose": False, **options}
    encoded: list[dict[str, list[int]]] = []
    for start in range(0, len(texts), CHUNK_ROWS):
        chunk = tokenizer(list(texts[start : start + CHUNK_ROWS]), **settings)
        names = list(chunk.keys())
        encoded += [dict(zip(names, values, strict=True)) for values in zip(*(chunk[name] for name in names), strict=True)]
    return encoded


def encode_plain(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, without the tokenizer's special tokens around it."""
    return [values["input_ids"] for values in encode(tokenizer, texts, add_special_tokens=False, return_token_type_ids=False)]


def leading_special_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """What the tokenizer puts before a text, for example [BOS]; what it puts after one is left to the caller."""
    plain = encode_plain(tokenizer, ["a"])[0]
    framed = encode(tokenizer, ["a"], return_token_type_ids=False)[0]["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return framed[:start]
    return []


def say_cut(say: Say, name: str, cut: int, total: int, max_length: int) -> None:
    """One line on how many rows were cut, or none where no row was."""
    if cut:
        say(f"{name}: {cut} of {total} rows were cut to {max_length} tokens (data.max_length)")
