"""The package's shape, read from its source: which module may import which, which library may be imported where, and how long is long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "mpfinetune"

# What each part may import from the package besides itself. The order is errors, config -> models, data -> planning -> strategies ->
# training -> cli; `reports` reads events. "package" is mpfinetune/__init__.py (its version).
BASE = {"package", "errors", "config"}
MAY_IMPORT: dict[str, set[str]] = {
    "package": set(),
    "errors": {"package"},
    "config": {"package", "errors"},
    "dist": BASE,
    "reports": BASE,
    "models": BASE,
    "data": BASE,
    "planning": BASE | {"models", "data"},
    "strategies": BASE | {"models", "data", "planning", "dist"},
    "training": BASE | {"models", "data", "planning", "strategies", "dist", "reports"},
    "doctor": BASE | {"models", "planning", "strategies", "dist"},
    "cli": BASE | {"models", "data", "planning", "strategies", "training", "dist", "reports", "doctor"},
}
# Modules at the top of the package that belong to one part.
PART_OF_MODULE = {
    "__init__": "package",
    "__main__": "cli",
    "launcher": "cli",
    "config_checks": "config",
    "config_files": "config",
    "config_rules": "config",
    "config_values": "config",
}

# Libraries that few may import: {library: prefixes of module names}.
ONLY_IN = {
    "deepspeed": ("strategies.",),
    "bitsandbytes": ("models.quantize", "training.optim"),
    "peft": ("models.adapters",),
    "fairscale": ("strategies.", "models.recompute", "planning.partition"),
}
# Slow to import: only inside functions, so that `plan` starts in a second.
LAZY = (*ONLY_IN, "accelerate", "datasets", "torchmetrics", "matplotlib", "tensorboard", "torch.utils.tensorboard", "sklearn")
NEEDS_A_GROUP = ("torch.distributed", "deepspeed", "mpfinetune.dist")

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
# "models/stage.py" or "models/stage.py:function", each with the reason beside it. Keep it short.
LONG_ON_PURPOSE: set[str] = set()


@dataclass(frozen=True)
class Import:
    """One imported name: ``target`` is dotted, ``line`` where, ``lazy`` when inside a function or only for type checkers."""

    target: str
    line: int
    lazy: bool


def module_name(path: Path) -> str:
    """models/stage.py -> models.stage; models/__init__.py -> models.__init__."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def part_of(name: str) -> str:
    top = name.partition(".")[0]
    return PART_OF_MODULE.get(top, top)


def is_under(target: str, prefix: str) -> bool:
    return target == prefix or target.startswith(f"{prefix}.")


def imports_of(tree: ast.AST, name: str) -> Iterator[Import]:
    """Every import of the module, `from a import b` as a.b; `torch.distributed.x` used as an attribute counts too."""
    yield from _walk(tree, name, lazy=False)


def _walk(node: ast.AST, name: str, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _is_for_type_checkers(child)
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, inside)
        elif isinstance(child, ast.ImportFrom):
            for alias in child.names:
                yield Import(f"{_from_what(child, name)}.{alias.name}", child.lineno, inside)
        elif isinstance(child, ast.Attribute) and ast.unparse(child) == "torch.distributed":
            yield Import("torch.distributed", child.lineno, inside)
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(("import_module", "__import__")) and child.args:
            first = child.args[0]
            yield Import(first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "?", child.lineno, inside)
        yield from _walk(child, name, inside)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _from_what(node: ast.ImportFrom, name: str) -> str:
    if not node.level:
        return node.module or ""
    parents = ["mpfinetune", *name.split(".")][: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def wrong_directions(tree: ast.AST, name: str) -> list[str]:
    part = part_of(name)
    found = []
    for item in imports_of(tree, name):
        if not is_under(item.target, "mpfinetune"):
            continue
        inner = item.target.removeprefix("mpfinetune").lstrip(".")
        target = part_of(inner)
        if target not in MAY_IMPORT:  # a name of mpfinetune/__init__.py, such as __version__
            target = "package"
        if target != part and target not in MAY_IMPORT.get(part, set()):
            found.append(f"line {item.line}: {part} must not import {item.target}")
    return found


def wrong_libraries(tree: ast.AST, name: str) -> list[str]:
    found = []
    for item in imports_of(tree, name):
        for library, places in ONLY_IN.items():
            if is_under(item.target, library) and not name.startswith(places):
                found.append(f"line {item.line}: {library} may be imported only in {', '.join(places)}")
        if not item.lazy and any(is_under(item.target, library) for library in LAZY):
            found.append(f"line {item.line}: import {item.target} inside the function that needs it")
        if part_of(name) == "planning" and any(is_under(item.target, prefix) for prefix in NEEDS_A_GROUP):
            found.append(f"line {item.line}: planning needs no process group, so not {item.target}")
        if item.target == "?":
            found.append(f"line {item.line}: import_module of a computed name hides what is imported")
    return found


def too_long(tree: ast.AST, path: Path) -> list[str]:
    relative = path.relative_to(PACKAGE).as_posix()
    found = []
    lines = len(path.read_text(encoding="utf-8").splitlines())
    if lines > MAX_MODULE_LINES and relative not in LONG_ON_PURPOSE:
        found.append(f"{relative}: {lines} lines, at most {MAX_MODULE_LINES}")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES and f"{relative}:{node.name}" not in LONG_ON_PURPOSE:
                found.append(f"{relative}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    return found


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name: str) -> None:
    assert part_of(name) in MAY_IMPORT, f"{name}: give its part a row in MAY_IMPORT, or name its part in PART_OF_MODULE"
    assert wrong_directions(TREES[name], name) == []


@pytest.mark.parametrize("name", MODULES)
def test_libraries_are_imported_where_they_may(name: str) -> None:
    assert wrong_libraries(TREES[name], name) == []


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_functions_are_short(name: str) -> None:
    assert too_long(TREES[name], MODULES[name]) == []


def test_exceptions_for_length_are_still_needed() -> None:
    for entry in LONG_ON_PURPOSE:
        assert (PACKAGE / entry.partition(":")[0]).exists(), f"{entry} is gone: take it off the list"


def test_allowed_directions_have_no_cycle() -> None:
    done: set[str] = set()
    while rest := set(MAY_IMPORT) - done:
        free = {part for part in rest if MAY_IMPORT[part] <= done}
        assert free, f"cycle among {rest}"
        done |= free


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("models.stage", "from mpfinetune.dist import DistContext", "models must not import mpfinetune.dist.DistContext"),
        ("models.stage", "from ..planning import plan", "models must not import mpfinetune.planning.plan"),
        ("models.stage", "def f():\n    import mpfinetune.training.loop", "models must not import mpfinetune.training.loop"),
        ("strategies.base", "from mpfinetune import training", "strategies must not import mpfinetune.training"),
        ("strategies.base", "from mpfinetune.reports.console import Reporter", "strategies must not import mpfinetune.reports"),
        ("reports.memory", "from mpfinetune.planning.plan import Plan", "reports must not import mpfinetune.planning"),
    ],
)
def test_wrong_direction_is_seen(name: str, source: str, words: str) -> None:
    assert words in " ".join(wrong_directions(ast.parse(source), name))


@pytest.mark.parametrize(
    ("name", "source", "words"),
    [
        ("training.optim", "def f():\n    import deepspeed", "deepspeed may be imported only in strategies."),
        ("strategies.zero", "import deepspeed.comm", "import deepspeed.comm inside the function"),
        ("models.load", "def f():\n    from bitsandbytes.nn import Linear4bit", "bitsandbytes may be imported only in"),
        ("reports.tracking", "from torch.utils.tensorboard import SummaryWriter", "inside the function that needs it"),
        ("data.sources", "try:\n    import datasets\nexcept ImportError:\n    pass", "import datasets inside the function"),
        ("planning.timing", "def f():\n    from torch import distributed", "not torch.distributed"),
        ("planning.timing", "import torch\nx = torch.distributed.get_rank()", "not torch.distributed"),
        ("data.sources", "import importlib\nx = importlib.import_module('datasets')", "import datasets inside the function"),
    ],
)
def test_wrong_library_is_seen(name: str, source: str, words: str) -> None:
    assert words in " ".join(wrong_libraries(ast.parse(source), name))


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("strategies.zero", "def f():\n    import deepspeed"),
        ("data.sources", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import datasets"),
        ("training.loop", "from mpfinetune.reports.console import Reporter\nfrom mpfinetune import __version__"),
        ("planning.plan", "from mpfinetune.models.facts import ModelFacts\nfrom . import partition"),
    ],
)
def test_what_is_allowed_passes(name: str, source: str) -> None:
    tree = ast.parse(source)
    assert wrong_directions(tree, name) == [] and wrong_libraries(tree, name) == []
