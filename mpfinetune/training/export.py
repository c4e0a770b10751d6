"""A checkpoint as a plain Hugging Face folder: config, tokenizer, safetensors; loadable by ``from_pretrained`` without this project."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpfinetune.data.tasks import choose_pad_token
from mpfinetune.errors import CheckpointError, ConfigError
from mpfinetune.models.architecture import TORCH_DTYPES, construct_model, parameters_on_meta, resolve_model_folder
from mpfinetune.training.prepare import PlannedRun

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


def export_checkpoint(planned: PlannedRun, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, output: Path) -> int:
    """Write the folder, one rank's part of the weights at a time; tied weights once.

    The folder appears under its name only when it is complete and every tensor's shape has been checked against the model.

    Returns:
        The number of parameters written.

    Raises:
        CheckpointError: the checkpoint does not hold exactly the model's parameters.
    """
    config = planned.config
    output = output.absolute()
    with parameters_on_meta():
        model = construct_model(planned.hf_config, config.model.task, config.model.attention, TORCH_DTYPES[config.precision])
    unfinished = output.with_name(f"{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _write_folder(planned, model, checkpoint, tokenizer, unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    return planned.facts.numel(planned.facts.parameters)


def _write_folder(planned: PlannedRun, model: Any, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    config, facts = planned.config, planned.facts
    folder.mkdir(parents=True)
    written = _write_weights(model, checkpoint, TORCH_DTYPES[config.precision], folder)
    # By the facts, not by the empty model: on the meta device tied weights are two parameters.
    expected = {name: facts.parameters[name].shape for name in map(facts.canonical_name, facts.parameters)}
    problems = [name for name in expected if written.get(name) != expected[name]] + [name for name in written if name not in expected]
    if problems:
        raise CheckpointError(f"export: {checkpoint} does not hold the model's parameters as they should be: {', '.join(problems[:5])}")
    hf_config = copy.deepcopy(planned.hf_config)  # the run's own copy has the generation cache as it was
    hf_config.architectures = [type(model).__name__]
    hf_config.dtype = TORCH_DTYPES[config.precision]
    _tell_pad_token(planned, hf_config, tokenizer)
    hf_config.save_pretrained(folder)
    if model.can_generate():
        _generation_config(planned).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def check_output(output: Path) -> None:
    """A folder that the user names is not ours to replace.

    Raises:
        ConfigError: it is there and holds something, or is a file.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"--output: '{output}' exists and is not an empty folder; name a new one, or remove it first")


def _tell_pad_token(planned: PlannedRun, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """What padded the rows while training pads them afterwards: a decoder with a classification head needs it for more than one row."""
    pad_token_id = choose_pad_token(tokenizer, lambda text: None)
    if getattr(hf_config, "pad_token_id", None) is None:
        hf_config.pad_token_id = pad_token_id
    # A causal LM's tokenizer stays as it is: collators of other tools would take every EOS that is also the pad token out of the loss.
    if planned.config.model.task == "sequence_classification" and tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token


def _generation_config(planned: PlannedRun) -> GenerationConfig:
    """The base model's own (its stop tokens, its sampling), else what transformers derives from the configuration."""
    from transformers import GenerationConfig

    folder = resolve_model_folder(planned.config.model, weights=False)
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(planned.hf_config)


def _write_weights(model: PreTrainedModel, checkpoint: Path, dtype: torch.dtype, folder: Path) -> dict[str, tuple[int, ...]]:
    """One file per rank's part, with an index where there are several; returns the shapes by the model's parameter names."""
    from safetensors.torch import load_file, save_file
    from transformers.core_model_loading import revert_weight_conversion

    parts = sorted(checkpoint.glob("weights-*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, part in enumerate(parts, start=1):
        tensors: dict[str, Tensor] = {name: tensor.to(dtype) for name, tensor in load_file(part).items()}
        shapes |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        stored: dict[str, Tensor] = {name: t.contiguous() for name, t in revert_weight_conversion(model, tensors).items()}
        file_name = "model.safetensors" if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        save_file(stored, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(stored, file_name)
        total_bytes += sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    if len(parts) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return shapes
