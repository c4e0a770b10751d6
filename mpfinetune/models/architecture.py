"""From a model folder or hub id to an empty Hugging Face model: the configuration, the class for the task, no weights."""

from __future__ import annotations

import copy
import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mpfinetune.config import ModelConfig, ModelTask
from mpfinetune.errors import ConfigError, ModelError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w-]+")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_model_folder(model: ModelConfig, weights: bool) -> Path:
    """The local folder of ``model.path``; a hub id is downloaded to the hub's cache first, weights only where asked.

    Raises:
        ModelError: no such folder, or the hub cannot be reached or does not know the id.
    """
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.path: '{model.path}' has no config.json; it must be the folder of a Hugging Face model")
        return folder
    if folder.exists():
        raise ModelError(f"model.path: '{model.path}' is a file; it must be the folder of a Hugging Face model")
    if not _HUB_ID.fullmatch(model.path) or model.path.startswith("."):
        siblings = [str(folder.parent / entry.name) for entry in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ModelError(f"model.path: no such folder '{model.path}'{did_you_mean(model.path, siblings)}")
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL_FILES, *(_WEIGHT_FILES if weights else ())]
    try:
        return Path(snapshot_download(model.path, allow_patterns=patterns, etag_timeout=5))
    except Exception as error:  # the hub's client raises a dozen kinds; all mean: not to be had
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model.path: '{model.path}' is no local folder, and it cannot be had from the hub: {reason}. "
            "Give the path of a folder with config.json and *.safetensors."
        ) from error


def load_hf_config(model: ModelConfig, num_labels: int | None) -> PretrainedConfig:
    """Read config.json and apply ``model.overrides`` and the head's size.

    Raises:
        ModelError: the folder or its configuration cannot be read, or the architecture is one that cannot be split.
        ConfigError: ``model.overrides`` names keys that the configuration does not have.
    """
    from transformers import AutoConfig

    folder = resolve_model_folder(model, weights=False)
    try:
        config = AutoConfig.from_pretrained(folder)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"model.path: the configuration in '{model.path}' cannot be read: {error}") from error
    unknown = [key for key in model.overrides if not hasattr(config, key)]
    if unknown:
        names = list(config.to_dict())
        raise ConfigError(f"model.overrides.{key}: not a key of this model's config.json{did_you_mean(key, names)}" for key in unknown)
    for key, value in model.overrides.items():
        setattr(config, key, value)
    if model.task == "sequence_classification":
        if num_labels is not None and config.num_labels != num_labels:
            config.num_labels = num_labels
        config.problem_type = "regression" if config.num_labels == 1 else "single_label_classification"
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"model.path: '{model.path}' is an encoder-decoder ({config.model_type}): its decoder reads the encoder's output in every block, "
            "so its blocks are not one chain and cannot be cut into stages. Take an encoder (bert, ...) or a decoder (llama, ...)."
        )
    return config


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer of ``model.tokenizer`` or ``model.path``.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    source = model.tokenizer or model.path
    try:
        folder = resolve_model_folder(ModelConfig(path=source), weights=False)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        return tokenizer
    except (ModelError, ValueError, OSError, KeyError, ImportError) as error:
        raise ModelError(
            f"model.tokenizer: no tokenizer can be loaded from '{source}': {error}. Give its folder or hub id in model.tokenizer."
        ) from error


def auto_class(task: ModelTask) -> Any:
    """The transformers auto class of a task."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if task == "causal_lm" else AutoModelForSequenceClassification


def construct_model(config: PretrainedConfig, task: ModelTask, attention: str, dtype: torch.dtype) -> PreTrainedModel:
    """Build the module tree without drawing a weight; tied parameters are one object.

    Where the parameters live is the caller's choice: under ``FakeTensorMode`` they are fake, under ``parameters_on_meta`` meta (there each
    name is registered anew, so that tied ones become one object only when ``load_stage`` has filled them).

    Raises:
        ModelError: transformers has no model of this architecture for the task, or not with this attention kernel.
    """
    from transformers.initialization import no_init_weights

    kernel = {} if attention == "auto" else {"attn_implementation": attention}
    try:
        with no_init_weights():
            model = auto_class(task).from_config(copy.deepcopy(config), dtype=dtype, **kernel)
    except (ValueError, ImportError) as error:
        raise ModelError(f"model.task: no {task} model can be built from the configuration ({config.model_type}): {error}") from error
    model.tie_weights()
    # The cache is for generation; while training it costs memory and makes blocks return more than hidden states, and with one
    # transformers does not look for packed rows.
    model.config.use_cache = False
    model.train()
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters are registered on the meta device; buffers stay real, as the model's own constructor computes them.

    A buffer that no file holds (rotary tables, masks) is thereby right without any code of ours.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        yield
