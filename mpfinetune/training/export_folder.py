"""The parts of any exported folder: complete or not there, weights in files with an index, config and tokenizer as the base had them."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mpfinetune.data.tasks import choose_pad_token
from mpfinetune.errors import ConfigError
from mpfinetune.models.architecture import TORCH_DTYPES, construct_model, parameters_on_meta, resolve_model_folder
from mpfinetune.models.buffers import persistent_buffers, stored_buffers
from mpfinetune.models.load import weight_files
from mpfinetune.training.prepare import PlannedRun

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_FILE_BYTES = 2**30


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """A folder beside the wanted one, which takes its name (and replaces it) when the body is done, and vanishes when it fails."""
    output = output.absolute()
    unfinished = output.with_name(f"{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)


def check_output(output: Path) -> None:
    """A folder that the user names is not ours to replace.

    Raises:
        ConfigError: it is there and holds something, or is a file.
    """
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ConfigError(f"--output: '{output}' exists and is not an empty folder; name a new one, or remove it first")


def empty_model(planned: PlannedRun) -> PreTrainedModel:
    """The model's class without weights."""
    config = planned.config
    with parameters_on_meta():
        return construct_model(planned.hf_config, config.model.task, config.model.attention, TORCH_DTYPES[config.precision])


def base_folder(planned: PlannedRun) -> Path | None:
    """The folder of the weights that the run began with; None where they were drawn."""
    return resolve_model_folder(planned.config.model, weights=True) if planned.config.model.init == "pretrained" else None


def base_buffers(planned: PlannedRun, model: PreTrainedModel) -> dict[str, Tensor]:
    """What the exported files hold besides parameters: it does not learn, so it is the base's, in the type of the base's files.

    Raises:
        ModelError: the base's files are gone or broken.
    """
    folder = base_folder(planned) if persistent_buffers(model) else None
    return stored_buffers(model, weight_files(folder) if folder is not None else [])


def write_config_files(planned: PlannedRun, model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """config.json, generation_config.json where the model generates, the tokenizer's files."""
    hf_config = copy.deepcopy(planned.hf_config)  # the run's own copy has the generation cache as it was
    hf_config.architectures = [type(model).__name__]
    hf_config.dtype = TORCH_DTYPES[planned.config.precision]
    _tell_pad_token(planned, hf_config, tokenizer)
    hf_config.save_pretrained(folder)
    if model.can_generate():
        _generation_config(planned).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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


class ShardWriter:
    """Writes tensors in safetensors files of about a GiB, by the names that the model's own files use, with an index where there are several."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}  # of what was added, by the model's names
        self._pending: dict[str, Tensor] = {}
        self._files: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Tensors by canonical name, of whole blocks: what the files hold apart is one tensor here. Of a name that comes again the first counts."""
        fresh = {name: tensor for name, tensor in tensors.items() if name not in self.shapes}
        self.shapes |= {name: tuple(tensor.shape) for name, tensor in fresh.items()}
        self._pending |= fresh
        if sum(tensor.nbytes for tensor in self._pending.values()) >= _FILE_BYTES:
            self._flush()

    def close(self) -> None:
        """Write what is left, give the files their names and add the index."""
        if self._pending:
            self._flush()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._files, start=1):
            name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self.folder / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        from safetensors.torch import save_file
        from transformers.core_model_loading import revert_weight_conversion

        stored = {name: tensor.contiguous() for name, tensor in revert_weight_conversion(self.model, self._pending).items()}
        path = self.folder / f"part-{len(self._files)}"
        save_file(stored, path, metadata={"format": "pt"})
        self._files.append((path, list(stored)))
        self._total_bytes += sum(tensor.nbytes for tensor in stored.values())
        self._pending = {}
