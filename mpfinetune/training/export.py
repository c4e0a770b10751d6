"""A checkpoint as a plain Hugging Face folder: config, tokenizer, safetensors; loadable by ``from_pretrained`` without this project."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mpfinetune.errors import CheckpointError
from mpfinetune.models.architecture import TORCH_DTYPES
from mpfinetune.models.buffers import persistent_buffers
from mpfinetune.training.export_adapter import export_adapter
from mpfinetune.training.export_folder import ShardWriter, base_buffers, empty_model, new_folder, write_config_files
from mpfinetune.training.prepare import PlannedRun
from mpfinetune.training.tensor_files import read_tensors, tensor_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def export_checkpoint(planned: PlannedRun, checkpoint: Path, tokenizer: PreTrainedTokenizerFast, output: Path) -> int:
    """Write the folder, a block of the weights at a time; tied weights once. Of an adapter run, the adapter (``export_adapter``).

    The folder appears under its name only when it is complete and every tensor's shape has been checked against the model.

    Returns:
        The number of parameters written.

    Raises:
        CheckpointError: the checkpoint does not hold exactly the model's parameters.
    """
    facts = planned.facts
    if facts.adapted:
        return export_adapter(planned, checkpoint, tokenizer, output)
    with new_folder(output) as folder:
        model = empty_model(planned)
        written = _write_weights(planned, model, checkpoint, folder)
        # By the facts, not by the empty model: on the meta device tied weights are two parameters.
        expected = {name: facts.parameters[name].shape for name in map(facts.canonical_name, facts.parameters)}
        expected |= {name: tuple(buffer.shape) for name, buffer in persistent_buffers(model).items()}
        problems = [name for name in expected if written.get(name) != expected[name]] + sorted(tensor_names(checkpoint, "weights") - set(expected))
        if problems:
            raise CheckpointError(f"export: {checkpoint} does not hold the model's parameters as they should be: {', '.join(problems[:5])}")
        write_config_files(planned, model, tokenizer, folder)
    return facts.numel(facts.parameters)


def _write_weights(planned: PlannedRun, model: PreTrainedModel, checkpoint: Path, folder: Path) -> dict[str, tuple[int, ...]]:
    """What is before the blocks, each block, what is after them, then the base's buffers; returns the shapes by the model's names."""
    dtype = TORCH_DTYPES[planned.config.precision]
    facts = planned.facts
    writer = ShardWriter(model, folder)
    blocks = [facts.names_of("block", index) for index in range(facts.num_blocks)]
    for names in (facts.names_of("every_stage"), facts.names_of("prologue"), *blocks, facts.names_of("epilogue")):
        held = read_tensors(checkpoint, "weights", set(map(facts.canonical_name, names)))
        writer.add({name: tensor.to(dtype) for name, tensor in held.items()})
    writer.add(base_buffers(planned, model))
    writer.close()
    return writer.shapes
