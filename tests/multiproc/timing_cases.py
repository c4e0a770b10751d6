"""Measures the ranks' times, one rank slowed on purpose, and plans with them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.dist import make_context
from mpfinetune.models.adapters import facts_with_adapters
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.models.stage import StageModule
from mpfinetune.planning.plan import World, make_plan, with_prediction
from mpfinetune.training.calibrate import calibrate
from mpfinetune.training.forecast import Forecast, write_calibration
from tests.families import task_of, tiny_config

BLOCKS = 4


def config_of(family: str, run_dir: str, changes: dict[str, Any]) -> RunConfig:
    causal = task_of(family) == "causal_lm"
    base: dict[str, Any] = {
        "model": {"path": "in memory", "task": task_of(family), "init": "random"},
        "data": {"max_length": 16, **({"path": "in memory"} if causal else {"task": "mrpc"})},
        "batch": {"global_size": 8, "micro_size": 2},
        "partition": {"rule": "time", "num_stages": 2},
        "strategy": "pipeline",
        "device": "cpu",
        "run_dir": run_dir,
    }
    return config_from_dict({**base, **changes})


def forecast_of(family: str, config: RunConfig) -> tuple[Forecast, ModelFacts]:
    hf_config = tiny_config(family, num_labels=2)
    facts = facts_with_adapters(inspect_model(hf_config, config.model.task), config.adapter)
    return Forecast(config, hf_config, facts, World("cpu", 2, 2), 2), facts


def measure_and_plan(family: str, run_dir: str, changes: dict[str, Any], slow_rank: int, sleep_seconds: float) -> dict[str, Any]:
    """The measured times, written as the command does, and the plan that a run of this config makes of them."""
    config = config_of(family, run_dir, changes)
    forecast, facts = forecast_of(family, config)
    context = make_context(dist.get_rank(), 2, torch.device("cpu"), 2, timedelta(seconds=60))

    def slow_down(stage: StageModule) -> None:
        if context.rank == slow_rank:
            for index in range(stage.span.start, stage.span.stop):
                block = stage.model.get_submodule(facts.block_name(index))
                block.register_forward_pre_hook(lambda module, args: time.sleep(sleep_seconds))

    times = calibrate(forecast, context, slow_down)
    if context.rank == 0:
        write_calibration(config, forecast.calibration_key(2), times)
    dist.barrier()
    plan = with_prediction(make_plan(config, facts, World("cpu", 2, 2), forecast.knowledge()), config, facts, forecast.knowledge())
    return {"times": times, "sizes": [span.stop - span.start for span in plan.spans], "prediction": plan.prediction}
