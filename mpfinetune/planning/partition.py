"""Which blocks belong to which stage: pure functions from the model's facts and the user's wish to contiguous stage spans.

A new rule is one function and one row in ``RULES``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpfinetune.config import PartitionConfig
from mpfinetune.errors import ConfigError, did_you_mean
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.stage import StageSpan
from mpfinetune.planning.predict import Layout, Stopwatch
from mpfinetune.planning.split import best_split, fastest_split

PROLOGUE, EPILOGUE = "embed", "head"
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


@dataclass(frozen=True)
class SplitJudge:
    """What the rules ask that look at bytes and time; found only if one does."""

    stopwatch: Callable[[], Stopwatch]
    layout: Layout
    needed_bytes: Callable[[int, StageSpan], int]  # of the card that holds this stage
    budgets: tuple[int, ...] | None  # bytes of each stage's card; None: not known, or a card holds several stages
    card_names: tuple[str, ...] = ()
    kinds: tuple[int, ...] = ()  # equal numbers for blocks that cost the same
    weight_bytes: Callable[[Iterable[str]], int] | None = None  # of parameters by name, as the run holds them; None: all are of one type


def partition(wish: PartitionConfig, facts: ModelFacts, num_stages: int, judge: SplitJudge | None = None) -> tuple[StageSpan, ...]:
    """Cut the model into ``num_stages`` spans by the rule of ``wish``; ``judge`` is for the rules that look at bytes and time.

    Raises:
        ConfigError: the model cannot be cut, there are more stages than blocks, or a map is wrong; every problem of a map is listed.
    """
    refuse_what_cannot_be_cut(wish, facts, num_stages)
    if facts.refusal is not None:
        return (StageSpan(0, 0, True, True),)
    return RULES[effective_rule(wish)](wish, facts, num_stages, judge)


def refuse_what_cannot_be_cut(wish: PartitionConfig, facts: ModelFacts, num_stages: int) -> None:
    """Before anything else is asked of that many stages.

    Raises:
        ConfigError: the model cannot be cut, or a rule is to make more stages than there are blocks.
    """
    if facts.refusal is not None and num_stages > 1:
        raise ConfigError(f"strategy: {facts.refusal}")
    if effective_rule(wish) != "manual" and num_stages > max(1, facts.num_blocks):
        raise ConfigError(f"partition.num_stages: {num_stages} stages, but the model has {facts.num_blocks} blocks; at most one stage per block")


def effective_rule(wish: PartitionConfig) -> str:
    """The rule that is meant where none is given: manual with a map, else parameters."""
    return wish.rule or ("manual" if wish.stages or wish.device_map else "parameters")


def spans_from_sizes(sizes: Sequence[int]) -> tuple[StageSpan, ...]:
    """Spans of consecutive blocks; the first has the prologue, the last the epilogue."""
    starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    last = len(sizes) - 1
    return tuple(StageSpan(starts[i], starts[i + 1], i == 0, i == last) for i in range(len(sizes)))


def uniform(wish: PartitionConfig, facts: ModelFacts, num_stages: int, judge: SplitJudge | None) -> tuple[StageSpan, ...]:
    """Equal numbers of blocks; the remainder goes to the first stages, since the head weighs on the last."""
    share, remainder = divmod(facts.num_blocks, num_stages)
    return spans_from_sizes([share + (stage < remainder) for stage in range(num_stages)])


def by_parameters(wish: PartitionConfig, facts: ModelFacts, num_stages: int, judge: SplitJudge | None) -> tuple[StageSpan, ...]:
    """The split whose largest stage has the fewest bytes of weights; embedding and head are counted, every stage has a block."""
    weigh = facts.numel if judge is None or judge.weight_bytes is None else judge.weight_bytes
    costs = [weigh(facts.names_of("block", index)) for index in range(facts.num_blocks)]
    # A tied head is a second copy on the last stage, so it weighs there too.
    costs[0] += weigh(facts.names_of("prologue"))
    costs[-1] += weigh(facts.names_of("epilogue"))
    sizes = best_split(len(costs), num_stages, lambda stage, start, stop: sum(costs[start:stop]))
    assert sizes is not None  # every cut is allowed
    return spans_from_sizes(sizes)


def by_time(wish: PartitionConfig, facts: ModelFacts, num_stages: int, judge: SplitJudge | None) -> tuple[StageSpan, ...]:
    """The split whose simulated step is the fastest of those in which every stage fits its card.

    With several stages on a rank the stages are made equally long instead: what a rank does between them cannot be told from one stage.

    Raises:
        ConfigError: no split fits.
    """
    assert judge is not None
    stopwatch, count = judge.stopwatch(), facts.num_blocks
    share = _share_of_card(judge, num_stages)

    def seconds(stage: int, start: int, stop: int) -> float:
        if judge.budgets is not None and share(stage, start, stop) > 1:
            return math.inf
        return stopwatch.stage_seconds(stage, _span(stage, start, stop, num_stages))

    if judge.layout.stages_per_rank > 1:
        sizes = best_split(count, num_stages, seconds)
    else:
        found = fastest_split(count, num_stages, seconds, judge.layout.microbatches, lambda sizes: stopwatch.step_seconds(spans_from_sizes(sizes)))
        sizes = None if found is None else found[0]
    if sizes is None:
        raise _nothing_fits(judge, facts, num_stages)
    return spans_from_sizes(sizes)


def by_memory(wish: PartitionConfig, facts: ModelFacts, num_stages: int, judge: SplitJudge | None) -> tuple[StageSpan, ...]:
    """The split whose fullest card is the least full, in shares of its memory; where no memory is known, the fullest one in bytes.

    Raises:
        ConfigError: no split fits.
    """
    assert judge is not None
    share = _share_of_card(judge, num_stages)
    sizes = best_split(facts.num_blocks, num_stages, share)
    assert sizes is not None
    spans = spans_from_sizes(sizes)
    if judge.budgets is not None and any(share(stage, span.start, span.stop) > 1 for stage, span in enumerate(spans)):
        raise _nothing_fits(judge, facts, num_stages)
    return spans


def _span(stage: int, start: int, stop: int, num_stages: int) -> StageSpan:
    return StageSpan(start, stop, stage == 0, stage == num_stages - 1)


def _share_of_card(judge: SplitJudge, num_stages: int) -> Callable[[int, int, int], float]:
    """(stage, start, stop) -> needed bytes by the card's bytes, or the bytes where those are not known; one prediction for stages alike."""
    known: dict[tuple[int, tuple[int, ...]], float] = {}

    def share(stage: int, start: int, stop: int) -> float:
        key = (stage, judge.kinds[start:stop])
        if key not in known:
            budget = judge.budgets[stage] if judge.budgets is not None else 1
            known[key] = judge.needed_bytes(stage, _span(stage, start, stop, num_stages)) / budget
        return known[key]

    return share


def _nothing_fits(judge: SplitJudge, facts: ModelFacts, num_stages: int) -> ConfigError:
    """The split that comes closest in bytes, and what its cards lack."""
    budgets = judge.budgets
    assert budgets is not None
    share = _share_of_card(judge, num_stages)

    def lacking(stage: int, start: int, stop: int) -> float:
        return (share(stage, start, stop) - 1) * budgets[stage]

    sizes = best_split(facts.num_blocks, num_stages, lacking)
    assert sizes is not None
    lines = []
    for stage, span in enumerate(spans_from_sizes(sizes)):
        short = lacking(stage, span.start, span.stop)
        if short > 0:
            blocks = "one block" if span.stop - span.start == 1 else f"{span.stop - span.start} blocks"
            lines.append(f"{short / 2**30:.2f} GiB on card {stage} ({judge.card_names[stage]}, {budgets[stage] / 2**30:.1f} GiB) with {blocks}")
    return NothingFits(
        f"partition.rule: no split over {num_stages} cards fits; the one that comes closest lacks {', '.join(lines)}",
        sum(max(0, round(lacking(stage, span.start, span.stop))) for stage, span in enumerate(spans_from_sizes(sizes))),
    )


class NothingFits(ConfigError):
    """No split keeps within the cards' memory; ``missing_bytes`` are those of all cards in the split that comes closest."""

    def __init__(self, problem: str, missing_bytes: int) -> None:
        super().__init__(problem)
        self.missing_bytes = missing_bytes


def manual(wish: PartitionConfig, facts: ModelFacts, num_stages: int, judge: SplitJudge | None) -> tuple[StageSpan, ...]:
    """What ``partition.stages`` or ``partition.device_map`` says, checked."""
    problems: list[str] = []
    if wish.stages:
        path, owners = "partition.stages", _owners_from_stages(wish.stages, facts, problems)
    else:
        path, owners = "partition.device_map", _owners_from_device_map(wish.device_map, facts, problems)
    _check_owned_once(path, owners, facts, problems)
    if not problems:
        _check_order(path, owners, facts, num_stages, problems)
    if problems:
        raise ConfigError(problems)
    stage_of = {unit: stages[0] for unit, stages in owners.items()}
    spans = []
    next_start = 0
    for stage in range(num_stages):
        size = sum(stage_of[index] == stage for index in range(facts.num_blocks))
        spans.append(StageSpan(next_start, next_start + size, stage_of[PROLOGUE] == stage, stage_of[EPILOGUE] == stage))
        next_start += size
    return tuple(spans)


RULES: dict[str, Callable[[PartitionConfig, ModelFacts, int, SplitJudge | None], tuple[StageSpan, ...]]] = {
    "manual": manual,
    "uniform": uniform,
    "parameters": by_parameters,
    "memory": by_memory,
    "time": by_time,
}

# --- reading a map ----------------------------------------------------------------------------------------------------------------
# A unit is what cannot be cut: the prologue, a block (by its index) or the epilogue.

Unit = int | str
Owners = dict[Unit, list[int]]


def _owners_from_stages(stages: Sequence[Any], facts: ModelFacts, problems: list[str]) -> Owners:
    owners: Owners = {}
    for stage, entry in enumerate(stages):
        tokens = entry if isinstance(entry, list) else str(entry).split(",")
        for token in (str(token).strip() for token in tokens):
            for unit in _units_of_token(token, f"partition.stages[{stage}]", facts, problems):
                owners.setdefault(unit, []).append(stage)
    return owners


def _units_of_token(token: str, path: str, facts: ModelFacts, problems: list[str]) -> list[Unit]:
    if token in (PROLOGUE, EPILOGUE):
        return [token]
    matched = _RANGE.fullmatch(token)
    if matched is None:
        units = _units_of_module(token, facts)
        if not units:
            names = [PROLOGUE, EPILOGUE, *_unit_names(facts)]
            problems.append(f"{path}: '{token}' is no part of this model{did_you_mean(token, names)}; write {PROLOGUE}, {EPILOGUE}, 3 or 0-2")
        return units
    first, last = int(matched[1]), int(matched[2] or matched[1])
    if first > last:
        problems.append(f"{path}: the range '{token}' runs backwards; write {last}-{first}")
        return []
    if last >= facts.num_blocks:
        problems.append(f"{path}: '{token}' is out of range; the model has the blocks 0-{facts.num_blocks - 1} ({facts.blocks_path})")
    return list(range(first, min(last, facts.num_blocks - 1) + 1))


def _owners_from_device_map(device_map: dict[str, int], facts: ModelFacts, problems: list[str]) -> Owners:
    """Of the entries that contain a module the most specific decides, as in accelerate; an entry below a block is a cut inside it.

    What has no parameters of its own (a rotary table) is ignored: every stage computes it.
    """
    for name in device_map:
        if name and name not in facts.module_names and name not in facts.parameters:
            problems.append(f"partition.device_map: '{name}' is no module of this model{did_you_mean(name, _unit_names(facts))}")
    owners: Owners = {}
    for unit, module in _units_with_names(facts):
        above = [name for name in device_map if _contains(name, module)]
        below = [name for name in device_map if name != module and _contains(module, name)]
        stages = {device_map[name] for name in [*sorted(above, key=len)[-1:], *below]}
        if isinstance(unit, int) and len(stages) > 1:
            problems.append(
                f"partition.device_map: {module} is cut inside ('{below[0]}'): stages {' and '.join(map(str, sorted(stages)))}. Residual "
                f"connections add within a block, so a cut is allowed only between blocks; give '{module}' one stage"
            )
            stages = {min(stages)}
        for stage in sorted(stages - set(owners.get(unit, []))):
            owners.setdefault(unit, []).append(stage)
    return owners


def _contains(outer: str, inner: str) -> bool:
    """Whether the module ``outer`` is ``inner`` or holds it; '' is the whole model."""
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _units_of_module(name: str, facts: ModelFacts) -> list[Unit]:
    """The units that a module's name covers: below it, it itself, or the one it lies in."""
    if name and name not in facts.module_names and name not in facts.parameters:
        return []
    covered: list[Unit] = []
    for unit, unit_name in _units_with_names(facts):
        if _contains(name, unit_name) or _contains(unit_name, name):
            covered += [unit] if unit not in covered else []
    return covered


def _units_with_names(facts: ModelFacts) -> list[tuple[Unit, str]]:
    blocks: list[tuple[Unit, str]] = [(index, facts.block_name(index)) for index in range(facts.num_blocks)]
    return [*((PROLOGUE, n) for n in facts.prologue_modules), *blocks, *((EPILOGUE, n) for n in facts.epilogue_modules)]


def _unit_names(facts: ModelFacts) -> list[str]:
    return [name for _, name in _units_with_names(facts)]


def _check_owned_once(path: str, owners: Owners, facts: ModelFacts, problems: list[str]) -> None:
    units: list[Unit] = [PROLOGUE, *range(facts.num_blocks), EPILOGUE]
    missing = [_describe(unit, facts) for unit in units if unit not in owners]
    if missing:
        problems.append(f"{path}: missing, on no stage: {', '.join(missing)}")
    for unit in units:
        stages = owners.get(unit, [])
        if len(stages) > 1:
            problems.append(f"{path}: {_describe(unit, facts)} is given {len(stages)} times, to the stages {', '.join(map(str, sorted(stages)))}")


def _describe(unit: Unit, facts: ModelFacts) -> str:
    if isinstance(unit, int):
        return f"block {unit} ({facts.block_name(unit)})"
    modules = facts.prologue_modules if unit == PROLOGUE else facts.epilogue_modules
    return f"{unit} ({', '.join(modules)})"


def _check_order(path: str, owners: Owners, facts: ModelFacts, num_stages: int, problems: list[str]) -> None:
    """Stages follow each other as the blocks do, and none is empty."""
    order: list[Unit] = [PROLOGUE, *range(facts.num_blocks), EPILOGUE]
    stages = [owners[unit][0] for unit in order]
    for before, after, unit in zip(stages, stages[1:], order[1:], strict=False):
        if after < before:
            problems.append(
                f"{path}: {_describe(unit, facts)} is on stage {after}, but what runs before it is on stage {before}; "
                "stages follow the order in which the model runs: embed, blocks from first to last, head"
            )
    used = set(stages)
    empty = [stage for stage in range(num_stages) if stage not in used]
    if empty:
        problems.append(f"{path}: nothing is on stage {', '.join(map(str, empty))}; stages are numbered from 0 without gaps")
