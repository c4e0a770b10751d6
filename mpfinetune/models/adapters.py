"""Adapters: LoRA, rsLoRA and DoRA by peft, injected into the linear layers of a stage's own blocks.

The base keeps its Hugging Face names (``ModelFacts.canonical_name`` takes peft's wrapper out of them), so checkpoints, plans and splits
address adapters as they do any other parameter, and the files written are peft's own.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpfinetune.config import AdapterConfig
from mpfinetune.errors import ConfigError, did_you_mean
from mpfinetune.models.facts import ADAPTER_NAME, ModelFacts, ParameterFacts
from mpfinetune.models.load import stream_seed
from mpfinetune.models.stage import StageModule

ALL_LINEAR = "all-linear"
_FILE_PREFIX = "base_model.model."
_TASK_TYPES = {"causal_lm": "CAUSAL_LM", "sequence_classification": "SEQ_CLS"}


def target_layers(facts: ModelFacts, adapter: AdapterConfig) -> tuple[str, ...]:
    """The linear layers that get an adapter, by the names or endings of ``adapter.targets``.

    Raises:
        ConfigError: one that matches nothing, with the names that exist; one that peft would put elsewhere; a model without blocks.
    """
    if facts.refusal or not facts.linears:
        raise ConfigError(
            f"adapter.type: '{adapter.type}' given, but the model ({facts.model_type}) has no linear layers in a chain of blocks to put adapters on"
            + (f": {facts.refusal}" if facts.refusal else "")
        )
    taken_for_experts = {name for name in facts.linears if _is_taken_for_experts(facts.model_type, name.rpartition(".")[2])}
    if adapter.targets == ALL_LINEAR:
        return tuple(name for name in facts.linears if name not in taken_for_experts)
    problems, chosen = [], set()
    for target in map(str, adapter.targets):
        matched = {name for name in facts.linears if name == target or name.endswith(f".{target}")}
        if not matched:
            endings = _endings(facts)
            last_parts = [ending.rpartition(".")[2] for ending in endings]
            problems.append(
                f"adapter.targets: '{target}' is no linear layer of the blocks{did_you_mean(target, [*last_parts, *endings])}; "
                f"this model ({facts.model_type}) has {', '.join(endings)}"
            )
        elif matched & taken_for_experts:
            problems.append(
                f"adapter.targets: '{target}' is a linear layer of this model ({facts.model_type}), but peft takes the name for that of its fused "
                "experts, which get no adapter here; take other layers, or all-linear, which leaves these out"
            )
        chosen |= matched
    if problems:
        raise ConfigError(problems)
    return tuple(name for name in facts.linears if name in chosen)


@cache
def _is_taken_for_experts(model_type: str, leaf: str) -> bool:
    """Whether peft, where transformers 5 has fused a model's experts, takes a layer of this name for the experts' that transformers 4 had."""
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    name = f"layer.{leaf}"
    config = peft.LoraConfig(target_modules=[name])
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type=model_type))  # all that it asks of the model, for a list of names
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of several names that it would fuse
        return True
    return name not in (config.target_modules or ())


def _endings(facts: ModelFacts) -> list[str]:
    """The layers' names inside their block, each once."""
    return list(dict.fromkeys(name[len(facts.blocks_path) + 1 :].partition(".")[2] for name in facts.linears))


def facts_with_adapters(facts: ModelFacts, adapter: AdapterConfig) -> ModelFacts:
    """The facts of the model as it is trained: with the adapters' parameters, by peft's names for its files.

    Raises:
        ConfigError: see ``target_layers``.
    """
    if adapter.type == "none":
        return facts
    layers = target_layers(facts, adapter)
    added: dict[str, ParameterFacts] = {}
    for name in layers:
        linear, block = facts.linears[name], facts.parameters[f"{name}.weight"].block
        added[f"{name}.lora_A.weight"] = ParameterFacts((adapter.rank, linear.in_features), "block", block)
        added[f"{name}.lora_B.weight"] = ParameterFacts((linear.out_features, adapter.rank), "block", block)
        if adapter.type == "dora":
            added[f"{name}.lora_magnitude_vector.weight"] = ParameterFacts((linear.out_features,), "block", block)
    return dataclasses.replace(facts, parameters={**facts.parameters, **added}, adapted=frozenset(layers))


def add_adapters(stage: StageModule, facts: ModelFacts, adapter: AdapterConfig, seed: int) -> None:
    """Put the adapters on a stage whose weights are filled in (DoRA measures them); a stage without a target stays as it is.

    The adapters are in fp32 whatever the base's type, so that small updates are not rounded away. Each is drawn from a random stream
    of its own, whatever the split.
    """
    own = _own_layers(stage, facts)
    if not own:
        return
    inject_adapters(stage.model, facts, adapter, own)
    for name in own:
        layer: Any = stage.model.get_submodule(name)
        weight = layer.lora_A[ADAPTER_NAME].weight
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(seed, name, "lora_A"))
            # peft's own initialisation, drawn on the CPU: the generators of the devices differ.
            drawn = nn.init.kaiming_uniform_(torch.empty(weight.shape), a=math.sqrt(5))
        with torch.no_grad():
            weight.copy_(drawn)


def add_empty_adapters(stage: StageModule, facts: ModelFacts, adapter: AdapterConfig) -> None:
    """The same modules on a stage whose weights are on meta, where the adapters' are then, too."""
    own = _own_layers(stage, facts)
    if own:
        _inject_on_meta(stage.model, facts, adapter, own)


def inject_adapters(model: nn.Module, facts: ModelFacts, adapter: AdapterConfig, layers: list[str]) -> None:
    """Wrap the named layers in peft's, the adapters in fp32."""
    import peft

    peft.inject_adapter_in_model(_lora_config(facts, adapter, layers), model)
    for parameter in _adapter_parameters(model, layers).values():
        parameter.data = parameter.data.float()


def inject_fake_adapters(model: nn.Module, facts: ModelFacts, adapter: AdapterConfig, layers: list[str], fake: FakeTensorMode) -> None:
    """The same for a model of fake tensors, which peft's own cast to the base's type cannot handle: made on meta, then fake in fp32."""
    with warnings.catch_warnings():
        # Stand-ins of quantised layers are plain ones, for which peft puts gpt2's fan_in_fan_out right with a warning.
        warnings.simplefilter("ignore", UserWarning)
        # Outside the mode, where meta is no fake device.
        _inject_on_meta(model, facts, adapter, layers)
    for name, parameter in _adapter_parameters(model, layers).items():
        owner, _, leaf = name.rpartition(".")
        with fake:
            setattr(model.get_submodule(owner), leaf, nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32)))


def _inject_on_meta(model: nn.Module, facts: ModelFacts, adapter: AdapterConfig, layers: list[str]) -> None:
    import peft

    peft.inject_adapter_in_model(_lora_config(facts, adapter, layers), model, low_cpu_mem_usage=True)


def _adapter_parameters(model: nn.Module, layers: list[str]) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    for name in layers:
        layer: Any = model.get_submodule(name)
        for part in layer.adapter_layer_names:
            found |= {f"{name}.{part}.{key}": parameter for key, parameter in getattr(layer, part).named_parameters()}
    return found


def _block(facts: ModelFacts, name: str) -> int:
    block = facts.parameters[f"{name}.weight"].block
    assert block is not None
    return block


def _own_layers(stage: StageModule, facts: ModelFacts) -> list[str]:
    return sorted(name for name in facts.adapted if _is_own(stage, facts, name))


def _is_own(stage: StageModule, facts: ModelFacts, name: str) -> bool:
    return stage.span.start <= _block(facts, name) < stage.span.stop


def _lora_config(facts: ModelFacts, adapter: AdapterConfig, layers: list[str], **more: Any) -> Any:
    import peft

    return peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=layers,
        use_rslora=adapter.type == "rslora",
        use_dora=adapter.type == "dora",
        fan_in_fan_out=any(facts.linears[name].transposed for name in layers),
        **more,
    )


def base_facts(facts: ModelFacts) -> ModelFacts:
    """The facts of the model without its adapters: what ``facts_with_adapters`` was given."""
    added = facts.adapter_names
    return dataclasses.replace(facts, parameters={n: p for n, p in facts.parameters.items() if n not in added}, adapted=frozenset())


def merge_adapters(stage: StageModule, facts: ModelFacts) -> None:
    """Add the adapters to the weights they stand on and take them away; for a base that is not quantised."""
    assert not getattr(stage.model, "is_loaded_in_4bit", False) and not getattr(stage.model, "is_loaded_in_8bit", False)
    for name in facts.adapted:
        if _is_own(stage, facts, name):
            layer: Any = stage.model.get_submodule(name)
            layer.merge()
            stage.model.set_submodule(name, layer.get_base_layer())


def write_adapter_files(
    folder: Path, facts: ModelFacts, adapter: AdapterConfig, base: str, weights: dict[str, Tensor], modules: Iterable[str]
) -> None:
    """adapter_config.json and adapter_model.safetensors, as ``peft.PeftModel.from_pretrained`` reads them.

    Args:
        base: folder or hub id of the base model.
        weights: by canonical name: the adapters' parameters, and those of the ``modules`` that learned whole.
    """
    from safetensors.torch import save_file

    about = {"task_type": _TASK_TYPES[facts.task], "base_model_name_or_path": base, "modules_to_save": sorted(modules) or None}
    config = _lora_config(facts, adapter, sorted(facts.adapted), **about)
    config.inference_mode = True
    config.save_pretrained(folder)
    # peft drops the last part of DoRA's magnitude in files.
    long, short = ".lora_magnitude_vector.weight", ".lora_magnitude_vector"
    stored = {_FILE_PREFIX + name.replace(long, short): tensor.contiguous() for name, tensor in weights.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
