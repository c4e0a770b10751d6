"""Holding a config against the rules: every one that it breaks, and those that may be named while other mistakes stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from mpfinetune.config_rules import RULES, Rule

if TYPE_CHECKING:
    from mpfinetune.config import RunConfig


def check_rules(config: RunConfig) -> list[str]:
    """Every rule that the config breaks, one line each; changes nothing."""
    return [_line(rule, config) for rule in RULES if not rule.holds(config)]


def check_rules_of(config: RunConfig, given: Collection[str], doubtful: Collection[str]) -> list[str]:
    """The rules broken by what was given, for a config that has other mistakes besides and whose defaults may not be meant.

    Args:
        given: Paths whose values were given and have the right type; rules about other paths stay silent.
        doubtful: Paths that a mistake leaves open (a wrong type, a misspelt key); rules that read one of them stay silent.
    """
    lines = []
    for rule in RULES:
        if rule.path not in given:
            continue
        if not rule.holds(config) and paths_read(rule, config).isdisjoint(doubtful):
            lines.append(_line(rule, config))
    return lines


def paths_read(rule: Rule, config: RunConfig) -> set[str]:
    """The values on which a rule's verdict about this config rests; several are a combination."""
    read: set[str] = set()
    rule.holds(_Recorder(config, "", read))  # type: ignore[arg-type]  # it stands for the config and hands out the same values
    return read


class _Recorder:
    """Stands for a section of the config and notes the path of each value that is read."""

    def __init__(self, section: Any, prefix: str, read: set[str]) -> None:
        self._section, self._prefix, self._read = section, prefix, read

    def __getattr__(self, name: str) -> Any:
        value, path = getattr(self._section, name), f"{self._prefix}{name}"
        if dataclasses.is_dataclass(value):
            return _Recorder(value, f"{path}.", self._read)
        self._read.add(path)
        return value


def _line(rule: Rule, config: RunConfig) -> str:
    return f"{rule.path}: {value_at(config, rule.path)!r} given, must be {rule.demand}"


def value_at(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
