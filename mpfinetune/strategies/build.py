"""From the plan to a strategy with its weights: empty modules, stubs for what others own, own tensors read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mpfinetune.config import RunConfig
from mpfinetune.dist import DistContext
from mpfinetune.models.adapters import add_adapters, add_empty_adapters
from mpfinetune.models.architecture import TORCH_DTYPES, construct_model, parameters_on_meta
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.load import DeviceOf, load_stage
from mpfinetune.models.quantize import replace_linears
from mpfinetune.models.recompute import apply_recompute
from mpfinetune.models.stage import StageModule, StageSpan
from mpfinetune.models.trainable import freeze, trainable_names
from mpfinetune.planning.plan import Plan
from mpfinetune.strategies.base import LossSum, Strategy
from mpfinetune.strategies.dispatch import dispatch
from mpfinetune.strategies.local import LocalStrategy
from mpfinetune.strategies.local_pipe import LocalPipeStrategy
from mpfinetune.strategies.pipeline import PipelineStrategy
from mpfinetune.strategies.zero import ZeroStrategy, build_partitioned

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STRATEGIES: dict[str, type[Strategy]] = {
    "local": LocalStrategy,
    "local_overlap": LocalPipeStrategy,  # local with partition.local_overlap
    "pipeline": PipelineStrategy,
    "zero": ZeroStrategy,
}


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
    for index in [] if plan.zero_stage == 3 else plan.stages_of(context.pipeline_rank):
        stages[index], names = build_stage(config, hf_config, facts, plan.spans[index], _stage_device(plan, context, index), folder)
        drawn += [name for name in names if name not in drawn]
    if plan.zero_stage == 3:
        stages[0], drawn = _build_partitioned_stage(config, hf_config, facts, plan, context, folder)
    if plan.placement is not None:
        devices = [context.nth_device(number) for number in range(max(plan.placement.homes.values()) + 1)]
        dispatch(stages[0].model, facts, plan.placement, devices)
    overlap = plan.strategy == "local" and plan.num_stages > 1
    strategy = STRATEGIES["local_overlap" if overlap else plan.strategy](plan, facts, context, stages, loss_sum)
    # Where the whole model is drawn from the seed, it is drawn again.
    strategy.drawn = frozenset(map(facts.canonical_name, drawn if folder is not None else ()))
    return strategy, drawn


def _build_partitioned_stage(
    config: RunConfig, hf_config: PretrainedConfig, facts: ModelFacts, plan: Plan, context: DistContext, folder: Path | None
) -> tuple[StageModule, list[str]]:
    """The whole model with its parameters partitioned over the ranks as they are read."""
    with parameters_on_meta():
        model = construct_model(hf_config, config.model.task, config.model.attention, TORCH_DTYPES[config.precision])
    stage = StageModule(model, facts, plan.spans[0])
    add_empty_adapters(stage, facts, config.adapter)

    def build_part(span: StageSpan) -> tuple[StageModule, list[str]]:
        return build_stage(config, hf_config, facts, span, context.device, folder)

    drawn = build_partitioned(config, facts, plan, context, stage, build_part)
    apply_recompute(stage, facts, config.recompute)
    return stage, drawn


def _stage_device(plan: Plan, context: DistContext, stage: int) -> torch.device | DeviceOf:
    placement = plan.placement
    if placement is not None:
        return lambda name: context.nth_device(placement.device_of(name))
    return context.nth_device(stage) if plan.strategy == "local" and plan.num_stages > 1 else context.device


def build_stage(
    config: RunConfig, hf_config: PretrainedConfig, facts: ModelFacts, span: StageSpan, device: torch.device | DeviceOf, folder: Path | None
) -> tuple[StageModule, list[str]]:
    """One stage with its weights on ``device`` (one, or a function from their names); also the names that were drawn."""
    with parameters_on_meta():
        model = construct_model(hf_config, config.model.task, config.model.attention, TORCH_DTYPES[config.precision])
    stage = StageModule(model, facts, span)
    quantizer = replace_linears(stage, facts, config.quantize, TORCH_DTYPES[config.precision])
    drawn = load_stage(stage, facts, folder, device, config.train.seed, quantizer)
    add_adapters(stage, facts, config.adapter, config.train.seed)
    freeze(stage.model, facts, trainable_names(facts, config.trainable, config.frozen))
    apply_recompute(stage, facts, config.recompute)
    return stage, drawn
