"""Bytes of weights and optimizer states, parameter by parameter: quantised layers, adapters, 8-bit states, what is frozen."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mpfinetune.config import RunConfig
from mpfinetune.errors import ConfigError
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.quantize import quantised_bytes, quantised_layers
from mpfinetune.models.trainable import trainable_names

EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
SMALLEST_EIGHT_BIT = 4096  # elements; bitsandbytes keeps the states of smaller parameters in 32 bits (min_8bit_size)
TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def learning_names(config: RunConfig, facts: ModelFacts) -> frozenset[str]:
    """Canonical names of what learns.

    Raises:
        ConfigError: see ``trainable_names``; or a quantised weight would learn.
    """
    question = ("learning", *config.trainable, "frozen", *config.frozen, "quantize", config.quantize)
    if question in facts.remembered:
        return facts.remembered[question]
    learning = trainable_names(facts, config.trainable, config.frozen)
    packed = sorted(learning & {f"{name}.weight" for name in quantised_layers(facts, config.quantize)})
    if packed:
        raise ConfigError(
            f"trainable: {', '.join(packed[:3])} would learn, but quantize: {config.quantize} holds it in few bits, where no gradient reaches it; "
            "narrow trainable, or set quantize: none"
        )
    facts.remembered[question] = learning
    return learning


def shared_names(facts: ModelFacts, names: Iterable[str]) -> frozenset[str]:
    """Canonical names of the tied parameters of which ``names``, those that one rank holds, are not all: another rank has a copy."""
    own = set(names)
    return frozenset(tied[0] for tied in facts.tied_names if 0 < len(own.intersection(tied)) < len(tied))


def weight_bytes(config: RunConfig, facts: ModelFacts, names: Iterable[str]) -> int:
    """Bytes of the weights behind canonical names: quantised ones with their statistics, adapters in fp32."""
    layers, adapters = quantised_layers(facts, config.quantize), facts.adapter_names
    total = 0
    for name in names:
        owner, _, leaf = name.rpartition(".")
        if leaf == "weight" and owner in layers:
            total += quantised_bytes(layers[owner], config.quantize)
        else:
            total += facts.parameters[name].numel * (4 if name in adapters else TYPE_BYTES[config.precision])
    return total


def precision_bytes(config: RunConfig, facts: ModelFacts, name: str) -> int:
    """Bytes of one element of a parameter that is not quantised."""
    return 4 if name in facts.adapter_names else TYPE_BYTES[config.precision]


def master_bytes(config: RunConfig, facts: ModelFacts, name: str) -> int:
    """The fp32 copy of a parameter that learns; it is there before the first update."""
    return 4 * facts.parameters[name].numel if precision_bytes(config, facts, name) < 4 else 0


def optimizer_bytes(config: RunConfig, facts: ModelFacts, name: str) -> int:
    """States and, for narrow weights, the fp32 master of one parameter that learns."""
    settings, count = config.optimizer, facts.parameters[name].numel
    if settings.name in EIGHT_BIT:
        states = eight_bit_state_bytes(count, settings.stable_embedding and name in facts.embeddings)
    else:
        states = count * {"adamw": 8, "sgd": 4 if settings.momentum else 0}[settings.name]
    return states + master_bytes(config, facts, name)


def code_table_bytes(config: RunConfig, facts: ModelFacts, names: Iterable[str]) -> int:
    """bitsandbytes' two tables of 256 numbers, which all 8-bit states of a process share."""
    wide = facts.embeddings if config.optimizer.stable_embedding else frozenset()
    eight_bit = config.optimizer.name in EIGHT_BIT and any(facts.parameters[n].numel >= SMALLEST_EIGHT_BIT and n not in wide for n in names)
    return 2 * 4 * 256 if eight_bit else 0


def eight_bit_state_bytes(count: int, wide: bool) -> int:
    """bitsandbytes' two moments of a parameter: a byte each and an fp32 scale for every 256; small and ``wide`` ones stay in fp32."""
    if wide or count < SMALLEST_EIGHT_BIT:
        return 8 * count
    return 2 * count + 2 * 4 * math.ceil(count / 256)
