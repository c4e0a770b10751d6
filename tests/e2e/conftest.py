"""Models and data files, made once per session; a workspace per test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.workspace import Workspace, make_model, make_mrpc, make_texts
from tests.multiproc.rank_pool import RankPool

SHARED = Path(os.environ.get("MPFINETUNE_SHARED", Path(__file__).resolve().parents[3] / "shared"))


@pytest.fixture(scope="session")
def material(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("material")
    families = ("bert", "llama", "gpt2", "gemma", "mixtral")
    models = {family: make_model(folder / family, family) for family in families}
    data = {
        "mrpc": make_mrpc(folder / "mrpc"),
        "texts": make_texts(folder / "texts.jsonl", range(18)),
        "held_out": make_texts(folder / "held_out.jsonl", range(100, 107)),
    }
    return Workspace(models, data, folder)


@pytest.fixture
def work(material: Workspace, tmp_path: Path) -> Workspace:
    return Workspace(material.models, material.data, tmp_path)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks that are kept for the session: a split run in a second instead of twenty."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def stories() -> Path:
    """A small llama with real weights and its tokenizer."""
    folder = SHARED / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip("no shared models: set MPFINETUNE_SHARED or put them in ../shared")
    return folder
