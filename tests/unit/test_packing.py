"""Packed rows: nothing is lost or cut, and models that would mix them are told from those that keep them apart."""

from __future__ import annotations

import inspect
import random

import pytest
import torch

from mpfinetune.data.packing import pack_rows
from mpfinetune.data.rows import Row
from mpfinetune.errors import ModelError
from mpfinetune.training.packed_rows import refuse_rows_that_mix
from tests.families import CAUSAL_LM, VOCAB_SIZE
from tests.multiproc.layouts import LOCAL
from tests.multiproc.training_cases import Problem, build


def rows_in(packed: list[Row]) -> list[tuple[list[int], list[int]]]:
    """The rows that were packed, as (ids, labels) from the second token on, cut apart where the positions begin anew."""
    found = []
    for pack in packed:
        assert isinstance(pack.labels, list) and pack.position_ids is not None
        starts = [index for index, position in enumerate(pack.position_ids) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(pack.input_ids)], strict=True):
            assert pack.position_ids[start:stop] == list(range(stop - start)) and pack.labels[start] == -100
            found.append((pack.input_ids[start:stop], pack.labels[start + 1 : stop]))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_packed_once_and_whole_and_hardly_a_pack_is_half_empty(seed: int) -> None:
    lengths = random.Random(seed)
    rows = [Row(ids := [lengths.randrange(99) for _ in range(lengths.randint(2, 40))], [-100, *ids[1:]]) for _ in range(200)]
    said: list[str] = []
    packed = pack_rows(rows, 64, "train.jsonl", said.append)
    assert sorted(rows_in(packed)) == sorted((row.input_ids, row.labels[1:]) for row in rows if isinstance(row.labels, list))
    sizes = [len(pack.input_ids) for pack in packed]
    assert max(sizes) <= 64
    assert sorted(sizes)[0] + sorted(sizes)[1] > 64, "two packs would fit into one"
    assert packed == pack_rows(rows, 64, "train.jsonl", said.append)
    filled = sum(sizes) / (len(packed) * 64)
    assert said[0] == f"train.jsonl: 200 rows packed into {len(packed)} of up to 64 tokens, {filled:.0%} full (data.packing)" and filled > 0.95


def test_rows_as_long_as_a_pack_stay_alone() -> None:
    rows = [Row([7] * 8, [7] * 8), Row([8] * 8, [8] * 8)]
    assert [row.input_ids for row in pack_rows(rows, 8, "file", print)] == [[7] * 8, [8] * 8]


def mixes_rows(family: str) -> bool:
    """Whether the second of two packed rows has other logits than alone, by transformers' own model."""
    strategy = build(Problem(family), LOCAL)
    model = strategy.stages[0].model.eval()
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return True
    first, second = torch.arange(3, 14)[None], torch.arange(20, 33)[None]
    positions = torch.cat([torch.arange(11), torch.arange(13)])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat([first, second], dim=1), position_ids=positions).logits[:, 11:]
        alone = model(input_ids=second, attention_mask=torch.ones_like(second)).logits
    return not torch.allclose(packed, alone, atol=1e-5)


@pytest.mark.parametrize("family", CAUSAL_LM)
def test_a_model_is_refused_if_and_only_if_it_mixes_packed_rows(family: str) -> None:
    strategy = build(Problem(family), {**LOCAL, "batch": {"global_size": 8, "micro_size": 3}})
    if mixes_rows(family):
        with pytest.raises(ModelError, match=f"data.packing: true given, but {family} lets packed rows see each other"):
            refuse_rows_that_mix(strategy, VOCAB_SIZE)
    else:
        refuse_rows_that_mix(strategy, VOCAB_SIZE)
