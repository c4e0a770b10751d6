"""Batches: shapes, masks, counts; the loader's order."""

from __future__ import annotations

import math
import random

import pytest
import torch

from mpfinetune.config import DataConfig
from mpfinetune.data.batches import LengthRule, Padding, UpdateLoader, collate, count_targets, make_batch, pad_rows, slice_rows
from mpfinetune.data.packing import pack_rows
from mpfinetune.data.rows import Row

EOS = 2


def causal_row(length: int, first_target: int = 0) -> Row:
    ids = [10 + position for position in range(length - 1)] + [EOS]
    return Row(ids, [-100] * first_target + ids[first_target:])


def rows_of_lengths(lengths: list[int]) -> list[Row]:
    """Row i starts with the id 1000 + i, so that it can be told in a batch."""
    return [Row([1000 + index] + [7] * (length - 1), 0) for index, length in enumerate(lengths)]


def loader(rows: list[Row], padding: Padding = "batch", size: int = 4, seed: int = 1, shuffle: bool = True) -> UpdateLoader:
    return UpdateLoader(rows, global_size=size, seed=seed, length_rule=LengthRule(padding, 64, 8), pad_token_id=0, shuffle=shuffle)


# --- collate ----------------------------------------------------------------------------------------------------------------------


def test_causal_rows_padded_with_eos_keep_their_real_eos_as_a_target() -> None:
    tensors = collate([causal_row(3), causal_row(5)], EOS, LengthRule("batch", 16, 8))
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == {
        "input_ids": ((2, 8), torch.int64),
        "attention_mask": ((2, 8), torch.int64),
        "labels": ((2, 8), torch.int64),
    }
    assert tensors["input_ids"][0].tolist() == [10, 11, EOS, EOS, EOS, EOS, EOS, EOS]
    assert tensors["attention_mask"].sum(dim=1).tolist() == [3, 5]
    assert tensors["labels"][0].tolist() == [10, 11, EOS] + [-100] * 5


def test_packed_rows_have_positions_and_no_mask_and_their_padding_is_a_row_of_its_own() -> None:
    first, second = causal_row(3), causal_row(4, first_target=2)
    packed = pack_rows([first, second], 10, "file", print)
    batch = make_batch(packed, 0, LengthRule("fixed", 10))
    assert sorted(batch.tensors) == ["input_ids", "labels", "position_ids"]
    assert batch.tensors["input_ids"].tolist() == [[10, 11, 12, EOS, 10, 11, EOS, 0, 0, 0]]
    assert batch.tensors["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]
    assert batch.tensors["labels"].tolist() == [[-100, -100, 12, EOS, -100, 11, EOS, -100, -100, -100]]
    assert (batch.real_rows, batch.target_count, batch.token_count) == (1, 4, 7)


def test_class_and_score_labels_and_token_types() -> None:
    classes = collate([Row([1, 2], 1, [0, 1]), Row([1], 0, [0])], 0, LengthRule("batch", 16))
    assert classes["labels"].tolist() == [1, 0]
    assert classes["labels"].dtype == torch.int64
    assert classes["token_type_ids"].tolist() == [[0, 1], [0, 0]]
    scores = collate([Row([1, 2], 3.8), Row([1], math.nan)], 0, LengthRule("batch", 16))
    assert scores["labels"].dtype == torch.float32
    assert "token_type_ids" not in scores
    assert count_targets(scores["labels"]) == 1


@pytest.mark.parametrize(
    ("padding", "max_length", "multiple", "longest", "expected"),
    [
        ("batch", 128, 8, 9, 16),
        ("batch", 128, 8, 16, 16),
        ("batch", 20, 8, 18, 20),  # 24 would be above max_length
        ("batch", 100, 1, 33, 33),
        ("batch", 5, 8, 2, 5),
        ("fixed", 100, 8, 3, 100),
        ("bucketed", 128, 8, 9, 16),
    ],
)
def test_padded_length(padding: Padding, max_length: int, multiple: int, longest: int, expected: int) -> None:
    assert LengthRule(padding, max_length, multiple).padded_length(longest) == expected


def test_length_rule_from_config_and_uncut_rows() -> None:
    rule = LengthRule.from_config(DataConfig(max_length=32, padding="fixed", pad_to_multiple_of=4))
    assert rule == LengthRule("fixed", 32, 4)
    with pytest.raises(ValueError, match="33 tokens, more than max_length 32"):
        rule.padded_length(33)


# --- counts, ghost rows, slices ---------------------------------------------------------------------------------------------------


def test_counts_of_a_causal_batch_leave_out_position_zero_and_padding() -> None:
    rows = [causal_row(5), causal_row(6, first_target=4), causal_row(3, first_target=1)]
    batch = make_batch(rows, EOS, LengthRule("batch", 16, 8))
    assert batch.target_count == 4 + 2 + 2
    assert batch.token_count == 5 + 6 + 3
    assert (batch.real_rows, batch.row_count) == (3, 3)


@pytest.mark.parametrize("kind", ["causal", "classes", "scores"])
def test_ghost_rows_add_no_target(kind: str) -> None:
    rows = {
        "causal": [causal_row(5), causal_row(6), causal_row(3)],
        "classes": [Row([5, 6], 1, [0, 1]), Row([5], 0, [0]), Row([5], 1, [0])],
        "scores": [Row([5, 6], 1.5), Row([5], 0.0), Row([5], 2.5)],
    }[kind]
    batch = make_batch(rows, 0, LengthRule("batch", 16, 8))
    padded = pad_rows(batch, 4)
    assert (padded.row_count, padded.real_rows, padded.target_count, padded.token_count) == (4, 3, batch.target_count, batch.token_count)
    assert count_targets(padded.tensors["labels"]) == batch.target_count
    assert torch.equal(padded.tensors["input_ids"][3], batch.tensors["input_ids"][0])
    assert torch.equal(padded.tensors["attention_mask"][3], batch.tensors["attention_mask"][0])
    assert all(tensor.shape[0] == 4 and tensor.dtype == batch.tensors[name].dtype for name, tensor in padded.tensors.items())
    assert pad_rows(padded, 2) is padded


def test_slices_make_up_the_batch_and_keep_the_update_s_counts() -> None:
    batch = pad_rows(make_batch([causal_row(n) for n in (3, 4, 5, 6, 7)], 0, LengthRule("batch", 16, 8)), 6)
    halves = [slice_rows(batch, 0, 3), slice_rows(batch, 3, 6)]
    assert [half.row_count for half in halves] == [3, 3]
    assert all(half.target_count == batch.target_count == 2 + 3 + 4 + 5 + 6 for half in halves)
    assert torch.equal(torch.cat([half.tensors["labels"] for half in halves]), batch.tensors["labels"])


# --- order ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["batch", "bucketed", "fixed"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("count", [1, 3, 4, 37, 450])
def test_every_row_once_per_epoch(padding: Padding, shuffle: bool, count: int) -> None:
    generator = random.Random(count)
    rows = rows_of_lengths([generator.randint(1, 64) for _ in range(count)])
    drawn = loader(rows, padding, shuffle=shuffle)
    for epoch in range(2):
        order = drawn.row_order(epoch)
        assert len(order) == drawn.updates_per_epoch == math.ceil(count / 4)
        assert sorted(index for update in order for index in update) == list(range(count))
        assert sorted(map(len, order))[1:] == [4] * (len(order) - 1)  # one update may be short


@pytest.mark.parametrize("padding", ["batch", "bucketed"])
def test_order_is_a_function_of_seed_and_epoch(padding: Padding) -> None:
    rows = rows_of_lengths([1 + index % 13 for index in range(40)])
    orders = {(seed, epoch): loader(rows, padding, seed=seed).row_order(epoch) for seed in (1, 2, 11) for epoch in (0, 1, 12)}
    assert len({str(order) for order in orders.values()}) == len(orders)
    # Asked in another sequence, by another object, after other draws: the same.
    other = loader(rows, padding, seed=2)
    list(other.batches(5))
    assert other.row_order(12) == orders[2, 12]
    assert other.row_order(0) == orders[2, 0]


@pytest.mark.parametrize("padding", ["batch", "bucketed"])
@pytest.mark.parametrize("stop_after", [0, 3, 10, 13])
def test_resuming_at_a_position_gives_the_uninterrupted_batches(padding: Padding, stop_after: int) -> None:
    rows = rows_of_lengths([1 + index % 9 for index in range(20)])
    whole = loader(rows, padding, size=2)
    uninterrupted = [batch for epoch in range(2) for batch in whole.batches(epoch)]
    epoch, index = divmod(stop_after, whole.updates_per_epoch)
    fresh = loader(rows, padding, size=2)
    resumed = [*fresh.batches(epoch, index), *(batch for later in range(epoch + 1, 2) for batch in fresh.batches(later))]
    assert len(resumed) == len(uninterrupted) - stop_after
    for got, wanted in zip(resumed, uninterrupted[stop_after:], strict=True):
        assert all(torch.equal(got.tensors[name], wanted.tensors[name]) for name in wanted.tensors)


def test_without_shuffle_the_file_order_stays() -> None:
    rows = rows_of_lengths([3, 1, 2, 5, 4])
    first_ids = [batch.tensors["input_ids"][:, 0].tolist() for batch in loader(rows, size=2, shuffle=False).batches(0)]
    assert first_ids == [[1000, 1001], [1002, 1003], [1004]]
    assert loader(rows, "bucketed", size=2, shuffle=False).row_order(3) == [[1, 2], [0, 4], [3]]


def test_bucketed_padding_wastes_less_and_still_mixes_lengths_over_time() -> None:
    generator = random.Random(0)
    rows = rows_of_lengths([generator.randint(1, 64) for _ in range(800)])
    padded = {kind: sum(b.tensors["input_ids"].numel() for b in loader(rows, kind, size=8).batches(0)) for kind in ("batch", "bucketed", "fixed")}  # type: ignore[arg-type]
    assert padded["bucketed"] < 0.75 * padded["batch"] < padded["fixed"]
    means = [sum(len(rows[i].input_ids) for i in update) / len(update) for update in loader(rows, "bucketed", size=8).row_order(0)]
    assert means != sorted(means)


def test_fewer_rows_than_an_update_give_one_short_update() -> None:
    batches = list(loader(rows_of_lengths([2, 3, 4]), size=16).batches(0))
    assert [batch.real_rows for batch in batches] == [3]
