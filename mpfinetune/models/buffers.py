"""Persistent buffers: values that belong to a model's files without being parameters (the correction biases that route deepseek_v3's experts).

Training does not change them, so checkpoints leave them out: a resumed run, an evaluation and an export read the base's files again. A
buffer that a forward pass changes (a running mean) would have to be in checkpoints; in transformers those are in vision and audio models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that transformers writes into a model's files, by their full names."""
    found: dict[str, Tensor] = {}
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found[f"{owner}.{name}".lstrip(".")] = buffer
    return found


def names_in_model(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """The model's name for each key of its files, as transformers' loader finds it (of experts stored one by one, that of them all)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    # Made anew: they remember what they have matched, and the loader's own must not know of this. Sorted, since some depend on the order.
    mapping: Any = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    own = model.state_dict()
    names: dict[str, str] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, _ = rename_source_key(key, renamings, converters, model.base_model_prefix, own)
        if name not in own and key in own:
            name, _ = rename_source_key(key, [], [], model.base_model_prefix, own)
        names[key] = name
    return names


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """The persistent buffers that ``from_pretrained`` reads in fp32 whatever the type of the weights."""
    plan: Any = model._get_dtype_plan(dtype)
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern, kept in plan.items() if kept == torch.float32]
    return {name for name in persistent_buffers(model) if any(pattern.search(name) for pattern in patterns)}


def stored_buffers(model: PreTrainedModel, files: list[Path]) -> dict[str, Tensor]:
    """The values of the model's persistent buffers: as the files hold them, in the files' types; what no file holds as the model constructs it."""
    from safetensors import safe_open

    found = {name: buffer.detach().clone() for name, buffer in persistent_buffers(model).items()}
    for file in files:
        with safe_open(file, framework="pt", device="cpu", backend="pread") as handle:
            for key, name in names_in_model(model, handle.keys()).items():
                if name in found:
                    found[name] = handle.get_tensor(key)
    return found
