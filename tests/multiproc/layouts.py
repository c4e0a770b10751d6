"""Where tensors can live, as changes of a config: the first axis of the parity matrix, and the other three."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tests.multiproc.training_cases import SUB_BLOCK_MAPS, Problem

SHAPES_OF_BLOCK_KIND = ("llama", "gpt2", "bert")  # untied decoder, tied decoder, encoder
LOCAL: dict[str, Any] = {"strategy": "local", "partition": {}}
OFFLOADED: dict[str, Any] = {"offload": {"optimizer": "cpu"}}
GRADIENTS_OFFLOADED: dict[str, Any] = {"offload": {"optimizer": "cpu", "gradients": "cpu"}}


def zero(stage: int, **offload: str) -> dict[str, Any]:
    return {"strategy": "zero", "partition": {}, "zero": {"stage": stage}, "offload": offload}


def split_for_good(**offload: str) -> dict[str, Any]:
    """ZeRO-3 that keeps no parameter whole between its uses, as it would all of a small model's."""
    return {**zero(3, **offload), "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}}


# Where tensors live: (changes of the config by family or for all, ranks). Multiplied by precision, recompute and family.
WHOLE_BLOCKS: dict[str, dict[str, int]] = {
    "llama": {"": 1, "model.embed_tokens": 0, "model.layers.[01]": 0},
    "gpt2": {"": 1, "transformer.wte": 0, "transformer.wpe": 0, "transformer.h.[01]": 0},
    "bert": {"": 1, "bert.embeddings": 0, "bert.encoder.layer.[01]": 0},
}
LAYOUTS: dict[str, tuple[Callable[[str], dict[str, Any]], int]] = {
    "local": (lambda family: LOCAL, 0),
    "local, map of blocks": (lambda family: {"strategy": "local", "partition": {"device_map": WHOLE_BLOCKS[family]}}, 0),
    "local, map inside blocks": (lambda family: {"strategy": "local", "partition": {"device_map": SUB_BLOCK_MAPS[family]}}, 0),
    "local, Pipe": (lambda family: {"strategy": "local", "partition": {"local_overlap": True}}, 0),
    "pipeline": (lambda family: {}, 2),
    "pipeline, offload": (lambda family: OFFLOADED, 2),
    "pipeline, offload of gradients too": (lambda family: GRADIENTS_OFFLOADED, 2),
    "pipeline x 2 replicas": (lambda family: {}, 4),
    "zero 1": (lambda family: zero(1), 2),
    "zero 2": (lambda family: zero(2), 2),
    "zero 3": (lambda family: zero(3), 2),
    "zero 3, both offloads": (lambda family: zero(3, optimizer="cpu", parameters="cpu"), 2),
}
PRECISIONS, RECOMPUTE = ("fp32", "bf16"), ("none", "full", "offload")
PRODUCT = list(itertools.product(LAYOUTS, PRECISIONS, RECOMPUTE, SHAPES_OF_BLOCK_KIND))


def product_problem(family: str, precision: str) -> Problem:
    """What every cell of the product trains; bert with frozen embeddings."""
    return Problem(family, precision=precision, frozen=("bert.embeddings*",) if family == "bert" else ())
