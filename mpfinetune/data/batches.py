"""Rows into padded batches, and the order in which an epoch draws them. One collate and one loader for training and evaluation."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mpfinetune.config import DataConfig
from mpfinetune.data.rows import IGNORED, Row

WINDOW_UPDATES = 50  # bucketed: rows are sorted by length within this many updates, so that the order stays nearly random

Padding = Literal["batch", "bucketed", "fixed"]


@dataclass(frozen=True)
class LengthRule:
    """How long a padded batch is, in tokens."""

    padding: Padding
    max_length: int
    pad_to_multiple_of: int = 1

    @classmethod
    def from_config(cls, data: DataConfig) -> LengthRule:
        return cls(data.padding, data.max_length, data.pad_to_multiple_of)

    def padded_length(self, longest: int) -> int:
        """T for a batch whose longest row has ``longest`` tokens; never above max_length, even where that is no such multiple.

        Raises:
            ValueError: a row is longer than max_length: it was not cut when it was tokenised.
        """
        if longest > self.max_length:
            raise ValueError(f"a row has {longest} tokens, more than max_length {self.max_length}")
        if self.padding == "fixed":
            return self.max_length
        return min(self.max_length, math.ceil(longest / self.pad_to_multiple_of) * self.pad_to_multiple_of)


@dataclass(frozen=True)
class GlobalBatch:
    """All rows of one optimizer update, on the CPU. The counts are those of the whole update, also in a slice of it.

    ``tensors``: input_ids, attention_mask (of packed rows position_ids instead) and, where rows have them, token_type_ids, all [R, T]
    int64; labels [R, T] int64 (causal LM), [R] int64 (classes) or [R] float32 (scores).
    """

    tensors: dict[str, Tensor]
    real_rows: int  # without ghost rows
    target_count: int  # what the summed loss is divided by: shifted labels, or labelled rows
    token_count: int  # tokens of the real rows, without padding

    @property
    def row_count(self) -> int:
        """R, ghost rows included."""
        return self.tensors["input_ids"].shape[0]


def collate(rows: Sequence[Row], pad_token_id: int, length_rule: LengthRule) -> dict[str, Tensor]:
    """Pad on the right; returns the tensors of GlobalBatch.

    The mask comes from the lengths, never from the ids: the pad token may be a real one (EOS). The padding of a packed row is one more row
    in it, by its positions: packed rows have no mask.
    """
    length = length_rule.padded_length(max(len(row.input_ids) for row in rows))
    tensors = {"input_ids": _padded([row.input_ids for row in rows], length, pad_token_id)}
    if rows[0].position_ids is None:
        tensors["attention_mask"] = _padded([[1] * len(row.input_ids) for row in rows], length, 0)
    else:
        tensors["position_ids"] = torch.tensor([[*(row.position_ids or []), *range(length - len(row.input_ids))] for row in rows], dtype=torch.int64)
    if rows[0].token_type_ids is not None:
        tensors["token_type_ids"] = _padded([row.token_type_ids or [] for row in rows], length, 0)
    first = rows[0].labels
    if isinstance(first, list):
        tensors["labels"] = _padded([row.labels for row in rows if isinstance(row.labels, list)], length, IGNORED)
    else:
        tensors["labels"] = torch.tensor([row.labels for row in rows], dtype=torch.float32 if isinstance(first, float) else torch.int64)
    return tensors


def _padded(values: Sequence[list[int]], length: int, fill: int) -> Tensor:
    """[R, T] int64."""
    return torch.tensor([row + [fill] * (length - len(row)) for row in values], dtype=torch.int64)


def count_targets(labels: Tensor) -> int:
    """How many terms the summed loss has: labels [R, T] int64 after the shift by one, or labelled rows of [R] int64 or float32."""
    if labels.is_floating_point():
        return int((~labels.isnan()).sum())
    return int((labels[:, 1:] if labels.dim() == 2 else labels).ne(IGNORED).sum())


def make_batch(rows: Sequence[Row], pad_token_id: int, length_rule: LengthRule) -> GlobalBatch:
    """The rows of one update, padded and counted."""
    tensors = collate(rows, pad_token_id, length_rule)
    return GlobalBatch(tensors, len(rows), count_targets(tensors["labels"]), sum(len(row.input_ids) for row in rows))


def pad_rows(batch: GlobalBatch, row_multiple: int) -> GlobalBatch:
    """Append ghost rows until R is a multiple of ``row_multiple``: copies of row 0 whose labels are all ignored.

    A copy, not padding only: a row without any token to attend to gives NaN in some attention kernels. All counts stay.
    """
    ghosts = -batch.row_count % row_multiple
    if ghosts == 0:
        return batch
    tensors = {}
    for name, tensor in batch.tensors.items():
        extra = tensor[:1].expand(ghosts, *tensor.shape[1:])  # [ghosts, ...]
        if name == "labels":
            extra = torch.full_like(extra, math.nan if tensor.is_floating_point() else IGNORED)
        tensors[name] = torch.cat([tensor, extra])
    return replace(batch, tensors=tensors)


def slice_rows(batch: GlobalBatch, start: int, stop: int) -> GlobalBatch:
    """Rows [start, stop) for a replica. target_count and the other counts stay the whole update's, so that the losses add up."""
    return replace(batch, tensors={name: tensor[start:stop] for name, tensor in batch.tensors.items()})


class UpdateLoader:
    """Draws the rows of each update. The order is a pure function of (seed, epoch): resuming needs only the position (epoch, index).

    The last update of an epoch may be short: it is trained, not dropped. Every row is drawn exactly once per epoch.

    Args:
        global_size: rows per update.
        shuffle: False for evaluation: file order, or by length where the padding is ``bucketed``.
    """

    def __init__(self, rows: Sequence[Row], *, global_size: int, seed: int, length_rule: LengthRule, pad_token_id: int, shuffle: bool) -> None:
        assert rows and global_size >= 1
        self.rows = rows
        self.global_size = global_size
        self.seed = seed
        self.length_rule = length_rule
        self.pad_token_id = pad_token_id
        self.shuffle = shuffle

    @property
    def updates_per_epoch(self) -> int:
        return math.ceil(len(self.rows) / self.global_size)

    def longest_batch(self) -> GlobalBatch:
        """As many rows as an update has, the longest there are: no update needs more memory."""
        longest = sorted(self.rows, key=lambda row: len(row.input_ids), reverse=True)[: self.global_size]
        return make_batch(longest, self.pad_token_id, self.length_rule)

    def row_order(self, epoch: int) -> list[list[int]]:
        """Indices into ``rows``, one list per update."""
        order = list(range(len(self.rows)))
        bucketed = self.length_rule.padding == "bucketed"
        if not self.shuffle:
            return self._in_updates(sorted(order, key=self._length) if bucketed else order)
        # Text seeds are hashed by random itself: neighbouring (seed, epoch) pairs never meet, and no process's hash seed plays a part.
        generator = random.Random(f"{self.seed}/{epoch}")
        generator.shuffle(order)
        if not bucketed:
            return self._in_updates(order)
        window = WINDOW_UPDATES * self.global_size
        order = [index for start in range(0, len(order), window) for index in sorted(order[start : start + window], key=self._length)]
        updates = self._in_updates(order)
        generator.shuffle(updates)
        return updates

    def batches(self, epoch: int, start: int = 0) -> Iterator[GlobalBatch]:
        """The updates of an epoch from index ``start`` on: exactly those that an uninterrupted epoch would have given."""
        for indices in self.row_order(epoch)[start:]:
            yield make_batch([self.rows[index] for index in indices], self.pad_token_id, self.length_rule)

    def _length(self, index: int) -> int:
        return len(self.rows[index].input_ids)

    def _in_updates(self, order: list[int]) -> list[list[int]]:
        return [order[start : start + self.global_size] for start in range(0, len(order), self.global_size)]
