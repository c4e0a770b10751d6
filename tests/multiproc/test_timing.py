"""Measured times: every part on every rank, the slowed rank seen as slow, and the split that follows from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpfinetune.planning.timing import RankTimes
from mpfinetune.training.forecast import read_calibration
from tests.multiproc.rank_pool import RankPool
from tests.multiproc.timing_cases import BLOCKS, config_of, forecast_of

CASE = "tests.multiproc.timing_cases:measure_and_plan"
SLEEP_SECONDS = 0.02
LORA: dict[str, Any] = {"adapter": {"type": "lora", "rank": 2}, "recompute": "full"}


@pytest.mark.parametrize(
    ("family", "slow_rank", "changes"),
    [("llama", 1, {}), ("gpt2", 0, {"precision": "bf16"}), ("bert", 1, {"frozen": ["embed"], "schedule": "gpipe"}), ("llama", 0, LORA)],
    ids=["llama", "gpt2-tied-bf16", "bert-frozen-embedding", "llama-lora-recompute"],
)
def test_the_slower_rank_gets_fewer_blocks(two_ranks: RankPool, tmp_path: Path, family: str, slow_rank: int, changes: dict[str, Any]) -> None:
    arguments = {"family": family, "run_dir": str(tmp_path), "changes": changes, "slow_rank": slow_rank, "sleep_seconds": SLEEP_SECONDS}
    first, second = two_ranks.run(CASE, arguments)
    assert first["times"] == second["times"] and first["sizes"] == second["sizes"], "the ranks plan alike"
    times: list[RankTimes] = first["times"]
    for measured in times:
        assert measured.source == "measured" and len(measured.parts) == BLOCKS + 2 and measured.rows == 2
        assert measured.update_bytes_per_second > 0
    in_blocks = [sum(part.forward for part in measured.parts[1:-1]) for measured in times]
    assert in_blocks[slow_rank] > in_blocks[1 - slow_rank]
    assert times[0].transfer_seconds > 0 and times[1].transfer_seconds == 0
    assert first["sizes"] == ([3, 1] if slow_rank == 1 else [1, 3])
    prediction = first["prediction"]
    assert prediction.source == "measured" and prediction.step_seconds > 4 * SLEEP_SECONDS
    assert prediction.idle_shares[slow_rank] < prediction.idle_shares[1 - slow_rank]


def test_times_of_another_run_are_not_used(two_ranks: RankPool, tmp_path: Path) -> None:
    arguments = {"family": "llama", "run_dir": str(tmp_path), "changes": {}, "slow_rank": 1, "sleep_seconds": 0.001}
    written = two_ranks.run(CASE, arguments)[0]["times"]

    def read(changes: dict[str, Any], ranks: int = 2) -> list[RankTimes] | None:
        config = config_of("llama", str(tmp_path), changes)
        return read_calibration(config, forecast_of("llama", config)[0].calibration_key(ranks))

    assert read({}) == read({"batch": {"global_size": 8, "micro_size": 1}}) == written
    assert read({"precision": "bf16"}) is None and read({"data": {"path": "x", "max_length": 32}}) is None and read({}, ranks=1) is None
    # Another size of microbatch: seconds in proportion.
    config = config_of("llama", str(tmp_path), {})
    forecast, _ = forecast_of("llama", config)
    halved = forecast.times_of(1, 2, 1)
    assert [part.forward for part in halved[0].parts] == pytest.approx([part.forward / 2 for part in written[0].parts])
