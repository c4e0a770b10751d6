"""Evaluation at full precision gives the loss of transformers' own fp32 model, however the run holds and splits it, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from mpfinetune.strategies import full_precision
from mpfinetune.strategies.deepspeed_ops import prepare_ops
from tests.multiproc.full_precision_cases import Held, full_precision_loss, held, pieces, plain_loss, random_model, train_and_score, with_lora
from tests.multiproc.rank_pool import RankPool

CASE = "tests.multiproc.full_precision_cases:train_and_score"
TOLERANCE = 1e-5
LOCAL: dict[str, Any] = {"strategy": "local", "partition": {}}
OVERLAP: dict[str, Any] = {"strategy": "local", "partition": {"local_overlap": True, "num_stages": 2}, "devices": 2}
PIPELINE: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 2}}
ZBV: dict[str, Any] = {"strategy": "pipeline", "schedule": "zbv", "partition": {"rule": "uniform", "num_stages": 4}}
ZERO_3: dict[str, Any] = {"strategy": "zero", "zero": {"stage": 3}}
FOUR_BIT = {"quantize": "nf4", "precision": "bf16", "adapter": {"type": "lora", "rank": 4, "alpha": 8}}
LIMIT_SECONDS = 180.0  # the engine and its first import may take long on a busy machine


def check(how: Held, folder: Path, results: list[dict[str, Any]]) -> None:
    """The scored loss is that of the plain model with the weights that the ranks had."""
    _, config, hf_config, batches = pieces(how, LOCAL, None)
    weights = {name: value for result in results for name, value in result["weights"].items()}
    if how.adapted:
        base = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        weights = with_lora(weights, base, config.adapter.alpha, config.adapter.rank, config.adapter.type == "dora")
    expected = plain_loss(how.family, hf_config, folder, weights, batches)
    assert [result["loss"] for result in results] == pytest.approx([expected] * len(results), abs=TOLERANCE)


def make_folder(how: Held, folder: Path) -> Path:
    random_model(how.family, pieces(how, LOCAL, None)[2], folder)
    return folder


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys() and left
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        (held("llama", precision="bf16"), LOCAL),
        (held("gpt2", precision="bf16"), OVERLAP),
        (held("bert", adapted=True, precision="bf16", adapter={"type": "none"}, trainable=["head", "last_1_blocks"]), LOCAL),
        (held("llama", adapted=True, **FOUR_BIT), LOCAL),
        (held("bert", adapted=True, quantize="int8", adapter={"type": "lora", "rank": 4, "alpha": 4}), LOCAL),
        (held("llama", adapted=True, **{**FOUR_BIT, "adapter": {"type": "dora", "rank": 4, "alpha": 8}}), LOCAL),
    ],
    ids=["bf16-llama", "bf16-gpt2-overlap", "bf16-bert-frozen", "nf4-llama", "int8-bert", "nf4-dora-llama"],
)
def test_one_process(how: Held, layout: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(how, tmp_path)
    scored, silent = (train_and_score(how, layout, str(folder), score) for score in (True, False))
    check(how, folder, [scored])
    assert_same(scored["after"], silent["after"])


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        (held("llama", precision="bf16"), PIPELINE),
        (held("gpt2", precision="bf16"), ZBV),
        (held("bert", precision="bf16"), ZERO_3),
        (held("llama", precision="bf16", offload={"optimizer": "cpu"}), PIPELINE),
        (held("llama", adapted=True, **FOUR_BIT), PIPELINE),
    ],
    ids=["bf16-pipeline", "bf16-zbv", "bf16-zero3", "bf16-pipeline-offload", "nf4-pipeline"],
)
def test_two_ranks(how: Held, layout: dict[str, Any], two_ranks: RankPool, tmp_path: Path) -> None:
    if "offload" in dict(how.changes):
        prepare_ops("cpu", "none", "cpu", print)  # in one process, before any rank needs them
    folder = make_folder(Held(how.family, (), how.adapted), tmp_path)
    arguments = {"how": how, "layout": layout, "folder": str(folder)}
    scored = two_ranks.run(CASE, arguments, LIMIT_SECONDS)
    silent = two_ranks.run(CASE, {**arguments, "score": False}, LIMIT_SECONDS)
    check(Held(how.family, tuple(item for item in how.changes if item[0] != "offload"), how.adapted), folder, scored)
    for with_score, without in zip(scored, silent, strict=True):
        assert_same(with_score["after"], without["after"])


def test_small_parts_and_few_rows_at_a_time_change_nothing(tmp_path: Path) -> None:
    """As for a large model: one block a part, one global batch a group."""
    how = held("gpt2", precision="bf16")
    folder = str(make_folder(how, tmp_path))
    strategy, config, hf_config, batches = pieces(how, LOCAL, folder)
    whole = full_precision_loss(strategy, config, hf_config, folder, batches)
    with (
        mock.patch.object(full_precision, "_PART_BYTES", 1),
        mock.patch.object(full_precision, "_HIDDEN_BYTES", 1),
        mock.patch.object(full_precision, "build_stage", wraps=full_precision.build_stage) as built,
    ):
        assert full_precision_loss(strategy, config, hf_config, folder, batches) == pytest.approx(whole, abs=1e-6)
    assert built.call_count == len(batches) * (4 + 2)  # blocks, embeddings, head


def test_a_drawn_base_is_drawn_again() -> None:
    """Without files the original is the fp32 draw, of which the quantised base is a rounding."""
    how = held("llama", adapted=True, **FOUR_BIT)
    strategy, config, hf_config, batches = pieces(how, LOCAL, None)
    plain = held("llama", adapted=True, adapter=FOUR_BIT["adapter"])
    unquantised, *_ = pieces(plain, LOCAL, None)
    total = 0.0

    def add(logits: torch.Tensor, labels: torch.Tensor) -> None:
        nonlocal total
        total += float(unquantised.loss_sum(logits, labels).double())

    for batch in batches:
        unquantised.evaluate(batch, add)
    expected = total / sum(batch.target_count for batch in batches)
    assert full_precision_loss(strategy, config, hf_config, None, batches) == pytest.approx(expected, abs=1e-6)


def test_a_frozen_weight_that_had_learnt_is_not_read_from_the_files(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint may freeze what has learnt before."""
    how = held("bert", adapted=True, precision="bf16", adapter={"type": "none"}, trainable=["head"])
    folder = make_folder(how, tmp_path)
    strategy, config, hf_config, batches = pieces(how, LOCAL, str(folder))
    name = "bert.encoder.layer.1.output.dense.weight"
    learnt = strategy.named_parameters()[name].detach() * 2
    strategy.set_weights({name: learnt})
    head = {key: p.detach().float() for key, p in strategy.named_parameters().items() if p.requires_grad}  # the masters begin as the bf16 weights
    expected = plain_loss(how.family, hf_config, folder, {name: learnt.float(), **head}, batches)
    assert full_precision_loss(strategy, config, hf_config, str(folder), batches) == pytest.approx(expected, abs=TOLERANCE)
