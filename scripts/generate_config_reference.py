"""Writes docs/config.md, the reference of every config key, from the sentences in mpfinetune/config.py.

python scripts/generate_config_reference.py          writes the file
python scripts/generate_config_reference.py --check  writes nothing; ends with 1 when the file is not up to date
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from mpfinetune.config import RULES, RunConfig, config_hints, config_paths  # noqa: E402
from mpfinetune.config_values import type_in_words  # noqa: E402

TARGET = REPOSITORY / "docs" / "config.md"
INTRODUCTION = """# Config reference

<!-- Written by scripts/generate_config_reference.py from mpfinetune/config.py; change the sentences there. -->

One YAML file describes a run. Each key can also be given on the command line by its dotted path:
`python -m mpfinetune train configs/x.yaml optimizer.lr=3e-5 train.epochs=1`. Only the keys marked required must be there. `${other.key}`
stands for another key's value and `${oc.env:NAME}` for a variable of the environment. All mistakes are reported at once.
"""
COMBINATIONS_INTRODUCTION = """## Combinations that are refused

Before any process starts. The message names the key, the value given, what is allowed, why, and what to write instead.
"""
RULES_INTRODUCTION = """## Limits of single values

What must hold besides the types above.
"""


def render() -> str:
    """The text of docs/config.md."""
    parts = [INTRODUCTION, "## The run\n", _keys_table("")]
    for entry in dataclasses.fields(RunConfig):
        if any(path.startswith(f"{entry.name}.") for path, _ in config_paths()):
            parts += [f"## {entry.name}\n", f"{entry.metadata['help']}\n", _keys_table(entry.name)]
    combinations = [(f"`{rule.path}`", _cell(rule.allowed), _cell(rule.why), _cell(rule.instead)) for rule in RULES if rule.why]
    single = [(f"`{rule.path}`", _cell(rule.allowed)) for rule in RULES if not rule.why]
    parts += [COMBINATIONS_INTRODUCTION, _table(("key", "must be", "why", "what instead"), combinations)]
    parts += [RULES_INTRODUCTION, _table(("key", "must be"), single)]
    return "\n".join(parts)


def _keys_table(section: str) -> str:
    rows = []
    for path, entry in config_paths():
        if path.rpartition(".")[0] == section:
            rows.append((f"`{path}`", _cell(type_in_words(config_hints()[path])), _default_in_words(entry), _cell(entry.metadata["help"])))
    return _table(("key", "value", "default", "meaning"), rows)


def _default_in_words(entry: dataclasses.Field[Any]) -> str:
    default = entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
    if default == "???":
        return "required"
    return f"`{_cell(default if isinstance(default, str) else _as_yaml(default))}`"


def _as_yaml(value: Any) -> str:
    """1e-08 -> 1e-8; what JSON writes is YAML otherwise."""
    return json.dumps(value).replace("e-0", "e-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(arguments: list[str]) -> int:
    text = render()
    if "--check" in arguments:
        up_to_date = TARGET.exists() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET.relative_to(REPOSITORY)} is {'up to date' if up_to_date else 'NOT up to date: run ' + Path(__file__).name}")
        return 0 if up_to_date else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    print(f"wrote {TARGET.relative_to(REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
