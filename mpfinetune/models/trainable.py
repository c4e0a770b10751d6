"""Which parameters learn: names and globs from the config, resolved on the model's facts before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from mpfinetune.errors import ConfigError, did_you_mean
from mpfinetune.models.facts import ModelFacts

_LAST_BLOCKS = re.compile(r"last_(\d+)_blocks?")
SPECIAL = ("embed", "head", "last_N_blocks")


def trainable_names(facts: ModelFacts, trainable: Sequence[str], frozen: Sequence[str]) -> frozenset[str]:
    """Canonical names of the parameters that learn. With neither list, all; a tied parameter follows whichever of its names is matched.

    With adapters they and a classification head learn, and ``trainable`` adds to them.

    Args:
        trainable: only what matches learns: names, globs (``*.bias``), module names, ``embed``, ``head``, ``last_2_blocks``.
        frozen: what matches does not learn.

    Raises:
        ConfigError: a pattern that matches nothing (with the nearest name), or nothing is left to learn; with adapters, what cannot learn
            beside them.
    """
    problems: list[str] = []
    everything = {facts.canonical_name(name) for name in facts.parameters}
    chosen = _matching(facts, "trainable", trainable, problems)
    if facts.adapted:
        chosen |= facts.adapter_names | facts.classification_head
    elif not trainable:
        chosen = everything
    chosen = chosen - _matching(facts, "frozen", frozen, problems)
    if facts.adapted:
        problems += _cannot_learn_beside_adapters(facts, chosen)
    if not problems and not chosen:
        problems.append("trainable: no parameter is left to learn; widen trainable or narrow frozen")
    if problems:
        raise ConfigError(problems)
    return frozenset(chosen)


def _cannot_learn_beside_adapters(facts: ModelFacts, chosen: set[str]) -> list[str]:
    """peft saves a module that learns whole under its own name; it has no place for one that carries an adapter, nor for a tied one."""
    base = chosen - facts.adapter_names
    carrying = sorted(name for name in base if name.rpartition(".")[0] in facts.adapted)
    tied = sorted(base & {names[0] for names in facts.tied_names})
    problems = []
    if carrying:
        problems.append(
            f"trainable: {', '.join(carrying[:3])} would learn, but the layer carries an adapter (adapter.targets); leave it out of one of the two"
        )
    if tied:
        problems.append(f"trainable: {', '.join(tied)} is shared by two modules, which an adapter's file cannot say; leave it frozen")
    return problems


def _matching(facts: ModelFacts, path: str, patterns: Sequence[str], problems: list[str]) -> set[str]:
    matched: set[str] = set()
    for pattern in patterns:
        names = {name for name in facts.parameters if _matches(facts, name, pattern)}
        if not names:
            known = [*facts.parameters, *facts.module_names, *SPECIAL]
            problems.append(
                f"{path}: '{pattern}' matches no parameter{did_you_mean(pattern, known)}; write a name, a module, a glob like *.bias, "
                "embed, head or last_2_blocks"
            )
        matched |= {facts.canonical_name(name) for name in names}
    return matched


def _matches(facts: ModelFacts, name: str, pattern: str) -> bool:
    parameter = facts.parameters[name]
    if pattern == "embed":
        return parameter.part == "prologue"
    if pattern == "head":
        return parameter.part == "epilogue"
    last = _LAST_BLOCKS.fullmatch(pattern)
    if last is not None:
        return parameter.block is not None and parameter.block >= facts.num_blocks - int(last[1])
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def freeze(model: nn.Module, facts: ModelFacts, learning: frozenset[str]) -> None:
    """Turn off gradients for every parameter of a stage that does not learn."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(facts.canonical_name(name) in learning)


def decays(name: str, shape: Sequence[int]) -> bool:
    """Weight decay is for matrices: norms' weights (one dimension) and biases, also those of experts [E, F], are left out."""
    return len(shape) >= 2 and not name.endswith("bias")
