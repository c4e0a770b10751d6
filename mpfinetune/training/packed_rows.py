"""Whether a model keeps packed rows apart, tried on the model itself: nothing in its configuration says so."""

from __future__ import annotations

import torch
from torch import Tensor

from mpfinetune.data.batches import GlobalBatch
from mpfinetune.errors import ModelError
from mpfinetune.strategies.base import Strategy

_TOKENS = 8  # of each of the two rows in one
_LARGEST_SHARE = 0.05  # of what an earlier text does to a later one; rounding in 8 or 16 bits, not attention, may leave this much


def refuse_rows_that_mix(strategy: Strategy, vocab_size: int) -> None:
    """Run two packed rows that differ in the first of the rows in them only: the logits of the second must not change; collective.

    They are measured against the same tokens as one text, where they do change. Before the first update, and one forward pass long.

    Raises:
        ModelError: on every rank.
    """
    found: list[Tensor] = []
    strategy.evaluate(_probe(strategy, vocab_size), lambda logits, labels: found.append(logits[:, _TOKENS:].float()))
    share = 0.0
    if found:
        packed, packed_otherwise, as_text, as_text_otherwise = torch.cat(found)[:4]  # each [8, V]
        share = float((packed - packed_otherwise).norm() / (as_text - as_text_otherwise).norm().clamp_min(torch.finfo(torch.float32).tiny))
    shares = strategy.context.gather_objects(share)
    if max(shares) > _LARGEST_SHARE:
        raise ModelError(
            f"data.packing: true given, but {strategy.facts.model_type} lets packed rows see each other ({max(shares):.0%} of what they would as one "
            "text): transformers' code of this model does not tell rows apart by their positions; set data.packing: false "
            "(data.padding: bucketed saves most of the padding)"
        )


def _probe(strategy: Strategy, vocab_size: int) -> GlobalBatch:
    """The four rows [16] again and again, as many as each replica wants: two packed, and the same two as one text each."""
    rows = strategy.plan.padded_rows(4 * strategy.context.replicas)
    kind = torch.arange(rows) % (rows // strategy.context.replicas) % 4
    tokens = torch.arange(2 * _TOKENS)
    # Different tokens in rows 0 and 2 than in rows 1 and 3, in the first half only.
    first_half = torch.where(kind[:, None] % 2 == 0, tokens[:_TOKENS] + 1, 2 * _TOKENS + 1 + tokens[:_TOKENS])
    input_ids = torch.cat([first_half, (tokens[_TOKENS:] + 1).expand(rows, -1)], dim=1) % vocab_size
    position_ids = torch.where(kind[:, None] < 2, tokens % _TOKENS, tokens)
    tensors = {"input_ids": input_ids, "position_ids": position_ids, "labels": input_ids}
    return GlobalBatch(tensors, rows, rows * (2 * _TOKENS - 1), input_ids.numel())
