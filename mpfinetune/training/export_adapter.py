"""Exports of an adapter run: the adapter in peft's format, or merged into the base as the original files hold it.

A merge goes block by block: no more than one block of the base is in memory, and it is never the quantised one that is merged into, whose
rounding would change the outputs. The merged files are read back and must give the logits of base and adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpfinetune.config import AdapterConfig, RunConfig
from mpfinetune.errors import CheckpointError, ConfigError
from mpfinetune.models.adapters import base_facts, merge_adapters, write_adapter_files
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.stage import StageModule, StageSpan
from mpfinetune.strategies.build import build_stage
from mpfinetune.training.export_folder import ShardWriter, base_buffers, base_folder, empty_model, new_folder, write_config_files
from mpfinetune.training.prepare import PlannedRun
from mpfinetune.training.tensor_files import read_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SAMPLE_ROWS, _SAMPLE_TOKENS = 2, 16
# Largest difference of a logit, as a share of the largest logit (or of 1): what rounding the merged weights to the precision may cost.
MERGE_TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}


@dataclass(frozen=True)
class Merged:
    """What a merge wrote and how far its outputs are from base and adapter."""

    parameters: int
    difference: float
    tolerance: float

    def in_words(self, precision: str) -> str:
        return (
            f"merged model against base + adapter, both in {precision}: largest difference of a logit {self.difference:.2e} "
            f"(allowed {self.tolerance:.2e})"
        )


def export_adapter(planned: PlannedRun, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, output: Path) -> int:
    """Write adapter_config.json and adapter_model.safetensors, loadable by ``peft.PeftModel.from_pretrained(base, output)``.

    Returns:
        The number of parameters written.

    Raises:
        CheckpointError: the checkpoint lacks a part of the adapter.
    """
    facts = planned.facts
    weights = _checkpoint_weights(planned, checkpoint)
    modules = {_saved_module(facts, name) for name in weights if name not in facts.adapter_names}
    # peft saves a module whole; what of it did not learn is the base's.
    absent = {name for name in facts.parameters if _saved_module(facts, name) in modules and name not in weights} - facts.adapter_names
    if absent:
        for _, stage in _base_blocks(planned, facts, planned.config.adapter):
            weights |= {n: p.detach().float() for n, p in _named(stage, facts).items() if n in absent}
    with new_folder(output) as folder:
        write_adapter_files(folder, facts, planned.config.adapter, planned.config.model.path, weights, modules)
        tokenizer.save_pretrained(folder)
    return sum(tensor.numel() for tensor in weights.values())


def _saved_module(facts: ModelFacts, name: str) -> str:
    """The module that peft saves a base parameter with; of a classification head, the whole, since peft adds it under that name itself."""
    return name.partition(".")[0] if name in facts.classification_head else name.rpartition(".")[0]


def _checkpoint_weights(planned: PlannedRun, checkpoint: Path) -> dict[str, Tensor]:
    weights = read_tensors(checkpoint, "weights")
    facts = planned.facts
    wrong = sorted(facts.adapter_names - set(weights)) + sorted(
        name for name, t in weights.items() if name not in facts.parameters or tuple(t.shape) != facts.parameters[name].shape
    )
    if wrong:
        raise CheckpointError(f"export: {checkpoint} does not hold this run's adapter as it should be: {', '.join(wrong[:5])}")
    return weights


def export_merged(planned: PlannedRun, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, output: Path) -> Merged:
    """Merge the adapter into the base's original weights, in the run's 16 or 32-bit precision, and write a plain Hugging Face folder.

    Raises:
        ConfigError: the run has no adapter.
        CheckpointError: the checkpoint lacks a part of the adapter; or the merged model's logits are not those of base and adapter, in
            which case nothing is published.
    """
    facts, config = planned.facts, planned.config
    if not facts.adapted:
        raise ConfigError("export --merge: adapter.type is none, so there is nothing to merge; leave --merge out")
    weights = _checkpoint_weights(planned, checkpoint)
    with new_folder(output) as folder:
        merged = _write_merged(planned, weights, tokenizer, folder)
        if not merged.difference <= merged.tolerance:
            raise CheckpointError(f"export --merge: {merged.in_words(config.precision)}; nothing was written to {output}")
    return merged


def _write_merged(planned: PlannedRun, weights: dict[str, Tensor], tokenizer: PreTrainedTokenizerFast, folder: Path) -> Merged:
    facts, config = planned.facts, planned.config
    model = empty_model(planned)
    batch = _sample(planned)
    expected: Tensor | None = None
    writer = ShardWriter(model, folder)
    for span, stage in _base_blocks(planned, facts, config.adapter):
        named = _named(stage, facts)
        with torch.no_grad():
            for name, parameter in named.items():
                if name in weights:
                    parameter.copy_(weights[name])
            expected = stage.eval()(*([] if span.has_prologue else [expected]), **batch)
        merge_adapters(stage, facts)
        writer.add({name: parameter.detach() for name, parameter in _named(stage, facts).items()})
    writer.add(base_buffers(planned, model))
    writer.close()
    missing = sorted({facts.canonical_name(name) for name in base_facts(facts).parameters} - set(writer.shapes))
    assert not missing, f"not written: {missing[:5]}"
    write_config_files(planned, model, tokenizer, folder)
    assert expected is not None
    return Merged(base_facts(facts).numel(base_facts(facts).parameters), *_compare(planned, folder, batch, expected))


def _compare(planned: PlannedRun, folder: Path, batch: dict[str, Tensor], expected: Tensor) -> tuple[float, float]:
    """The largest difference between the logits of the written files and ``expected``, and what is allowed."""
    hidden: Tensor | None = None
    with torch.no_grad():
        for span, stage in _base_blocks(planned, base_facts(planned.facts), AdapterConfig(), folder):
            hidden = stage.eval()(*([] if span.has_prologue else [hidden]), **batch)
    assert hidden is not None
    scale = max(1.0, float(expected.float().abs().max()))
    return float((hidden.float() - expected.float()).abs().max()), MERGE_TOLERANCE[planned.config.precision] * scale


def _base_blocks(
    planned: PlannedRun, facts: ModelFacts, adapter: AdapterConfig, folder: Path | None = None
) -> Iterator[tuple[StageSpan, StageModule]]:
    """The unquantised model on the CPU, one block after the other, with what stands before and after them at the ends."""
    config: RunConfig = replace(planned.config, quantize="none", adapter=adapter, recompute="none", trainable=[], frozen=[])
    folder = folder or base_folder(planned)
    for index in range(facts.num_blocks):
        span = StageSpan(index, index + 1, index == 0, index == facts.num_blocks - 1)
        stage, _ = build_stage(config, planned.hf_config, facts, span, torch.device("cpu"), folder)
        yield span, stage


def _named(stage: StageModule, facts: ModelFacts) -> dict[str, torch.nn.Parameter]:
    return {facts.canonical_name(name): parameter for name, parameter in stage.model.named_parameters()}


def _sample(planned: PlannedRun) -> dict[str, Tensor]:
    tokens = min(_SAMPLE_TOKENS, planned.facts.max_positions or _SAMPLE_TOKENS)
    vocabulary = planned.hf_config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (_SAMPLE_ROWS, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
