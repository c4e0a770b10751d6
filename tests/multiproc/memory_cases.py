"""What a rank runs to hold the memory prediction against the real step: bytes counted from the tensors, and what autograd keeps."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.data.batches import GlobalBatch, count_targets
from mpfinetune.dist import DistContext, make_context
from mpfinetune.models.adapters import facts_with_adapters
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.planning.memory_plan import CardMemory
from mpfinetune.planning.plan import Plan, World, make_plan
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.build import build_strategy
from mpfinetune.strategies.deepspeed_engine import DeepSpeedUpdate
from mpfinetune.strategies.update import LossScale, PlainUpdate
from mpfinetune.training.forecast import Forecast
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.memory import measure, plan_with_memory
from mpfinetune.training.optim import NamedOptimizer
from tests.families import VOCAB_SIZE, task_of, tiny_config

ROWS, TOKENS = 8, 40
# Wide enough for nf4 and for 8-bit states.
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 128, "intermediate_size": 256},
    "bert": {"hidden_size": 128, "intermediate_size": 256},
    "gpt2": {"n_embd": 128},
}


def config_of(family: str, changes: dict[str, Any]) -> RunConfig:
    causal = task_of(family) == "causal_lm"
    base: dict[str, Any] = {
        "model": {"path": "in memory", "task": task_of(family), "init": "random"},
        "data": {"max_length": TOKENS, **({"path": "in memory"} if causal else {"task": "mrpc"})},
        "batch": {"global_size": ROWS, "micro_size": 2},
        "run_dir": "unused",
        "device": "cpu",
        "strategy": "local",
    }
    return config_from_dict({**base, **changes})


def hf_config_of(family: str) -> Any:
    return tiny_config(family, num_labels=2, **WIDE.get(family, {}))


def planned(family: str, changes: dict[str, Any], world_size: int) -> tuple[RunConfig, ModelFacts, Plan]:
    config = config_of(family, changes)
    facts = facts_with_adapters(inspect_model(hf_config_of(family), config.model.task), config.adapter)
    world = World("cpu", max(1, world_size), world_size)
    forecast = Forecast(config, hf_config_of(family), facts, world, 2)
    return config, facts, plan_with_memory(config, facts, make_plan(config, facts, world), world, lambda: forecast.meter)


def full_batch(family: str) -> GlobalBatch:
    """Every microbatch of two rows has a full one and a padded one."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[1::2, TOKENS - 3 :] = 0
    input_ids = torch.where(mask == 1, torch.randint(3, VOCAB_SIZE, (ROWS, TOKENS), generator=generator), 0)
    labels = torch.randint(0, 2, (ROWS,), generator=generator)
    if task_of(family) == "causal_lm":
        labels = torch.where(mask == 1, input_ids, -100)
    return GlobalBatch({"input_ids": input_ids, "attention_mask": mask, "labels": labels}, ROWS, count_targets(labels), int(mask.sum()))


class SavedBytes:
    """Bytes that autograd keeps at a time, each storage once and parameters left out; by saved-tensor hooks."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.now = self.most = 0
        self._outside = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._uses: dict[int, int] = {}

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Kept(self, tensor), lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def add(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage().data_ptr()
        if key in self._outside:
            return
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] == 1:
            self.now += tensor.untyped_storage().nbytes()
            self.most = max(self.most, self.now)

    def remove(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage().data_ptr()
        if key in self._outside:
            return
        self._uses[key] -= 1
        if not self._uses[key]:
            self.now -= tensor.untyped_storage().nbytes()


class _Kept:
    def __init__(self, ledger: SavedBytes, tensor: Tensor) -> None:
        self.ledger, self.tensor = ledger, tensor
        ledger.add(tensor)

    def __del__(self) -> None:
        self.ledger.remove(self.tensor)


@dataclass(frozen=True)
class Numbers:
    """One rank's bytes."""

    weights: int
    gradients: int
    optimizer: int
    offloaded: int
    saved: int


def build(family: str, config: RunConfig, facts: ModelFacts, plan: Plan) -> Strategy:
    context = DistContext(0, 1, torch.device("cpu"))
    if dist.is_initialized() and plan.world_size > 1:
        context = make_context(dist.get_rank(), plan.world_size, torch.device("cpu"), plan.pipeline_ranks, timedelta(seconds=60))
    loss_sum: Any = loss_sum_for(config.model.task, 2)
    strategy, _ = build_strategy(config, hf_config_of(family), facts, plan, context, loss_sum, None)
    if plan.zero_stage:
        strategy.update = DeepSpeedUpdate(strategy, config)
    else:
        optimizer = NamedOptimizer(strategy.named_parameters(), config.optimizer, facts.embeddings)
        strategy.update = PlainUpdate(strategy, optimizer, config.train.clip_norm, LossScale.for_precision(config.precision))
    return strategy


def compare(family: str, changes: dict[str, Any]) -> tuple[Numbers, Numbers]:
    """(predicted, measured) of this rank over two updates."""
    world_size = dist.get_world_size() if dist.is_initialized() and changes.get("strategy", "local") != "local" else 1
    config, facts, plan = planned(family, changes, world_size)
    strategy = build(family, config, facts, plan)
    assert plan.memory is not None and plan.memory.activations_known, plan.notes
    card: CardMemory = plan.memory.cards[strategy.context.pipeline_rank]
    update = card.phase("update")
    row = plan.ranks[strategy.context.pipeline_rank]
    predicted = Numbers(update.weight_bytes, update.gradient_bytes, update.optimizer_bytes, row.host_bytes, card.saved_bytes)
    batch = full_batch(family)
    strategy.train_step(batch, 1e-4)
    with SavedBytes(list(strategy.named_parameters().values())) as saved:
        strategy.train_step(batch, 1e-4)
    seen = measure(strategy)
    return predicted, Numbers(seen.weight_bytes, seen.gradient_bytes, seen.optimizer_bytes, seen.offloaded_bytes, saved.most)
