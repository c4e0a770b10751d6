"""DeepSpeed's engines have the numbers of one big card, skip what is not finite, and hand a run on to every other strategy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mpfinetune.strategies.deepspeed_engine import DeepSpeedUpdate
from mpfinetune.strategies.deepspeed_ops import prepare_ops
from tests.multiproc.rank_pool import RankPool
from tests.multiproc.zero_cases import Task, plain, train

CASE = "tests.multiproc.zero_cases:train"
TOLERANCE = 1e-5
PIPELINE: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 2}}
OFFLOADED: dict[str, Any] = {**PIPELINE, "offload": {"optimizer": "cpu"}}
LOCAL: dict[str, Any] = {"strategy": "local"}
# The engine and its first import may take long on a busy machine.
LIMIT_SECONDS = 180.0


def zero(stage: int, **offload: str) -> dict[str, Any]:
    return {"strategy": "zero", "zero": {"stage": stage}, "offload": offload}


BOTH = zero(3, optimizer="cpu", parameters="cpu")
# (changes of the config, families)
MATRIX: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "pipeline_offload": (OFFLOADED, ("llama", "gpt2", "bert")),
    # the norm is taken group by group over all ranks, and the first rank has no parameter without decay
    "embed_alone_offload": ({**OFFLOADED, "partition": {"stages": ["embed", "0-3, head"]}}, ("llama",)),
    "zbv_offload": ({**OFFLOADED, "schedule": "zbv", "partition": {"rule": "uniform", "num_stages": 4}}, ("gpt2",)),
    "zero_1": (zero(1), ("llama", "gpt2", "bert")),
    "zero_2": (zero(2), ("llama", "gpt2", "bert")),
    "zero_3": (zero(3), ("llama", "gpt2", "bert")),
    "zero_1_offload": (zero(1, optimizer="cpu"), ("gpt2",)),
    "zero_2_offload": (zero(2, optimizer="cpu"), ("llama",)),
    "zero_3_both_offloads": (BOTH, ("llama", "gpt2", "bert")),
}
CASES = [pytest.param(changes, family, id=f"{name}-{family}") for name, (changes, families) in MATRIX.items() for family in families]


@pytest.fixture(scope="module", autouse=True)
def built_ops() -> None:
    """In one process, before any rank needs them."""
    prepare_ops("cpu", "none", "cpu", print)


@cache
def reference(family: str) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: sums in the same order
    try:
        return plain(Task(family))
    finally:
        torch.set_num_threads(threads)


def weights_of(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: value for result in results for name, value in result["weights"].items()}


def check(results: list[dict[str, Any]], family: str) -> None:
    expected = reference(family)
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert result["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE)
        assert not any(result["skipped"])
    weights = weights_of(results)
    assert weights.keys() == expected["weights"].keys()
    for name, value in expected["weights"].items():
        assert weights[name].shape == value.shape  # whole, also where a rank holds a part
        torch.testing.assert_close(weights[name], value, atol=TOLERANCE, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("changes", "family"), CASES)
def test_numbers_of_the_plain_loop(two_ranks: RankPool, changes: dict[str, Any], family: str) -> None:
    check(two_ranks.run(CASE, {"task": Task(family), "changes": changes}, LIMIT_SECONDS), family)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pipeline_over_two_replicas_shards_the_states(four_ranks: RankPool, family: str) -> None:
    check(four_ranks.run(CASE, {"task": Task(family), "changes": OFFLOADED}, LIMIT_SECONDS), family)


@pytest.mark.parametrize(
    "changes", [OFFLOADED, zero(1), zero(2), zero(3), BOTH], ids=["pipeline_offload", "zero_1", "zero_2", "zero_3", "zero_3_both_offloads"]
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_bf16_is_near_fp32(two_ranks: RankPool, changes: dict[str, Any], family: str) -> None:
    for result in two_ranks.run(CASE, {"task": Task(family, "bf16"), "changes": changes}, LIMIT_SECONDS):
        assert result["losses"] == pytest.approx(reference(family)["losses"], abs=1e-2)


@pytest.mark.parametrize("changes", [OFFLOADED, zero(1), zero(2), BOTH], ids=["pipeline_offload", "zero_1", "zero_2", "zero_3_both_offloads"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_changes_nothing(two_ranks: RankPool, changes: dict[str, Any], value: float, precision: str) -> None:
    shapes = ((8, 12), (7, 9))
    clean = two_ranks.run(CASE, {"task": Task("gpt2", precision, shapes[:1]), "changes": changes}, LIMIT_SECONDS)
    poison = (1, "transformer.ln_f.bias", value)
    spoilt = two_ranks.run(CASE, {"task": Task("gpt2", precision, shapes), "changes": changes, "poison": poison}, LIMIT_SECONDS)
    for before, after in zip(clean, spoilt, strict=True):
        assert after["skipped"] == [False, True]
        for kind in ("weights", "states"):
            assert before[kind].keys() == after[kind].keys()
            assert all(torch.equal(tensor, after[kind][name]) for name, tensor in before[kind].items()), f"{kind} have changed"


@pytest.mark.parametrize("start", [zero(3), BOTH, zero(2, optimizer="cpu"), OFFLOADED], ids=["zero_3", "both", "zero_2", "pipeline_offload"])
def test_a_run_goes_on_under_other_strategies(two_ranks: RankPool, tmp_path: Path, start: dict[str, Any]) -> None:
    """An update under the engine, one in the pipeline, one in one process: as if nothing had been stopped."""
    losses, before = [], None
    for index, changes in enumerate((start, PIPELINE, LOCAL)):
        folder = tmp_path / str(index)
        arguments = {"task": Task("gpt2"), "changes": changes, "first": index, "last": index + 1, "resume": before, "save": str(folder)}
        results = [train(**arguments)] if changes is LOCAL else two_ranks.run(CASE, arguments, LIMIT_SECONDS)
        losses += results[0]["losses"]
        before = str(folder / "step-00000001")
    assert losses == pytest.approx(reference("gpt2")["losses"], abs=TOLERANCE)
    for name, value in reference("gpt2")["weights"].items():
        torch.testing.assert_close(weights_of(results)[name], value, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("target", [zero(1), zero(3), BOTH, OFFLOADED], ids=["zero_1", "zero_3", "both", "pipeline_offload"])
def test_an_engine_goes_on_from_a_plain_run(two_ranks: RankPool, tmp_path: Path, target: dict[str, Any]) -> None:
    first = train(Task("gpt2"), LOCAL, last=1, save=str(tmp_path))
    arguments = {"task": Task("gpt2"), "changes": target, "first": 1, "resume": str(tmp_path / "step-00000001")}
    results = two_ranks.run(CASE, arguments, LIMIT_SECONDS)
    assert first["losses"] + results[0]["losses"] == pytest.approx(reference("gpt2")["losses"], abs=TOLERANCE)
    for name, value in reference("gpt2")["weights"].items():
        torch.testing.assert_close(weights_of(results)[name], value, atol=TOLERANCE, rtol=0)


def test_parts_of_the_model_that_learn_nothing(two_ranks: RankPool) -> None:
    frozen = {"trainable": ["last_1_blocks"]}
    engine = two_ranks.run(CASE, {"task": Task("gpt2"), "changes": {**OFFLOADED, **frozen}}, LIMIT_SECONDS)
    without = train(Task("gpt2"), {**LOCAL, **frozen})
    assert engine[0]["losses"] == pytest.approx(without["losses"], abs=TOLERANCE)
    assert engine[0]["norms"] == pytest.approx(without["norms"], abs=TOLERANCE)
    for name, value in without["weights"].items():
        torch.testing.assert_close(weights_of(engine)[name], value, atol=TOLERANCE, rtol=0)


def test_stage_3_loads_a_part_at_a_time(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 20, "num_attention_heads": 8}
    LlamaForCausalLM(LlamaConfig(num_key_value_heads=8, **sizes)).save_pretrained(tmp_path)
    # The allocator would keep freed tensors for the next ones, and the measurement would show its habits.
    with RankPool(2, environment={"MALLOC_MMAP_THRESHOLD_": "131072"}) as pool:
        for seen in pool.run("tests.multiproc.zero_cases:load_bytes", {"folder": str(tmp_path), "part_bytes": 8 * 2**20}, LIMIT_SECONDS):
            assert seen["peak"] < seen["whole"] / 2 + seen["largest_part"] + 16 * 2**20 < seen["whole"]


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

    update, again = update_with_scaler(), update_with_scaler()
    assert update.scale_state() == (4.0, 0) and not update.scale_is_smallest
    for overflow, state in ((True, (2.0, 0)), (False, (2.0, 1)), (False, (2.0, 2))):
        update._scaler.update_scale(overflow)
        assert update.scale_state() == state
    again.load_scale_state(2.0, 2)
    for overflow in (False, False, True, True, True, True):
        for one in (update, again):
            one._scaler.update_scale(overflow)
        assert again.scale_state() == update.scale_state()
    assert update.scale_state() == (1.0, 0) and update.scale_is_smallest
