"""Fill a stage's empty parameters: read only its own tensors, draw only what no file holds.

Renaming and fusing of checkpoint tensors (experts stored one by one, a base model's names without their prefix) is transformers' own
conversion, run over lazy slices, so a tensor of another stage is never read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mpfinetune.errors import ModelError
from mpfinetune.models.buffers import kept_in_fp32, names_in_model
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.quantize import TensorQuantizer, return_freed_memory
from mpfinetune.models.stage import StageModule

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The device of a parameter or buffer, by its full name in the model.
DeviceOf = Callable[[str], torch.device]
_PIECE_BYTES = 2**18  # small enough that the allocator reuses the place of the last piece


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, single or listed in an index.

    Raises:
        ModelError: there are none (pickled ``.bin`` files are refused with advice), or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"model.path: {index} is not a valid index of safetensors files: {error}") from error
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelError(f"model.path: {index} names files that are not there: {', '.join(missing)}")
    if files:
        return files
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")):
        raise ModelError(
            f"model.path: '{folder}' holds pickled weights (.bin) only; they cannot be read tensor by tensor and can run code. Convert them once: "
            "load the model with transformers' from_pretrained and write it with save_pretrained, which makes model.safetensors."
        )
    raise ModelError(f"model.path: '{folder}' holds no *.safetensors; for a model with random weights set model.init: random")


def load_stage(
    stage: StageModule, facts: ModelFacts, folder: Path | None, device: torch.device | DeviceOf, seed: int, quantizer: TensorQuantizer | None = None
) -> list[str]:
    """Give every parameter of the stage its value on its device.

    Args:
        stage: parameters on meta, buffers real.
        folder: the model's folder, or None to draw every weight.
        device: one for all, or a function from a parameter's or buffer's name to its device; tied names must have the same.
        seed: draws what no file holds; module by module, so that the values do not depend on the split. A tied parameter that another
            stage holds under another name is the exception: the strategy copies it from its first holder before the first step.
        quantizer: takes the weights of ``replace_linears``, one at a time, so that the stage never lies in memory unquantised.

    Returns:
        The names that were drawn (a new head, or everything).

    Raises:
        ModelError: a file is broken, or a tensor in it has another shape than the model's.
    """
    model: Any = stage.model
    device_of: DeviceOf = (lambda name: device) if isinstance(device, torch.device) else device
    missing = {name for name, _ in model.named_parameters()}
    if folder is not None:
        missing = _read_own_tensors(model, facts, folder, device_of, quantizer)
    _move_buffers(model, device_of)
    drawn = sorted(missing - _tied_aliases(model, facts))
    _draw_parameters(model, set(drawn), device_of, seed, quantizer)
    _tie(model, facts)
    if quantizer is not None:
        return_freed_memory()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"parameters without a value: {left[:5]}"
    return drawn


def _read_own_tensors(model: PreTrainedModel, facts: ModelFacts, folder: Path, device_of: DeviceOf, quantizer: TensorQuantizer | None) -> set[str]:
    """Read what the files hold of the model's parameters; returns the names that they do not hold."""
    from safetensors import SafetensorError, safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    slices: dict[str, Any] = {}
    dtype = quantizer.dtype if quantizer is not None else next(model.parameters()).dtype
    try:
        for file in weight_files(folder):
            # pread, not mmap: pages of a mapped file would count as this rank's memory beside the parameters themselves.
            handle = safe_open(file, framework="pt", device="cpu", backend="pread")
            slices.update({name: _FileTensor(handle, name, dtype) for name in handle.keys()})  # noqa: SIM118 (not a dict)
        fp32 = kept_in_fp32(model, dtype)
        _keep_types(model, slices, dtype, fp32, quantizer)
        conversions: Any = get_model_conversion_mapping(model)
        # Ours answers what the loader asks of transformers' own quantizers.
        hf_quantizer: Any = quantizer
        wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        # "" first: it stands for tensors of the files that the stage does not have.
        devices: Any = {"": device_of(""), **{name: device_of(name) for name in wanted}}
        dtypes = {f"^{re.escape(name)}$": torch.float32 for name in fp32}
        load_config = LoadStateDictConfig(device_map=devices, dtype=dtype, dtype_plan=dtypes, weight_mapping=conversions, hf_quantizer=hf_quantizer)
        aliases = _tied_aliases(model, facts)
        read = {name: part for name, part in _with_tied_copies(model, facts, slices).items() if name not in aliases}
        with _one_tensor_at_a_time():
            info, _ = convert_and_load_state_dict_in_model(model, read, load_config)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"model.path: a weight file in '{folder}' cannot be read: {error}") from error
    if info.mismatched_keys or info.conversion_errors or info.error_msgs:
        details = [str(item) for item in [*info.mismatched_keys, *info.conversion_errors.values(), *info.error_msgs]]
        raise ModelError(f"model.path: tensors in '{folder}' do not fit the model: " + "; ".join(details[:5]))
    return wanted & set(info.missing_keys)


def _keep_types(model: nn.Module, slices: dict[str, Any], dtype: torch.dtype, fp32: set[str], quantizer: TensorQuantizer | None) -> None:
    """What the model holds in another type than its weights' is read in the file's: rounded on the way it could not be made right again."""
    other = fp32 | {name for name, value in model.state_dict().items() if isinstance(value, Tensor) and value.dtype != dtype}
    other = {name for name in other if quantizer is None or not quantizer.takes(name)}
    if other:
        whole_model: Any = model
        for key, name in names_in_model(whole_model, slices).items():
            if name in other:
                slices[key].dtype = None


class _FileTensor:
    """A tensor in a file, read when it is indexed: in pieces that take the model's type (None: keep the file's) on the way.

    safetensors' own slice holds the bytes a second time while it makes a tensor of them, which for an embedding is many.
    """

    def __init__(self, handle: Any, name: str, dtype: torch.dtype | None) -> None:
        self._handle, self._name, self.dtype = handle, name, dtype

    def __getitem__(self, index: Any) -> Tensor:
        part = self._handle.get_slice(self._name)
        shape = part.get_shape()
        if index is not Ellipsis or not shape or 0 in shape:
            return part[index]
        first = part[0:1]
        if not first.is_floating_point():
            return part[index]
        whole = torch.empty(shape, dtype=self.dtype or first.dtype)
        rows = max(1, _PIECE_BYTES // first.nbytes)
        for start in range(0, shape[0], rows):
            whole[start : start + rows] = part[start : min(start + rows, shape[0])]
        return whole


def _with_tied_copies(model: PreTrainedModel, facts: ModelFacts, slices: dict[str, Any]) -> dict[str, Any]:
    """A stage may hold a tied parameter under a name that the files leave out; give it the tensor stored under the other name."""
    prefix = f"{model.base_model_prefix}."
    copies = {}
    for held, names in zip(_held_tied_names(model, facts), facts.tied_names, strict=True):
        stored = next((key for name in names for key in (name, name.removeprefix(prefix)) if key in slices), None)
        if held and stored is not None and held[0] not in slices and held[0].removeprefix(prefix) not in slices:
            copies[held[0]] = slices[stored]
    return {**slices, **copies}


def _held_tied_names(model: nn.Module, facts: ModelFacts) -> list[list[str]]:
    """Of each group of tied names, those that this stage has."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [[name for name in names if name in own] for names in facts.tied_names]


def _tied_aliases(model: nn.Module, facts: ModelFacts) -> set[str]:
    """Further names of a parameter that the stage holds already; filled by ``_tie``, never read or drawn: that would be a second copy."""
    return {name for held in _held_tied_names(model, facts) for name in held[1:]}


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """transformers reads ahead in threads, which would hold the whole stage twice while it is converted."""
    variable = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    from transformers.utils import logging

    bar_was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bar_was_on:
            logging.enable_progress_bar()
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _move_buffers(model: nn.Module, device_of: DeviceOf) -> None:
    for owner, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set
            module.register_buffer(name, buffer.to(device_of(f"{owner}.{name}".lstrip("."))), persistent=persistent)


def _draw_parameters(model: PreTrainedModel, names: set[str], device_of: DeviceOf, seed: int, quantizer: TensorQuantizer | None) -> None:
    """Initialise as transformers does, with a random stream of its own for each module: independent of what else the stage holds.

    Drawn in fp32 and rounded: torch's generator gives other numbers for another type, and a run's precision must not choose its start.
    """
    owners = sorted({name.rpartition(".")[0] for name in names})
    for owner in owners:
        module = model.get_submodule(owner)
        dtypes = {name: parameter.dtype for name, parameter in module.named_parameters(recurse=False)}
        for name, parameter in list(module.named_parameters(recurse=False)):
            if f"{owner}.{name}".lstrip(".") in names:
                # Drawn on the CPU: the generators of the devices differ.
                setattr(module, name, _empty(f"{owner}.{name}", parameter, quantizer))
            else:
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, owner))
            with torch.no_grad():
                model._init_weights(module)
        for name, parameter in list(module.named_parameters(recurse=False)):
            device = device_of(f"{owner}.{name}".lstrip("."))
            if quantizer is not None and quantizer.takes(f"{owner}.{name}") and f"{owner}.{name}" in names:
                setattr(module, name, quantizer.quantise(f"{owner}.{name}", parameter, device))
            elif not parameter.is_meta and (parameter.device, parameter.dtype) != (device, dtypes[name]):  # meta: a tied name's, filled by _tie
                setattr(module, name, nn.Parameter(parameter.to(device, dtypes[name]), requires_grad=parameter.requires_grad))


def _empty(name: str, parameter: nn.Parameter, quantizer: TensorQuantizer | None) -> nn.Parameter:
    """Room on the CPU for the weight as the unquantised fp32 model has it, so that the same values are drawn."""
    if quantizer is None or not quantizer.takes(name):
        return nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32), requires_grad=parameter.requires_grad)
    shape = parameter.shape[::-1] if quantizer.layers[name.rpartition(".")[0]].transposed else parameter.shape
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)


def stream_seed(*parts: object) -> int:
    """A 63-bit seed that is a function of the parts alone, the same on every rank and machine."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _tie(model: nn.Module, facts: ModelFacts) -> None:
    """Tied names that meet on one stage are one parameter again."""
    for held in _held_tied_names(model, facts):
        for name in held[1:]:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, model.get_parameter(held[0]))
