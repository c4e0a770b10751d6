"""docs/config.md says what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from mpfinetune.config import RULES, config_paths

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_config_reference", REPOSITORY / "scripts" / "generate_config_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_reference_is_up_to_date(generator: ModuleType) -> None:
    written = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == generator.render(), "run: python scripts/generate_config_reference.py"


def test_config_reference_holds_every_key_and_rule(generator: ModuleType) -> None:
    text = generator.render()
    assert all(f"| `{path}` |" in text for path, _ in config_paths())
    assert all(f"| `{rule.path}` | {rule.allowed} |" + (f" {rule.why} | {rule.instead} |" if rule.why else "") in text for rule in RULES)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") in (3, 5) for line in tables)


def test_check_says_when_the_file_is_old(generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "REPOSITORY", tmp_path)
    monkeypatch.setattr(generator, "TARGET", tmp_path / "docs" / "config.md")
    assert generator.main(["--check"]) == 1
    assert generator.main([]) == 0
    assert generator.main(["--check"]) == 0
    generator.TARGET.write_text("old", encoding="utf-8")
    assert generator.main(["--check"]) == 1
