"""AdamW, also with 8-bit states, and SGD over named parameters, with fp32 master weights where the weights themselves are narrower.

A new optimizer is one builder and one row in ``BUILDERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from mpfinetune.config import OptimizerConfig, RunConfig
from mpfinetune.errors import CheckpointError
from mpfinetune.models.trainable import decays
from mpfinetune.planning.tensor_bytes import EIGHT_BIT, SMALLEST_EIGHT_BIT
from mpfinetune.strategies.base import Strategy
from mpfinetune.strategies.deepspeed_engine import DeepSpeedUpdate
from mpfinetune.strategies.update import LossScale, PlainUpdate, Update


def _adamw(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(settings.betas[0], settings.betas[1]), eps=settings.eps)


def _sgd(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)


def _adamw_8bit(groups: list[dict[str, Any]], settings: OptimizerConfig, paged: bool = False) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW; the tensors in a group's ``wide`` keep 32-bit states.

    Not by its StableEmbedding module, whose layer norm after the table changes the model's numbers and what is exported; and not by its
    GlobalOptimManager, which is one per process and knows parameters by place and id: a second optimizer would inherit the overrides.
    """
    import bitsandbytes as bnb

    kind = bnb.optim.PagedAdamW8bit if paged else bnb.optim.AdamW8bit
    wide = {id(parameter) for group in groups for parameter in group.pop("wide", ())}
    optimizer: Any = kind(groups, lr=settings.lr, betas=(settings.betas[0], settings.betas[1]), eps=settings.eps)
    own_config = optimizer.get_config

    def get_config(group_index: int, index: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = own_config(group_index, index, group)
        return {**config, "optim_bits": 32} if id(group["params"][index]) in wide else config

    optimizer.get_config = get_config
    built: torch.optim.Optimizer = optimizer
    return built


def _paged_adamw_8bit(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    return _adamw_8bit(groups, settings, paged=True)


BUILDERS: dict[str, Callable[[list[dict[str, Any]], OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "adamw_8bit": _adamw_8bit,
    "paged_adamw_8bit": _paged_adamw_8bit,
}
# States that are numbers in bitsandbytes' optimizers and tensors in torch's; a checkpoint holds tensors.
_STEP = "step"


class NamedOptimizer:
    """torch's or bitsandbytes' optimizer over this rank's parameters, its state addressed by parameter name."""

    def __init__(self, named_parameters: dict[str, nn.Parameter], settings: OptimizerConfig, embeddings: Collection[str] = ()) -> None:
        """``embeddings`` names the embedding tables, which ``settings.stable_embedding`` gives 32-bit states."""
        self.parameters = {name: parameter for name, parameter in named_parameters.items() if parameter.requires_grad}
        self.masters = {name: self._master(parameter) for name, parameter in self.parameters.items()}
        self.eight_bit = settings.name in EIGHT_BIT
        self.wide = frozenset(name for name in self.masters if name in embeddings) if settings.stable_embedding else frozenset()
        groups = [
            {"params": [self.masters[name] for name, p in self.parameters.items() if decays(name, p.shape) is decayed], "weight_decay": decay}
            for decayed, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        if self.eight_bit:
            groups[0]["wide"] = [self.masters[name] for name in self.wide]
        groups = [group for group in groups if group["params"]]
        # A stage may have nothing to learn (adapters elsewhere); torch refuses an optimizer without parameters.
        self.optimizer = BUILDERS[settings.name](groups, settings) if groups else None
        self._states_are_checked = False

    @staticmethod
    def _master(parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32:
            return parameter
        # Sums of many microbatches in bf16 would lose what is smaller than 1/256 of the sum.
        parameter.grad_dtype = torch.float32
        return parameter.detach().float().requires_grad_()

    @torch.no_grad()
    def step(self, lr: float, gradient_factor: float) -> None:
        """One update with the gradients multiplied by ``gradient_factor`` (clipping)."""
        if self.optimizer is None:
            return
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        if gradient_factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, gradient_factor)
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.grad = self.parameters[name].grad
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._copy_masters_back(self.masters.keys())
        if self.eight_bit and not self._states_are_checked:
            self._check_state_types()
            self._states_are_checked = True

    def _check_state_types(self) -> None:
        """bitsandbytes decides the states' types by itself; that it did as asked is seen after the first step."""
        for name in self.masters:
            for key, value in self._states(name).items():
                wanted = self._wanted_type(name)
                assert key not in ("state1", "state2") or value.dtype == wanted, f"{name}: {key} is {value.dtype}, wanted {wanted}"

    def _wanted_type(self, name: str) -> torch.dtype:
        return torch.float32 if name in self.wide or self.masters[name].numel() < SMALLEST_EIGHT_BIT else torch.uint8

    def zero_grad(self) -> None:
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def held_bytes(self) -> int:
        """Bytes of the states and of the masters that are no parameters; bitsandbytes' code tables once, step counters left out."""
        tensors = [master for name, master in self.masters.items() if master is not self.parameters[name]]
        for master in self.masters.values():
            states = {} if self.optimizer is None else self.optimizer.state.get(master, {})
            tensors += [value for value in states.values() if isinstance(value, Tensor) and value.ndim > 0]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    @torch.no_grad()
    def _copy_masters_back(self, names: Collection[str]) -> None:
        narrow = [name for name, master in self.masters.items() if name in names and master is not self.parameters[name]]
        if narrow:
            torch._foreach_copy_([self.parameters[name] for name in narrow], [self.masters[name] for name in narrow])

    def state_tensors(self) -> dict[str, Tensor]:
        """``name/state`` to tensor, for example ``model.norm.weight/exp_avg``; the live tensors, not copies.

        8-bit moments stay bytes (``state1``, ``state2``), beside their scales (``absmax1``) and code tables (``qmap1``).
        """
        return {f"{name}/{key}": value for name in self.masters for key, value in self._states(name).items()}

    def _states(self, name: str) -> dict[str, Tensor]:
        states = {} if self.optimizer is None else self.optimizer.state.get(self.masters[name], {})
        found: dict[str, Tensor] = {}
        for key, value in states.items():
            if isinstance(value, Tensor):
                # All parameters share one code table, which a file of tensors cannot say.
                found[key] = value.clone() if key.startswith("qmap") else value
            elif key == _STEP:
                found[key] = torch.tensor(value, dtype=torch.int64)
        return found

    def weight_tensors(self) -> dict[str, Tensor]:
        """The weights in full precision: the masters where there are any."""
        return {name: master.detach() for name, master in self.masters.items()}

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        """Put back what ``weight_tensors`` and ``state_tensors`` gave, for the names of this rank in ``weights``.

        Raises:
            CheckpointError: 8-bit states that are of another type or shape than this run's.
        """
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in states.items():
            name, _, state = key.rpartition("/")
            by_name.setdefault(name, {})[state] = value
        for name, master in self.masters.items():
            if name not in weights:
                continue
            master.copy_(weights[name])
            found = by_name.get(name)
            if found and self.eight_bit:
                self._load_eight_bit(name, found)
            elif found and self.optimizer is not None:
                self.optimizer.state[master] = {key: self._placed(value, master) for key, value in found.items()}
        self._copy_masters_back(weights.keys())

    def _load_eight_bit(self, name: str, found: dict[str, Tensor]) -> None:
        """Into buffers that bitsandbytes itself has made: its paged ones are no ordinary tensors, and native code expects them."""
        optimizer: Any = self.optimizer
        master = self.masters[name]
        for group_index, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if parameter is master:
                    optimizer.state[master] = {}
                    optimizer.init_state(group, master, group_index, index)
        own = optimizer.state[master]
        for key, value in found.items():
            if key == _STEP:
                own[_STEP] = int(value)
                continue
            if key not in own or own[key].dtype != value.dtype or own[key].shape != value.shape:
                raise CheckpointError(
                    f"checkpoint.resume: the optimizer's state {key} of {name} is {value.dtype} {list(value.shape)} there and "
                    f"{own[key].dtype if key in own else 'absent'} here; put optimizer.name and optimizer.stable_embedding back"
                )
            if not key.startswith("qmap"):
                own[key].copy_(value)

    @staticmethod
    def _placed(value: Tensor, master: Tensor) -> Tensor:
        # torch keeps AdamW's step counter on the CPU; the moments live beside their master.
        return value.clone() if value.ndim == 0 else value.to(master.device, copy=True)


def attach_update(strategy: Strategy, config: RunConfig) -> Update:
    """Give a strategy the update that its plan says, over its own parameters; collective over all ranks."""
    update: Update
    if strategy.plan.zero_stage:
        update = DeepSpeedUpdate(strategy, config)
    else:
        optimizer = NamedOptimizer(strategy.named_parameters(), config.optimizer, strategy.facts.embeddings)
        update = PlainUpdate(strategy, optimizer, config.train.clip_norm, LossScale.for_precision(config.precision))
    strategy.update = update
    return update
