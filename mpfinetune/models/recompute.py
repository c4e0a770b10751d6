"""Activation checkpointing: a block keeps only its input and runs its forward again in the backward pass.

``full`` and ``every_N`` use torch's non-reentrant checkpoint: right with frozen inputs, with dropout (the random state is put back), with
autocast and with the zero-bubble schedules' split backward. ``offload`` keeps the blocks' inputs on the CPU, by fairscale's
``checkpoint_wrapper``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpfinetune.errors import ConfigError
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.stage import StageModule

_EVERY = re.compile(r"every_(\d+)")
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def recomputed_blocks(policy: Any, num_blocks: int) -> frozenset[int]:
    """The blocks whose activations are not kept.

    Raises:
        ConfigError: a block that the model does not have.
    """
    if policy == "none":
        return frozenset()
    if policy in ("full", "offload"):
        return frozenset(range(num_blocks))
    if isinstance(policy, str):
        matched = _EVERY.fullmatch(policy)
        assert matched is not None
        return frozenset(range(0, num_blocks, int(matched[1])))
    blocks: set[int] = set()
    for item in policy:
        matched = _RANGE.fullmatch(str(item))
        assert matched is not None
        first, last = int(matched[1]), int(matched[2] or matched[1])
        if first > last or last >= num_blocks:
            raise ConfigError(f"recompute: '{item}' given, must be blocks within 0-{num_blocks - 1}, the lower one first")
        blocks.update(range(first, last + 1))
    return frozenset(blocks)


def apply_recompute(stage: StageModule, facts: ModelFacts, policy: Any) -> None:
    """Wrap the forward of the stage's own blocks; parameters keep their names.

    Raises:
        ConfigError: a block that the model does not have.
    """
    for index in sorted(recomputed_blocks(policy, facts.num_blocks)):
        if stage.span.start <= index < stage.span.stop:
            block = stage.model.get_submodule(facts.block_name(index))
            if policy == "offload":
                _offload(block)
            else:
                # set on the instance: the class's forward, and with it the names in the state, stay as they are
                block.forward = _recomputed(block.forward)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def _offload(block: nn.Module) -> None:
    from fairscale.nn.checkpoint import checkpoint_wrapper

    checkpoint_wrapper(block, offload_to_cpu=True)
