"""Weights of an exported folder: in files of a limited size, by the names of the model's own files, with an index where there are several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpfinetune.models.architecture import auto_class, construct_model
from mpfinetune.training import export_folder
from mpfinetune.training.export_folder import ShardWriter
from tests.families import tiny_config


@pytest.mark.parametrize(("file_bytes", "count"), [(2**30, 1), (1, 6)])
def test_what_is_written_block_by_block_is_read_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_bytes: int, count: int) -> None:
    """mixtral: its files hold the experts one by one, the model has one tensor of them."""
    monkeypatch.setattr(export_folder, "_FILE_BYTES", file_bytes)
    config = tiny_config("mixtral")
    torch.manual_seed(5)
    model: Any = construct_model(config, "causal_lm", "auto", torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    blocks = [{name: t for name, t in weights.items() if name.startswith(f"model.layers.{index}.")} for index in range(config.num_hidden_layers)]
    outside = {name: t for name, t in weights.items() if ".layers." not in name}
    writer = ShardWriter(model, tmp_path)
    writer.add({name: t for name, t in outside.items() if "embed" in name})
    for block in blocks:
        writer.add(block)
    writer.add({name: torch.zeros_like(t) if "embed" in name else t for name, t in outside.items()})  # the first of a name counts
    writer.close()
    config.save_pretrained(tmp_path)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) == count and not list(tmp_path.glob("part-*"))
    if count > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text(encoding="utf-8"))
        assert sorted(set(index["weight_map"].values())) == files and any("experts.1" in name for name in index["weight_map"])
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in weights.values())
    assert writer.shapes == {name: tuple(t.shape) for name, t in weights.items()}
    read = dict(auto_class("causal_lm").from_pretrained(tmp_path).named_parameters())
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)
