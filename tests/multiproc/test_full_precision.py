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
from tests.multiproc.full_precision_cases import full_precision_loss, plain_loss, random_model, train_and_score, with_lora
from tests.multiproc.layouts import LOCAL
from tests.multiproc.rank_pool import RankPool
from tests.multiproc.training_cases import Problem, adapter_problem, build, make_batches, run_config

CASE = "tests.multiproc.full_precision_cases:train_and_score"
TOLERANCE = 1e-5
OVERLAP: dict[str, Any] = {"strategy": "local", "partition": {"local_overlap": True, "num_stages": 2}, "devices": 2}
PIPELINE: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 2}}
ZBV: dict[str, Any] = {"strategy": "pipeline", "schedule": "zbv", "partition": {"rule": "uniform", "num_stages": 4}}
OFFLOADED: dict[str, Any] = {**PIPELINE, "offload": {"optimizer": "cpu"}}
ZERO_3: dict[str, Any] = {"strategy": "zero", "zero": {"stage": 3}, "partition": {}}
FOUR_BIT = {"quantize": "nf4", "precision": "bf16", "adapter": {"type": "lora", "rank": 4, "alpha": 8}}

LIMIT_SECONDS = 180.0  # the engine and its first import may take long on a busy machine


def bf16(family: str, **config: Any) -> Problem:
    return Problem(family, precision="bf16", config=tuple(config.items()))


def check(problem: Problem, folder: Path, results: list[dict[str, Any]]) -> None:
    """The scored loss is that of the plain model with the weights that the ranks had."""
    adapter = run_config(problem, **LOCAL).adapter
    weights = {name: value for result in results for name, value in result["weights"].items()}
    if adapter.type != "none":
        base = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
        weights = with_lora(weights, base, adapter.alpha, adapter.rank, adapter.type == "dora")
    expected = plain_loss(problem, folder, weights)
    assert [result["loss"] for result in results] == pytest.approx([expected] * len(results), abs=TOLERANCE)


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys() and left
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (bf16("llama"), LOCAL),
        (bf16("gpt2"), OVERLAP),
        (bf16("bert", trainable=["head", "last_1_blocks"]), LOCAL),
        (adapter_problem("llama", **FOUR_BIT), LOCAL),
        (adapter_problem("bert", quantize="int8", adapter={"type": "lora", "rank": 4, "alpha": 4}), LOCAL),
        (adapter_problem("llama", **{**FOUR_BIT, "adapter": {"type": "dora", "rank": 4, "alpha": 8}}), LOCAL),
    ],
    ids=["bf16-llama", "bf16-gpt2-overlap", "bf16-bert-frozen", "nf4-llama", "int8-bert", "nf4-dora-llama"],
)
def test_one_process(problem: Problem, changes: dict[str, Any], tmp_path: Path) -> None:
    random_model(problem, tmp_path)
    scored, silent = (train_and_score(problem, changes, str(tmp_path), score) for score in (True, False))
    check(problem, tmp_path, [scored])
    assert_same(scored["after"], silent["after"])


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (bf16("llama"), PIPELINE),
        (bf16("gpt2"), ZBV),
        (bf16("bert"), ZERO_3),
        (adapter_problem("llama", **{**FOUR_BIT, "quantize": "none"}), ZERO_3),
        (bf16("llama"), OFFLOADED),
        (adapter_problem("llama", **FOUR_BIT), PIPELINE),
    ],
    ids=["bf16-pipeline", "bf16-zbv", "bf16-zero3", "lora-zero3", "bf16-pipeline-offload", "nf4-pipeline"],
)
def test_two_ranks(problem: Problem, changes: dict[str, Any], two_ranks: RankPool, tmp_path: Path) -> None:
    if "offload" in changes:
        prepare_ops("cpu", "none", "cpu", print)  # in one process, before any rank needs them
    random_model(problem, tmp_path)
    arguments = {"problem": problem, "changes": changes, "folder": str(tmp_path)}
    scored = two_ranks.run(CASE, arguments, LIMIT_SECONDS)
    silent = two_ranks.run(CASE, {**arguments, "score": False}, LIMIT_SECONDS)
    check(problem, tmp_path, scored)
    for with_score, without in zip(scored, silent, strict=True):
        assert_same(with_score["after"], without["after"])


def test_small_parts_and_few_rows_at_a_time_change_nothing(tmp_path: Path) -> None:
    """As for a large model: one block a part, one global batch a group."""
    problem, folder = bf16("gpt2"), str(tmp_path)
    random_model(problem, tmp_path)
    strategy = build(problem, LOCAL, folder)
    whole = full_precision_loss(strategy, problem, LOCAL, folder)
    with (
        mock.patch.object(full_precision, "_PART_BYTES", 1),
        mock.patch.object(full_precision, "_HIDDEN_BYTES", 1),
        mock.patch.object(full_precision, "build_stage", wraps=full_precision.build_stage) as built,
    ):
        assert full_precision_loss(strategy, problem, LOCAL, folder) == pytest.approx(whole, abs=1e-6)
    assert built.call_count == len(problem.shapes) * (4 + 2)  # blocks, embeddings, head


def test_a_drawn_base_is_drawn_again() -> None:
    """Without files the original is the fp32 draw, of which the quantised base is a rounding."""
    problem = adapter_problem("llama", **FOUR_BIT)
    unquantised = build(adapter_problem("llama", adapter=FOUR_BIT["adapter"]), LOCAL)
    total, batches = torch.zeros((), dtype=torch.float64), make_batches(problem)

    def add(logits: torch.Tensor, labels: torch.Tensor) -> None:
        total.add_(unquantised.loss_sum(logits, labels).double())

    for batch in batches:
        unquantised.evaluate(batch, add)
    expected = float(total) / sum(batch.target_count for batch in batches)
    assert full_precision_loss(build(problem, LOCAL), problem, LOCAL, None) == pytest.approx(expected, abs=1e-6)


def test_a_frozen_weight_that_had_learnt_is_not_read_from_the_files(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint may freeze what has learnt before."""
    problem, folder = bf16("bert", trainable=["head"]), str(tmp_path)
    random_model(problem, tmp_path)
    strategy = build(problem, LOCAL, folder)
    name = "bert.encoder.layer.1.output.dense.weight"
    learnt = strategy.named_parameters()[name].detach() * 2
    strategy.set_weights({name: learnt})
    head = {key: p.detach().float() for key, p in strategy.named_parameters().items() if p.requires_grad}  # the masters begin as the bf16 weights
    expected = plain_loss(problem, tmp_path, {name: learnt.float(), **head})
    assert full_precision_loss(strategy, problem, LOCAL, folder) == pytest.approx(expected, abs=TOLERANCE)
