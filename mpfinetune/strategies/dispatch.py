"""Send the inputs of modules to their devices, for maps of `strategy: local`: accelerate's hooks, without its offload.

accelerate's cpu/disk offload gives gradients for a part of the parameters only when training, so only its alignment of inputs and
outputs is used; the weights are read straight to their devices by ``load_stage``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mpfinetune.models.facts import ModelFacts
from mpfinetune.planning.device_map import Placement, transfers


def dispatch(model: nn.Module, facts: ModelFacts, placement: Placement, devices: Sequence[torch.device]) -> None:
    """Attach the hooks; parameters and buffers must be on their devices already.

    Args:
        devices: by number.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for name, transfer in transfers(placement, facts).items():
        # No device while it is attached: the hook would otherwise place the module's tensors anew, each name by itself.
        hook = AlignDevicesHook(execution_device=None, io_same_device=transfer.bring_back)
        add_hook_to_module(model.get_submodule(name), hook)
        hook.execution_device = devices[transfer.device]
