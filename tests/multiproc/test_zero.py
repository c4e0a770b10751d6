"""DeepSpeed's engines skip what is not finite, hand a run on to every other strategy, and load a part at a time; their numbers: test_parity."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpfinetune.strategies.deepspeed_engine import DeepSpeedUpdate
from tests.multiproc.layouts import GRADIENTS_OFFLOADED, LOCAL, OFFLOADED, split_for_good, zero
from tests.multiproc.rank_pool import RankPool
from tests.multiproc.training_cases import Problem, adapter_problem, plain_loop, train
from tests.threads import one_thread

pytestmark = pytest.mark.usefixtures("built_ops")
CASE = "tests.multiproc.training_cases:train"
TOLERANCE = 1e-5
PIPELINE: dict[str, Any] = {}
# The engine and its first import may take long on a busy machine.
LIMIT_SECONDS = 180.0


BOTH = zero(3, optimizer="cpu", parameters="cpu")
WHOLE, LORA = Problem("gpt2"), adapter_problem("gpt2")


def reference(problem: Problem) -> dict[str, Any]:
    """The plain loop knows no adapters."""
    with one_thread():
        return train(problem, LOCAL) if problem.config else plain_reference(problem)


@cache
def plain_reference(problem: Problem) -> dict[str, Any]:
    return plain_loop(problem)


def check_end(results: list[dict[str, Any]], losses: list[float], problem: Problem) -> None:
    expected = reference(problem)
    assert losses == pytest.approx(expected["losses"], abs=TOLERANCE)
    for name, value in expected["parameters"].items():
        torch.testing.assert_close(weights_of(results)[name], value, atol=TOLERANCE, rtol=0)


def weights_of(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: value for result in results for name, value in result["parameters"].items()}


@pytest.mark.parametrize(
    "changes",
    [OFFLOADED, GRADIENTS_OFFLOADED, zero(1), zero(2), BOTH],
    ids=["pipeline_offload", "pipeline_gradients", "zero_1", "zero_2", "zero_3_both_offloads"],
)
@pytest.mark.parametrize(("value", "precision"), [(float("inf"), "fp32"), (float("nan"), "bf16")])
def test_a_gradient_that_is_not_finite_changes_nothing(two_ranks: RankPool, changes: dict[str, Any], value: float, precision: str) -> None:
    shapes = ((8, 12), (7, 9))
    clean = two_ranks.run(CASE, {"problem": Problem("gpt2", precision=precision, shapes=shapes[:1]), "changes": changes}, LIMIT_SECONDS)
    poison = (1, "transformer.ln_f.bias", value)
    spoilt = two_ranks.run(
        CASE, {"problem": Problem("gpt2", precision=precision, shapes=shapes), "changes": changes, "poison": poison}, LIMIT_SECONDS
    )
    for before, after in zip(clean, spoilt, strict=True):
        assert after["skipped"] == [False, True]
        for kind in ("parameters", "moments"):
            assert before[kind].keys() == after[kind].keys()
            assert all(torch.equal(tensor, after[kind][name]) for name, tensor in before[kind].items()), f"{kind} have changed"


@pytest.mark.parametrize(
    ("problem", "start"),
    [(WHOLE, zero(3)), (WHOLE, BOTH), (WHOLE, zero(2, optimizer="cpu")), (WHOLE, OFFLOADED), (LORA, split_for_good()), (LORA, zero(1))],
    ids=["zero_3", "both", "zero_2", "pipeline_offload", "lora_zero_3", "lora_zero_1"],
)
def test_a_run_goes_on_under_other_strategies(two_ranks: RankPool, tmp_path: Path, problem: Problem, start: dict[str, Any]) -> None:
    """An update under the engine, one in the pipeline, one in one process: as if nothing had been stopped."""
    losses, before = [], None
    for index, changes in enumerate((start, PIPELINE, LOCAL)):
        folder = tmp_path / str(index)
        arguments = {"problem": problem, "changes": changes, "updates": (index, index + 1), "resume": before, "save": str(folder)}
        results = [train(**arguments)] if changes is LOCAL else two_ranks.run(CASE, arguments, LIMIT_SECONDS)
        losses += results[0]["losses"]
        before = str(folder / "step-00000001")
    check_end(results, losses, problem)


@pytest.mark.parametrize(
    ("problem", "target"),
    [
        *((WHOLE, target) for target in (zero(1), zero(3), BOTH, OFFLOADED, GRADIENTS_OFFLOADED)),
        (LORA, zero(2, optimizer="cpu")),
        (LORA, split_for_good(optimizer="cpu", parameters="cpu")),
    ],
    ids=["zero_1", "zero_3", "both", "offload", "gradients", "lora_zero_2", "lora_both"],
)
def test_an_engine_goes_on_from_a_plain_run(two_ranks: RankPool, tmp_path: Path, problem: Problem, target: dict[str, Any]) -> None:
    first = train(problem, LOCAL, updates=(0, 1), save=str(tmp_path))
    arguments = {"problem": problem, "changes": target, "updates": (1, None), "resume": str(tmp_path / "step-00000001")}
    results = two_ranks.run("tests.multiproc.training_cases:train_from_small_groups", arguments, LIMIT_SECONDS)
    check_end(results, first["losses"] + results[0]["losses"], problem)


@pytest.mark.parametrize(
    ("problem", "changes"),
    [*((WHOLE, changes) for changes in (OFFLOADED, GRADIENTS_OFFLOADED, zero(2), BOTH)), (LORA, zero(1)), (LORA, BOTH)],
    ids=["pipeline_offload", "pipeline_gradients", "zero_2", "zero_3_both_offloads", "lora_zero_1", "lora_zero_3_both_offloads"],
)
def test_a_parameter_without_a_gradient_stops_the_first_update(two_ranks: RankPool, problem: Problem, changes: dict[str, Any]) -> None:
    arguments = {"problem": problem, "changes": changes}
    errors = two_ranks.run("tests.multiproc.training_cases:error_of_a_forgotten_parameter", arguments, LIMIT_SECONDS)
    assert all("frozen: forgotten should learn, but the loss of the first update gives no gradient there" in error for error in errors), errors


def test_stage_3_loads_a_part_at_a_time(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 12, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(num_key_value_heads=8, **sizes)).save_pretrained(tmp_path)
    # The allocator would keep freed tensors for the next ones, and the measurement would show its habits.
    with RankPool(2, environment={"MALLOC_MMAP_THRESHOLD_": "131072"}) as pool:
        for seen in pool.run(
            "tests.multiproc.training_cases:load_bytes_of_stage_3", {"folder": str(tmp_path), "part_bytes": 8 * 2**20}, LIMIT_SECONDS
        ):
            assert seen["peak"] < seen["whole"] / 2 + seen["largest_part"] + 16 * 2**20 < seen["whole"]


def test_the_scale_grows_after_the_gradients_are_divided_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own order halves the gradients of every update in which it grows."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it asks who is to log
    update: Any = object.__new__(DeepSpeedUpdate)
    update._scaler = DynamicLossScaler(8.0, scale_window=1, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False)
    update._scaler.update_scale(False)  # the first never grows it
    update.zero = SimpleNamespace(_update_scale=update._scaler.update_scale)
    update._scale_after_the_step()
    update.zero._update_scale(False)  # what the engine's step does before it divides
    assert update._scaler.cur_scale == 8.0
    update._grow()
    assert update._scaler.cur_scale == 16.0
    update.zero._update_scale(True)
    assert update._scaler.cur_scale == 8.0


def test_the_engines_loss_scale_is_put_back_and_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed refuses fp16 on a CPU, so its scaler alone: halved, grown and stopped as without an engine."""
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it asks who is to log

    def update_with_scaler() -> DeepSpeedUpdate:
        update = object.__new__(DeepSpeedUpdate)
        update._scaler = DynamicLossScaler(4.0, scale_window=3, min_scale=1.0, delayed_shift=1, consecutive_hysteresis=False)
        update._keep_the_run_at_the_smallest_scale()
        return update

    update, states = update_with_scaler(), []
    for overflow in (True, False, False, False, False, False, False, False, True, True, True, True):
        again = update_with_scaler()
        again.load_scale_state(*(update.scale_state() or ()))
        for one in (update, again):
            one._scaler.update_scale(overflow)
        assert again.scale_state() == update.scale_state()
        states.append(update.scale_state())
    assert states == [
        (2.0, 0), (2.0, 1), (2.0, 2), (2.0, 3), (4.0, 1), (4.0, 2), (4.0, 3), (8.0, 1), (4.0, 0), (2.0, 0), (1.0, 0), (1.0, 0)
    ]  # fmt: skip
    assert update.scale_is_smallest and not update_with_scaler().scale_is_smallest
