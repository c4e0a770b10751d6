"""Microbatches over the devices of one process: the numbers of the plain loop, uneven updates, shared weights, and an end without a hang."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpfinetune.errors import ConfigError
from mpfinetune.models.facts import inspect_model
from mpfinetune.planning.plan import World, make_plan
from mpfinetune.strategies.local_pipe import LocalPipeStrategy
from tests.multiproc.training_cases import (
    CPU,
    Problem,
    build,
    differences,
    hf_config_of,
    local_over,
    make_batches,
    plain_loop,
    run_config,
    run_updates,
    worst_of,
)

TOLERANCE = 1e-5
OVERLAP: dict[str, Any] = local_over(local_overlap=True)
EXIT_SECONDS = 90.0


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mpnet"])
def test_three_uneven_updates_equal_the_plain_loop(family: str) -> None:
    problem = Problem(family)
    strategy = build(problem, OVERLAP)
    assert isinstance(strategy, LocalPipeStrategy)
    result = run_updates(strategy, problem)
    strategy.close()
    assert worst_of(differences(result, plain_loop(problem)))[1] < TOLERANCE


@pytest.mark.parametrize(
    ("partition", "devices"),
    [
        ({"stages": ["embed, 0-2", "3, head"]}, 2),
        ({"stages": ["embed", "0-3", "head"]}, 3),
        (
            {
                "device_map": {
                    "model.embed_tokens": 0,
                    "model.layers.0": 0,
                    **{f"model.layers.{i}": 1 for i in (1, 2, 3)},
                    "model.norm": 1,
                    "lm_head": 1,
                }
            },
            2,
        ),
    ],
)
def test_any_contiguous_map_equals_the_plain_loop(partition: dict[str, Any], devices: int) -> None:
    problem = Problem("llama")
    strategy = build(problem, local_over(local_overlap=True, **partition), devices=(CPU,) * devices)
    assert strategy.plan.num_stages == devices
    assert worst_of(differences(run_updates(strategy, problem), plain_loop(problem)))[1] < TOLERANCE


@pytest.mark.parametrize(
    "problem", [Problem("bert", num_labels=1), Problem("bert", ignored=True), Problem("llama", shapes=((1, 8), (11, 8), (3, 8)))]
)
def test_scores_ignored_rows_and_odd_sizes_equal_the_plain_loop(problem: Problem) -> None:
    """Scores are floating labels that pass through Pipe; 11 rows are more microbatches than the plan's 4, so the pipe is made anew."""
    assert worst_of(differences(run_updates(build(problem, OVERLAP), problem), plain_loop(problem)))[1] < TOLERANCE


@pytest.mark.parametrize("family", ["gpt2", "mpnet"])
def test_a_shared_weight_on_two_devices_is_computed_from_one_owner(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the devices differed: the later stage computes with an image of the first one's parameter, whose gradient flows back."""
    monkeypatch.setattr(LocalPipeStrategy, "_needs_copy", lambda self, owner, other: True)
    problem = Problem(family)
    strategy = build(problem, OVERLAP)
    assert isinstance(strategy, LocalPipeStrategy) and len(strategy._copies) == 1
    module, leaf, owner, _ = strategy._copies[0]
    result = run_updates(strategy, problem)
    assert getattr(module, leaf) is not owner and not isinstance(getattr(module, leaf), nn.Parameter)
    assert worst_of(differences(result, plain_loop(problem)))[1] < TOLERANCE


def test_workers_end_with_the_strategy_and_it_can_go_on_after_close() -> None:
    problem = Problem("llama")
    gc.collect()
    before = threading.active_count()
    strategy = build(problem, OVERLAP)
    assert isinstance(strategy, LocalPipeStrategy)
    batch = make_batches(problem)[0]
    strategy.train_step(batch, 1e-3)
    assert threading.active_count() == before + 1  # one device, one worker
    strategy.close()
    strategy.close()
    assert threading.active_count() == before
    strategy.train_step(batch, 1e-3)
    del strategy
    gc.collect()
    assert threading.active_count() == before


def test_an_error_in_a_stage_is_raised_and_leaves_nothing_behind() -> None:
    problem = Problem("llama")
    strategy = build(problem, OVERLAP)
    batch = make_batches(problem)[0]
    stage = strategy.stages[1]
    handle = stage.register_forward_pre_hook(lambda module, args: (_ for _ in ()).throw(RuntimeError("no memory left")))
    gc.collect()
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no memory left"):
        strategy.train_step(batch, 1e-3)
    assert threading.active_count() == before
    handle.remove()
    assert torch.isfinite(torch.tensor(strategy.train_step(batch, 1e-3).loss))


EXIT_SCRIPT = """
import sys, torch
from torch import nn
from mpfinetune.strategies.local_pipe import _OwnedPipe
class First(nn.Module):
    def forward(self, tensors):
        return (tensors[0] * 2, *tensors[1:])
class Last(nn.Module):
    def forward(self, tensors):
        return tensors[0].sum().reshape(1)
pipe = _OwnedPipe([First(), Last()], [torch.device("cpu")] * 2, 2)
pipe(2, (torch.ones(4, 4, requires_grad=True), torch.ones(4, 1, dtype=torch.int64))).sum().backward()
if sys.argv[1] == "kept in a cycle":
    pipe.itself = pipe
if sys.argv[1] == "dropped":
    del pipe
if sys.argv[1] == "an error":
    raise SystemExit("stopped")
print("end of the script")
"""


@pytest.mark.parametrize(("how", "code"), [("alive", 0), ("dropped", 0), ("kept in a cycle", 0), ("an error", 1)])
def test_the_interpreter_ends_without_a_hang_or_an_abort(how: str, code: int) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", EXIT_SCRIPT, how], cwd=root, timeout=EXIT_SECONDS, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("partition", "devices", "message"),
    [
        ({}, 1, "it needs at least 2 of each"),
        ({"stages": ["embed, 0", "1", "2-3, head"]}, 2, "3 stages are asked for, one a device, but 2 device"),
        ({"device_map": {"model.embed_tokens": 0, "model.layers": 0, "model.layers.1.mlp": 1, "model.norm": 1, "lm_head": 1}}, 2, "is cut inside"),
    ],
)
def test_a_map_that_cannot_overlap_is_refused(partition: dict[str, Any], devices: int, message: str) -> None:
    problem = Problem("llama")
    config = run_config(problem, **local_over(local_overlap=True, **partition))
    with pytest.raises(ConfigError, match=message):
        make_plan(config, inspect_model(hf_config_of(problem), "causal_lm"), World("cpu", devices))
