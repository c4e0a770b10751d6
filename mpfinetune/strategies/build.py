"""From the plan to a strategy with its weights: empty modules, stubs for what others own, own tensors read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpfinetune.config import RunConfig
from mpfinetune.dist import DistContext
from mpfinetune.models.architecture import TORCH_DTYPES, construct_model, parameters_on_meta
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.load import load_stage
from mpfinetune.models.recompute import apply_recompute
from mpfinetune.models.stage import StageModule, StageSpan
from mpfinetune.models.trainable import freeze, trainable_names
from mpfinetune.planning.plan import Plan
from mpfinetune.planning.schedule import stages_of_rank
from mpfinetune.strategies.base import LossSum, Strategy
from mpfinetune.strategies.local import LocalStrategy
from mpfinetune.strategies.pipeline import PipelineStrategy

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STRATEGIES: dict[str, type[Strategy]] = {"local": LocalStrategy, "pipeline": PipelineStrategy}


def build_strategy(
    config: RunConfig,
    hf_config: PretrainedConfig,
    facts: ModelFacts,
    plan: Plan,
    context: DistContext,
    loss_sum: LossSum,
    folder: Path | None,
) -> tuple[Strategy, list[str]]:
    """Build this rank's stages and fill them; ``folder`` None draws every weight.

    Returns:
        The strategy, and the names of the parameters that were drawn since no file holds them.
    """
    stages: dict[int, StageModule] = {}
    drawn: list[str] = []
    held = [0] if plan.num_stages == 1 else stages_of_rank(plan.schedule, context.pipeline_rank, plan.pipeline_ranks, plan.stages_per_rank)
    for index in held:
        stages[index], names = build_stage(config, hf_config, facts, plan.spans[index], context.device, folder)
        drawn += [name for name in names if name not in drawn]
    return STRATEGIES[plan.strategy](plan, facts, context, stages, loss_sum), drawn


def build_stage(
    config: RunConfig, hf_config: PretrainedConfig, facts: ModelFacts, span: StageSpan, device: torch.device, folder: Path | None
) -> tuple[StageModule, list[str]]:
    """One stage with its weights on ``device``; also the names that were drawn."""
    with parameters_on_meta():
        model = construct_model(hf_config, config.model.task, config.model.attention, TORCH_DTYPES[config.precision])
    stage = StageModule(model, facts, span)
    drawn = load_stage(stage, facts, folder, device, config.train.seed)
    freeze(stage.model, facts, trainable_names(facts, config.trainable, config.frozen))
    apply_recompute(stage, facts, config.recompute)
    return stage, drawn
