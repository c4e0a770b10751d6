"""What the config leaves to the plan (``auto``): every combination is planned, and the fastest that fits is taken, with the reasons said."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from mpfinetune.config import RunConfig, check_rules
from mpfinetune.errors import ConfigError, LaunchError
from mpfinetune.planning.micro_size import rows_to_measure
from mpfinetune.planning.partition import NothingFits
from mpfinetune.planning.plan import Plan, World
from mpfinetune.planning.strategy import strategy_and_stages

# Plans a config without anything left open, with memory and time.
PlanOf = Callable[[RunConfig], Plan]
_GIB = 2**30
_RUNNERS_UP = 3


@dataclass(frozen=True)
class Candidate:
    """One combination of what was left open. ``missing_bytes``: what the cards lack together; 0 where it fits or no memory is known."""

    config: RunConfig
    values: tuple[tuple[str, Any], ...]
    plan: Plan | None
    missing_bytes: int

    @property
    def seconds(self) -> float | None:
        return None if self.plan is None or self.plan.prediction is None else self.plan.prediction.step_seconds

    def in_words(self) -> str:
        names = ", ".join(f"{path}: {value}" for path, value in self.values)
        took = "" if self.seconds is None else f" ({self.seconds:.3g} s a step)"
        return f"{names}{took}"


def leaves_open(config: RunConfig, has_cards: bool) -> bool:
    """Whether something is for the plan to choose. The strategy is only where the cards are known; else it follows from the devices' number."""
    wished = config.recompute == "auto" or config.offload.optimizer == "auto"
    return wished or _strategy_is_open(config, has_cards) or _rows_are_open(config, has_cards)


def choose(config: RunConfig, world: World, plan_of: PlanOf) -> tuple[RunConfig, Plan]:
    """The config with everything decided, and its plan, whose notes say why.

    Raises:
        ConfigError: nothing fits (with the missing bytes and the single change that comes closest), or every combination is refused.
    """
    refusals: list[ConfigError | LaunchError] = []
    has_cards = bool(world.cards)
    if config.strategy == "auto" and not _strategy_is_open(config, has_cards):
        # Said now, since the rules on offload allow it for a named strategy only.
        config = replace(config, strategy=cast(Any, strategy_and_stages(config, world)[0]))
    tried = [found for values in _combinations(config, has_cards) if (found := _try(config, values, plan_of, refusals)) is not None]
    fitting = [candidate for candidate in tried if candidate.plan is not None and not candidate.missing_bytes]
    if not fitting:
        if not tried:
            raise refusals[0]
        raise ConfigError(_nothing_fits(min(tried, key=lambda candidate: candidate.missing_bytes), plan_of))
    # Where no time is known the combinations stand in the order of what each costs; sorting keeps that order.
    fitting.sort(key=lambda candidate: candidate.seconds if candidate.seconds is not None else 0.0)
    best = fitting[0]
    assert best.plan is not None
    why = "the fastest that fits" if best.seconds is not None else "the first that fits (no rates are known; see plan --calibrate)"
    lines = [f"auto: {best.in_words()}; {why} of {len(tried)} combinations"]
    if fitting[1:]:
        lines.append("auto: runners-up: " + "; ".join(candidate.in_words() for candidate in fitting[1 : 1 + _RUNNERS_UP]))
    short = sorted((candidate for candidate in tried if candidate.missing_bytes), key=lambda candidate: candidate.missing_bytes)
    if short:
        lines.append("auto: too large: " + "; ".join(f"{c.in_words()} by {c.missing_bytes / _GIB:.2f} GiB" for c in short[:_RUNNERS_UP]))
    return best.config, replace(best.plan, notes=(*best.plan.notes, *lines))


def _strategy_is_open(config: RunConfig, has_cards: bool) -> bool:
    """A map or a number of stages means a pipeline."""
    wish = config.partition
    return has_cards and config.strategy == "auto" and not (wish.stages or wish.device_map or wish.num_stages)


def _rows_are_open(config: RunConfig, has_cards: bool) -> bool:
    """Without known cards the rows of a microbatch are found by trying, when the run begins."""
    rows: Any = config.batch.micro_size
    return has_cards and rows == "auto"


def changed(config: RunConfig, values: tuple[tuple[str, Any], ...]) -> RunConfig:
    """A copy with other values at dotted paths of one or two names."""
    for path, value in values:
        section, _, name = path.rpartition(".")
        inner = replace(getattr(config, section), **{name: value}) if section else value
        config = replace(config, **{section or name: inner})
    return config


def _combinations(config: RunConfig, has_cards: bool) -> list[tuple[tuple[str, Any], ...]]:
    """What costs nothing stands first."""
    axes: list[list[tuple[tuple[str, Any], ...]]] = []
    if _strategy_is_open(config, has_cards):
        zero = [(("strategy", "zero"), ("zero.stage", stage)) for stage in (1, 2, 3)]
        axes.append([(("strategy", "local"),), (("strategy", "pipeline"),), *zero])
    if config.recompute == "auto":
        axes.append([(("recompute", value),) for value in ("none", "every_2", "full")])
    if config.offload.optimizer == "auto":
        outside = (("offload.optimizer", "cpu"),)
        further = [(*outside, (f"offload.{what}", "cpu")) for what in ("gradients", "parameters")]  # of a pipeline, of strategy zero
        axes.append([(("offload.optimizer", "none"),), outside, *further])
    if _rows_are_open(config, has_cards):
        sizes = [2**power for power in range(config.batch.global_size.bit_length()) if 2**power <= config.batch.global_size]
        axes.append([(("batch.micro_size", rows),) for rows in sizes])
    return [tuple(itertools.chain.from_iterable(picked)) for picked in itertools.product(*axes)]


def _try(config: RunConfig, values: tuple[tuple[str, Any], ...], plan_of: PlanOf, refusals: list[ConfigError | LaunchError]) -> Candidate | None:
    """None where the combination is not allowed, or not with the processes and devices that are there."""
    candidate = changed(config, values)
    problems = check_rules(candidate)
    if problems:
        refusals.append(ConfigError(problems))
        return None
    try:
        plan = plan_of(candidate)
    except NothingFits as error:
        return Candidate(candidate, values, None, error.missing_bytes)
    except (ConfigError, LaunchError) as error:
        refusals.append(error)
        return None
    return Candidate(candidate, values, plan, missing_bytes(plan))


def missing_bytes(plan: Plan) -> int:
    """What the cards lack together; 0 where all fit or nothing is known of them."""
    cards = plan.memory.cards if plan.memory is not None else ()
    return sum(max(0, card.needed_bytes - card.card_bytes) for card in cards if card.card_bytes is not None)


def _nothing_fits(closest: Candidate, plan_of: PlanOf) -> str:
    advice = closest_change(closest.config, plan_of)
    return (
        f"strategy: nothing fits the cards. {closest.in_words()} comes closest, and lacks {closest.missing_bytes / _GIB:.2f} GiB over all cards. "
        + (advice or "No single change that was tried makes it smaller.")
    )


def closest_change(config: RunConfig, plan_of: PlanOf) -> str:
    """Of single changes the one after which the cards lack the least, in words; empty where none can be made."""
    half = max(1, rows_to_measure(config) // 2)
    changes: list[tuple[tuple[str, Any], ...]] = [
        (("batch.micro_size", half),),
        (("data.max_length", max(2, config.data.max_length // 2)),),
        (("recompute", "full"),),
        (("offload.optimizer", "cpu"),),
        (("offload.optimizer", "cpu"), ("offload.gradients", "cpu")),
        (("optimizer.name", "adamw_8bit"),),
        (("quantize", "nf4"), ("adapter.type", "lora")),
    ]
    if config.hardware:
        changes.append((("hardware", [*config.hardware, config.hardware[-1]]),))
    tried = [found for values in changes if changed(config, values) != config and (found := _try(config, values, plan_of, [])) is not None]
    if not tried:
        return ""
    best = min(tried, key=lambda candidate: candidate.missing_bytes)
    what = "one more card like the last" if best.values[0][0] == "hardware" else ", ".join(f"{path}: {value}" for path, value in best.values)
    outcome = "fits" if not best.missing_bytes else f"still lacks {best.missing_bytes / _GIB:.2f} GiB"
    return f"The single change that comes closest: {what}, which {outcome}."
