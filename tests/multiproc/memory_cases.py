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
from mpfinetune.models.fake_run import Ledger
from mpfinetune.planning.memory_plan import CardMemory
from mpfinetune.planning.plan import Plan, World, make_plan
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.build import build_strategy
from mpfinetune.training.forecast import Forecast
from mpfinetune.training.loss import loss_sum_for
from mpfinetune.training.memory import measure, plan_with_memory
from mpfinetune.training.optim import attach_update
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


def full_batch(family: str, packed: bool) -> GlobalBatch:
    """Every microbatch of two rows has a full one and a padded one; packed rows hold two each."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[1::2, TOKENS - 3 :] = 0
    input_ids = torch.where(mask == 1, torch.randint(3, VOCAB_SIZE, (ROWS, TOKENS), generator=generator), 0)
    labels = torch.randint(0, 2, (ROWS,), generator=generator)
    if task_of(family) == "causal_lm":
        labels = torch.where(mask == 1, input_ids, -100)
    told_by = {"position_ids": (torch.arange(TOKENS) % (TOKENS // 2)).expand(ROWS, -1)} if packed else {"attention_mask": mask}
    return GlobalBatch({"input_ids": input_ids, **told_by, "labels": labels}, ROWS, count_targets(labels), int(mask.sum()))


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
        # Detached: an operation that keeps its own output would else hold itself for ever where its backward pass is never run (split backward).
        self.ledger, self.tensor = ledger, tensor.detach()
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
    peak: int = 0  # of forward and backward passes, gradients included, weights and states left out; 0: not asked for


def build(family: str, config: RunConfig, facts: ModelFacts, plan: Plan) -> Strategy:
    context = DistContext(0, 1, torch.device("cpu"))
    if dist.is_initialized() and plan.world_size > 1:
        context = make_context(dist.get_rank(), plan.world_size, torch.device("cpu"), plan.pipeline_ranks, timedelta(seconds=60))
    loss_sum: Any = loss_sum_for(config.model.task, 2)
    strategy, _ = build_strategy(config, hf_config_of(family), facts, plan, context, loss_sum, None)
    attach_update(strategy, config)
    return strategy


def compare(family: str, changes: dict[str, Any]) -> tuple[Numbers, Numbers]:
    """(predicted, measured) of this rank over two updates; in one process also the peak of the passes."""
    alone = changes.get("strategy", "local") == "local"
    config, facts, plan = planned(family, changes, 1 if alone else dist.get_world_size())
    strategy = build(family, config, facts, plan)
    assert plan.memory is not None and plan.memory.activations_known, plan.notes
    card: CardMemory = plan.memory.cards[strategy.context.pipeline_rank]
    update, step = card.phase("update"), card.phase("step")
    row = plan.ranks[strategy.context.pipeline_rank]
    passes = step.gradient_bytes + step.activation_bytes + step.workspace_bytes if alone else 0
    predicted = Numbers(update.weight_bytes, update.gradient_bytes, update.optimizer_bytes, row.host_bytes, card.saved_bytes, passes)
    batch = full_batch(family, config.data.packing)
    strategy.train_step(batch, 1e-4)
    with SavedBytes(list(strategy.named_parameters().values())) as saved:
        strategy.train_step(batch, 1e-4)
    seen = measure(strategy)
    peak = peak_of_passes(strategy, batch) if alone else 0
    return predicted, Numbers(seen.weight_bytes, seen.gradient_bytes, seen.optimizer_bytes, seen.offloaded_bytes, saved.most, peak)


def peak_of_passes(strategy: Strategy, batch: GlobalBatch) -> int:
    """Most bytes of real tensors alive at once, beside weights, states and the batch."""
    assert strategy.update is not None
    outside = [*strategy.named_parameters().values(), *dict(strategy.update.state_stream()).values(), *dict(strategy.update.weight_stream()).values()]
    for stage in strategy.stages.values():
        outside += list(stage.buffers())
    for parameter in strategy.named_parameters().values():
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            outside += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    ledger = Ledger((*outside, *batch.tensors.values()))
    with ledger:
        strategy._forward_backward(batch, 1.0)
    return max(ledger.peak_bytes.values())


LORA: dict[str, Any] = {"adapter": {"type": "lora", "rank": 8}}
ONE_PROCESS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gpt2": ("gpt2", {}),
    "bert": ("bert", {}),
    "one row": ("llama", {"batch": {"global_size": 8, "micro_size": 1}}),
    "one microbatch": ("gpt2", {"batch": {"global_size": 8, "micro_size": 8}}),
    "bf16": ("llama", {"precision": "bf16"}),
    "recompute full": ("llama", {"recompute": "full"}),
    "recompute every_2": ("gpt2", {"recompute": "every_2"}),
    "recompute blocks": ("bert", {"recompute": [0, "2-3"]}),
    "lora": ("llama", LORA),
    "dora, bf16": ("llama", {"adapter": {"type": "dora", "rank": 8}, "precision": "bf16"}),
    "lora on nf4, bf16": ("llama", {**LORA, "quantize": "nf4", "precision": "bf16"}),
    "lora on int8": ("gpt2", {**LORA, "quantize": "int8"}),
    "frozen embeddings": ("bert", {"frozen": ["embed"]}),
    "last block and head": ("gpt2", {"trainable": ["last_1_block", "head"]}),
    "adamw_8bit": ("llama", {"optimizer": {"name": "adamw_8bit"}}),
    "sgd with momentum": ("gpt2", {"optimizer": {"name": "sgd", "momentum": 0.9}}),
    "experts": ("mixtral", {}),
    "packed rows": ("llama", {"data": {"path": "in memory", "max_length": TOKENS, "packing": True}}),
}
_TWO: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 2}}
_FOUR: dict[str, Any] = {"strategy": "pipeline", "partition": {"rule": "uniform", "num_stages": 4}}
TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "1f1b": ("llama", _TWO),
    "1f1b, tied": ("gpt2", _TWO),
    "gpipe": ("bert", {**_TWO, "schedule": "gpipe"}),
    "1f1b, recompute": ("bert", {**_TWO, "recompute": "full"}),
    "interleaved_1f1b": ("llama", {**_FOUR, "schedule": "interleaved_1f1b"}),
    "interleaved_zero_bubble": ("gpt2", {**_FOUR, "schedule": "interleaved_zero_bubble"}),
    "zbv": ("llama", {**_FOUR, "schedule": "zbv"}),
    "1f1b, lora on nf4, bf16": ("llama", {**_TWO, **LORA, "quantize": "nf4", "precision": "bf16"}),
    "1f1b, adamw_8bit": ("gpt2", {**_TWO, "optimizer": {"name": "adamw_8bit"}}),
    "1f1b, offload": ("llama", {**_TWO, "offload": {"optimizer": "cpu"}}),
    "1f1b, offload of gradients too": ("gpt2", {**_TWO, "offload": {"optimizer": "cpu", "gradients": "cpu"}}),
    "1f1b, offload, bf16": ("gpt2", {**_TWO, "offload": {"optimizer": "cpu"}, "precision": "bf16"}),
    "zero 2, offload, lora on nf4, bf16": (
        "llama",
        {"strategy": "zero", "offload": {"optimizer": "cpu"}, **LORA, "quantize": "nf4", "precision": "bf16"},
    ),
    "zero 3, offload, lora, bf16": ("gpt2", {"strategy": "zero", "zero": {"stage": 3}, "offload": {"optimizer": "cpu"}, **LORA, "precision": "bf16"}),
}


def table_row(name: str, rank: int, family: str, predicted: Numbers, measured: Numbers) -> str:
    """One line of docs/benchmarks' table, in bytes."""

    def error(mine: int, seen: int) -> str:
        return f"{seen:,} | {(mine - seen) / seen:+.1%}" if seen else "- | -"

    exact = ("weights", "gradients", "optimizer", "offloaded")
    counted = " | ".join(
        f"{getattr(measured, key):,}" + ("" if getattr(predicted, key) == getattr(measured, key) else " (predicted otherwise)") for key in exact
    )
    return f"| {name} | {family} | {rank} | {counted} | {error(predicted.saved, measured.saved)} | {error(predicted.peak, measured.peak)} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, (family, changes) in ONE_PROCESS.items():
        print(table_row(name, 0, family, *compare(family, changes)), flush=True)
