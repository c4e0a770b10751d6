"""Forward passes with every weight in full precision, however the run holds it: they show what rounding does to the loss.

A rank walks through its stages a part at a time: a block (or what stands before or after them), or up to 256 MiB of blocks. The part is
read from the model's files in fp32, takes the run's masters and adapters, and every microbatch passes it before the next part is read. So
a rank holds, beside what it trains with, one part in fp32 on its device and, in host memory, the hidden states of at most 256 MiB of rows
(or of one global batch, if that is more); the files are read once for each such group of rows. It is the same walk under every
strategy, one rank after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from mpfinetune.config import RunConfig
from mpfinetune.data.batches import GlobalBatch
from mpfinetune.models.quantize import quantised_layers
from mpfinetune.models.stage import StageModule, StageSpan, part_spans
from mpfinetune.strategies.base import Observer, Strategy
from mpfinetune.strategies.build import build_stage

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_PART_BYTES = 256 * 2**20
_HIDDEN_BYTES = 256 * 2**20
_FP32_BYTES = 4


class FullPrecisionForward:
    """The forward passes of a strategy's model in fp32, without autocast; the strategy and what it trains with are left as they are."""

    def __init__(self, strategy: Strategy, config: RunConfig, hf_config: PretrainedConfig, folder: Path | None) -> None:
        """``folder`` holds the original weights; None: they are drawn from the seed again, in fp32."""
        self.strategy = strategy
        self.hf_config = hf_config
        self.folder = folder
        self.config = replace(config, precision="fp32", quantize="none", recompute="none", trainable=[], frozen=[])
        self._quantised = {f"{layer}.weight" for layer in quantised_layers(strategy.facts, config.quantize)}
        plan = strategy.plan
        self._owners = {stage: rank for rank in range(plan.pipeline_ranks) for stage in plan.stages_of(rank)}

    @torch.no_grad()
    def __call__(self, batches: Iterable[GlobalBatch], observe: Observer) -> None:
        """``observe`` sees each microbatch's (logits, labels) on the rank that holds the model's end; collective over all ranks."""
        with torch.random.fork_rng(devices=[]):  # peft draws adapters before they take their values
            for group in self._groups(batches):
                self._walk([pair for batch in group for pair in self.strategy.own_microbatches(batch)], observe)

    def _groups(self, batches: Iterable[GlobalBatch]) -> Iterator[list[GlobalBatch]]:
        group: list[GlobalBatch] = []
        held = 0
        for batch in batches:
            rows = self.strategy.plan.padded_rows(batch.row_count) // self.strategy.context.replicas
            size = rows * batch.tensors["input_ids"].shape[1] * self.strategy.facts.hidden_size * _FP32_BYTES
            if group and held + size > _HIDDEN_BYTES:
                yield group
                group, held = [], 0
            group.append(batch)
            held += size
        if group:
            yield group

    def _walk(self, microbatches: list[tuple[dict[str, Tensor], Tensor]], observe: Observer) -> None:
        """All stages in order, each on its rank; every rank sees the same order, so that sends and receives meet."""
        context, plan = self.strategy.context, self.strategy.plan
        hidden: list[Tensor | None] = [None] * len(microbatches)
        for stage, span in enumerate(plan.spans):
            before, owner = self._owners.get(stage - 1), self._owners[stage]
            if before not in (None, owner) and context.pipeline_rank in (before, owner):
                self._hand_on(hidden, microbatches, before, owner)
            if owner == context.pipeline_rank:
                for part in part_spans(self.strategy.facts, span, _FP32_BYTES, _PART_BYTES):
                    self._pass(part, hidden, microbatches, observe)

    def _pass(self, span: StageSpan, hidden: list[Tensor | None], microbatches: list[tuple[dict[str, Tensor], Tensor]], observe: Observer) -> None:
        """Every microbatch through one part; the hidden states are replaced in place."""
        module = self._part(span)
        for index, (inputs, labels) in enumerate(microbatches):
            entering = hidden[index]
            output = module(None if entering is None else entering.to(self.strategy.context.device), **inputs)
            if span.has_epilogue:
                observe(output, labels)
            else:
                hidden[index] = output.cpu()

    def _part(self, span: StageSpan) -> StageModule:
        strategy = self.strategy
        facts, update, live = strategy.facts, strategy.update, strategy.named_parameters()
        assert update is not None
        module, _ = build_stage(self.config, self.hf_config, facts, span, strategy.context.device, self.folder)
        own = {facts.canonical_name(name): parameter for name, parameter in module.model.named_parameters()}
        for name, current in update.full_weights([name for name in own if name not in self._quantised]):
            # A frozen weight is what the files hold, unless the run went on from a checkpoint in which it had learnt.
            unchanged = not live[name].requires_grad and torch.equal(own[name].to(live[name].dtype).float(), current.to(own[name].device))
            if not unchanged:
                own[name].copy_(current)
        return module.eval()

    def _hand_on(self, hidden: list[Tensor | None], microbatches: list[tuple[dict[str, Tensor], Tensor]], source: int | None, target: int) -> None:
        """The hidden states [B, T, D] of all microbatches from one pipeline rank to another of the same replica."""
        context = self.strategy.context
        assert source is not None
        device = context.device if dist.get_backend(context.pipeline_group) == "nccl" else torch.device("cpu")
        for index, (inputs, _) in enumerate(microbatches):
            leaving = hidden[index]
            if context.pipeline_rank == source:
                assert leaving is not None
                dist.send(leaving.to(device).contiguous(), context.global_rank(target, context.replica), group=context.pipeline_group)
                hidden[index] = None
            else:
                received = torch.empty(*inputs["input_ids"].shape, self.strategy.facts.hidden_size, device=device)
                dist.recv(received, context.global_rank(source, context.replica), group=context.pipeline_group)
                hidden[index] = received.cpu()
