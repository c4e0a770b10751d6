"""Each process runs the whole model on its share of the rows; DeepSpeed splits states (1), gradients (2) and parameters (3) over them.

With one process it is the way to train on one card what does not fit there: states, then parameters, live on the host or on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpfinetune.config import RunConfig
from mpfinetune.data.batches import GlobalBatch
from mpfinetune.dist import DistContext
from mpfinetune.models.architecture import TORCH_DTYPES
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.stage import StageModule, StageSpan, part_spans
from mpfinetune.planning.plan import Plan
from mpfinetune.strategies.base import LossSum, Observer, Strategy
from mpfinetune.strategies.deepspeed_config import engine_config
from mpfinetune.strategies.deepspeed_engine import DeepSpeedUpdate, ProcessMap, join_deepspeed
from mpfinetune.strategies.partitioned import gathered, whole_shape

StageBuilder = Callable[[StageSpan], tuple[StageModule, list[str]]]
_PART_BYTES = 256 * 2**20


class ZeroStrategy(Strategy):
    """Data parallel, with one engine over the whole model."""

    def __init__(self, plan: Plan, facts: ModelFacts, context: DistContext, stages: dict[int, StageModule], loss_sum: LossSum) -> None:
        super().__init__(plan, facts, context, stages, loss_sum)
        join_deepspeed(context)
        self.process_map = ProcessMap(context)
        # The engine divides the sum over replicas by their number at stage 3, where it cannot be told not to.
        self._loss_factor = float(context.replicas) if plan.zero_stage == 3 else 1.0

    def _forward_backward(self, batch: GlobalBatch, loss_scale: float) -> Tensor:
        assert isinstance(self.update, DeepSpeedUpdate)
        engine = self.update.engine
        total = torch.zeros((), device=self.context.device)
        for inputs, labels in self.own_microbatches(batch):
            loss = self.loss_sum(engine(**inputs), labels) / max(1, batch.target_count)
            engine.backward(loss * self._loss_factor, scale_wrt_gas=False)
            total += loss.detach()
        return total

    def _forward(self, batch: GlobalBatch, observe: Observer) -> None:
        for inputs, labels in self.own_microbatches(batch):
            observe(self.stages[0](**inputs), labels)

    @property
    def survives_out_of_memory(self) -> bool:
        """Stages 2 and 3 exchange in the passes themselves, where a rank that has broken off cannot take part; stage 1 only at the update."""
        return self.context.replicas == 1 or self.plan.zero_stage == 1

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: whole_shape(parameter) for name, parameter in self.named_parameters().items()}

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        parameters = self.named_parameters()
        for name, value in weights.items():
            with gathered(parameters[name], writes=True):
                parameters[name].data.copy_(value)


def build_partitioned(
    config: RunConfig, facts: ModelFacts, plan: Plan, context: DistContext, whole: StageModule, build_part: StageBuilder
) -> list[str]:
    """Fill a whole model whose parameters are on meta, for stage 3: part by part (embeddings, blocks, head), each partitioned over the
    ranks as soon as it is read, so that no rank holds more than its share and one part (a block, or up to 256 MiB of them).

    Args:
        build_part: reads one part, every parameter of it whole.

    Returns:
        The names that were drawn since no file holds them.
    """
    deepspeed = join_deepspeed(context)
    move_buffers(whole.model, context.device)
    drawn: list[str] = []
    first: Any = None
    for span in part_spans(facts, plan.spans[0], TORCH_DTYPES[config.precision].itemsize, _PART_BYTES):
        part, names = build_part(span)
        taken = take_over(whole.model, part.model, facts)
        drawn += [name for name in names if name in taken]
        if first is None:
            # Partitions what it is given at once; what comes later must go through the same object, which knows the swapper to disk.
            first = next(iter(taken.values()))
            deepspeed.zero.Init(
                module=nn.ParameterList(taken.values()),
                data_parallel_group=context.replica_group,
                config_dict_or_path=engine_config(config, facts, plan),
                mpu=ProcessMap(context),  # no dtype: the JSON says it, and DeepSpeed 0.19 takes bf16 for any that is given on a CPU
            )
        else:
            first.convert_to_zero_parameters(param_list=list(taken.values()))
        del part
    tie(whole.model, facts)
    return drawn


def take_over(whole: nn.Module, part: nn.Module, facts: ModelFacts) -> dict[str, nn.Parameter]:
    """Put the parameters and buffers of a part in their places in the whole; returns the parameters taken, by name.

    What the whole has already (a tied weight, or one that every part holds) stays.
    """
    taken: dict[str, nn.Parameter] = {}
    for name, parameter in part.named_parameters():
        place = next((names[0] for names in facts.tied_names if name in names), name)
        if whole.get_parameter(place).is_meta:
            _set(whole, place, parameter)
            taken[facts.canonical_name(name)] = parameter
    for name, buffer in part.named_buffers():
        owner, _, leaf = name.rpartition(".")
        module = whole.get_submodule(owner)
        module.register_buffer(leaf, buffer, persistent=leaf not in module._non_persistent_buffers_set)
    return taken


def tie(model: nn.Module, facts: ModelFacts) -> None:
    """Every name of a tied weight gets the one parameter that is there."""
    for names in facts.tied_names:
        for name in names[1:]:
            _set(model, name, model.get_parameter(names[0]))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer.to(device), persistent=name not in module._non_persistent_buffers_set)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, parameter)
