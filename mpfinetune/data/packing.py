"""Several rows in one, so that an update has hardly any padding.

The positions of a packed row begin at 0 with each row in it. From them, and the absence of an attention mask, transformers' own mask
functions see that tokens of different rows must not attend to each other; so packed rows have the loss that they have alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from mpfinetune.data.rows import IGNORED, Row, Say


def pack_rows(rows: Sequence[Row], max_length: int, name: str, say: Say) -> list[Row]:
    """Whole rows, each of at most ``max_length`` tokens, put together into as few rows of that length as best-fit-decreasing finds.

    The method is that of Ding et al., Fewer Truncations Improve Language Modeling (arXiv 2404.10830), which TRL packs with, too. The result
    is a function of the rows alone.
    """
    longest_first = sorted(range(len(rows)), key=lambda index: -len(rows[index].input_ids))
    open_at: dict[int, list[int]] = {}  # room in tokens -> the packs that have it
    rooms: list[int] = []  # the keys of open_at, sorted
    packs: list[list[int]] = []
    for index in longest_first:
        needed = len(rows[index].input_ids)
        place = bisect_left(rooms, needed)
        if place == len(rooms):
            pack, room = len(packs), max_length
            packs.append([])
        else:
            room = rooms[place]
            pack = open_at[room].pop()
            if not open_at[room]:
                del open_at[room], rooms[place]
        packs[pack].append(index)
        left = room - needed
        if left not in open_at:
            open_at[left] = []
            insort(rooms, left)
        open_at[left].append(pack)
    packed = [_joined([rows[index] for index in members]) for members in packs]
    filled = sum(len(row.input_ids) for row in packed) / (len(packed) * max_length)
    say(f"{name}: {len(rows)} rows packed into {len(packed)} of up to {max_length} tokens, {filled:.0%} full (data.packing)")
    return packed


def _joined(rows: Sequence[Row]) -> Row:
    input_ids: list[int] = []
    labels: list[int] = []
    position_ids: list[int] = []
    for row in rows:
        assert isinstance(row.labels, list)
        input_ids += row.input_ids
        labels += [IGNORED, *row.labels[1:]]  # the shift by one would have the last token of the row before predict the first
        position_ids += range(len(row.input_ids))
    return Row(input_ids, labels, position_ids=position_ids)
