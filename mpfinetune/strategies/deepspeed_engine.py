"""An update by a DeepSpeed ZeRO engine: masters and optimizer states sharded over the replicas, on the host where asked.

Two ways in. In the pipeline (``gradients_in_place``) torch's runtime runs the passes and the engine sees nothing but the gradients they have
left in ``.grad``: it is ZeRO-1 over this rank's parameters, all replicas of the rank its data-parallel group, all ranks of the
pipeline its model-parallel group, over which it takes the norm and agrees on overflow. Under strategy zero the engine itself runs
forward and backward.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpfinetune.config import OptimizerConfig, RunConfig
from mpfinetune.dist import DistContext, choose_backend
from mpfinetune.models.architecture import TORCH_DTYPES
from mpfinetune.models.trainable import decays
from mpfinetune.planning.engines import engine_precision
from mpfinetune.planning.plan import Plan
from mpfinetune.strategies.deepspeed_config import engine_config
from mpfinetune.strategies.deepspeed_ops import choose_accelerator
from mpfinetune.strategies.deepspeed_reset import forget_pass
from mpfinetune.strategies.gradient_offload import HostGradients
from mpfinetune.strategies.oom import nothing
from mpfinetune.strategies.partitioned import gathered, in_memory, swapped_optimizer_bytes, whole_shape
from mpfinetune.strategies.update import refuse_unreached, zero_gradient

if TYPE_CHECKING:
    from mpfinetune.strategies.base import Strategy

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ProcessMap:
    """What DeepSpeed calls an mpu: the groups of this rank. It asks for all of these methods."""

    def __init__(self, context: DistContext) -> None:
        self.model_ranks = [context.global_rank(rank, context.replica) for rank in range(context.pipeline_ranks)]
        self.data_ranks = [context.global_rank(context.pipeline_rank, replica) for replica in range(context.replicas)]
        self.rank, self.context = context.rank, context
        # A group of one rank is needed where there is nothing to share; new_group is collective, so every rank makes all of them.
        singles = [dist.new_group([rank], timeout=context.timeout) for rank in range(context.world_size)]
        own = singles[context.rank]
        self.model_group = context.pipeline_group if context.pipeline_ranks > 1 else own
        self.data_group = context.replica_group if context.replicas > 1 else own

    def get_model_parallel_rank(self) -> int:
        return self.context.pipeline_rank

    def get_model_parallel_world_size(self) -> int:
        return len(self.model_ranks)

    def get_model_parallel_group(self) -> Any:
        return self.model_group

    def get_data_parallel_rank(self) -> int:
        return self.context.replica

    def get_data_parallel_world_size(self) -> int:
        return len(self.data_ranks)

    def get_data_parallel_group(self) -> Any:
        return self.data_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.data_ranks


def join_deepspeed(context: DistContext) -> Any:
    """Import deepspeed and let it use torch's process group, which is made here for a process that stands alone; returns the module."""
    choose_accelerator(context.device.type)
    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        dist.init_process_group(choose_backend(context.device.type), store=dist.HashStore(), rank=0, world_size=1, timeout=context.timeout)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed's calls by the names that torch is about to change; the user can do nothing about them.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.(all_gather_into|reduce_scatter)_tensor.* is deprecated", FutureWarning)
    # On the CPU it would be compiled here, by all ranks at once, for an all-reduce that only inference uses.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False, timeout=context.timeout)
    return deepspeed


class DeepSpeedUpdate:
    """``Update`` by an engine. Collective over all ranks when it is made."""

    def __init__(self, strategy: Strategy, config: RunConfig) -> None:
        self.strategy = strategy
        self.plan: Plan = strategy.plan
        self.in_place = self.plan.strategy == "pipeline"
        deepspeed = join_deepspeed(strategy.context)
        self._parameters = strategy.named_parameters()
        self._learning = {name: p for name, p in self._parameters.items() if p.requires_grad}
        own = strategy.first_held_names()
        for name, parameter in self._learning.items():
            parameter.model_parallel = True  # type: ignore[attr-defined]  # else only pipeline rank 0's count in the norm
            parameter.ds_pipe_replicated = name not in own  # type: ignore[attr-defined]  # a copy of another rank's: counted there
            if self.in_place and parameter.dtype != torch.float32 and not self._leaves_at_once(name):
                parameter.grad_dtype = torch.float32
        # Until the first update. Not ``.grad``: the engines take the gradients away as they come.
        self._gradients_are_checked = False
        self._reached: set[str] = set()
        self._watches = [parameter.register_hook(partial(self._note_gradient, name)) for name, parameter in self._learning.items()]
        self._precision = engine_precision(strategy.facts, self.plan.precision)
        groups, placeholders = self._groups(config.optimizer)
        self._placeholders = placeholders
        self.gradient_bytes = 0
        # In the pipeline not the stages: the engine would hang hooks on them, and cast what does not learn.
        module = nn.ParameterList([*self._learning.values(), *placeholders]) if self.in_place else strategy.stages[0]
        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=_optimizer(groups, config.optimizer, self.plan.offload_optimizer),
            mpu=strategy.process_map if hasattr(strategy, "process_map") else ProcessMap(strategy.context),
            config=engine_config(config, strategy.facts, self.plan),
            dist_init_required=False,
        )
        self.zero: Any = self.engine.optimizer
        self._scaler: Any = getattr(self.zero, "loss_scaler", None)
        self._keep_the_run_at_the_smallest_scale()
        self._scale_after_the_step()
        if self.in_place:
            # They would count backward passes and move gradients away under the pipeline's runtime.
            for hook in self.zero._grad_acc_hooks:
                hook.remove()
        leaving = {name: parameter for name, parameter in self._learning.items() if self._leaves_at_once(name)}
        self._on_host = HostGradients(self.zero, leaving) if leaving else None

    def _leaves_at_once(self, name: str) -> bool:
        """Whether each microbatch's gradient goes to the host by itself; that of a shared parameter waits to be summed over its copies."""
        return self.plan.offload_gradients != "none" and all(name != shared.name for shared in self.strategy.shared)

    @property
    def loss_scale(self) -> float:
        """What the strategy multiplies the loss with; under strategy zero the engine does it in its backward."""
        return float(self.zero.loss_scale) if self.in_place else 1.0

    @property
    def _scale_is_dynamic(self) -> bool:
        return bool(getattr(self._scaler, "dynamic", False))

    def _keep_the_run_at_the_smallest_scale(self) -> None:
        """DeepSpeed would raise at an overflow there; the training loop counts them and ends the run with its own message."""
        if self._scale_is_dynamic:
            self._scaler.raise_error_at_min_scale = False

    def _scale_after_the_step(self) -> None:
        """DeepSpeed's step doubles the scale, where it is time to, before it divides the gradients by it; they would be half of what they are."""
        self._grow = nothing
        if not self._scale_is_dynamic:
            return
        update_scale = self.zero._update_scale

        def update_or_put_off(has_overflow: bool) -> None:
            if has_overflow:
                update_scale(True)
            else:
                self._grow = partial(update_scale, False)

        self.zero._update_scale = update_or_put_off

    @property
    def scale_is_smallest(self) -> bool:
        """Whether an overflow now would not be a matter of the scale; true where nothing is scaled."""
        return not self._scale_is_dynamic or self._scaler.cur_scale <= self._scaler.min_scale

    def scale_state(self) -> tuple[float, int] | None:
        """The dynamic loss scale and the updates since its last change; None where nothing is scaled."""
        scaler = self._scaler
        if not self._scale_is_dynamic:
            return None
        # It counts on after a growth, and grows at the update after a multiple of the window.
        quiet = scaler.cur_iter - scaler.last_overflow_iter - 1
        return float(scaler.cur_scale), (quiet - 1) % scaler.scale_window + 1 if quiet else 0

    def load_scale_state(self, value: float, updates_since_change: int) -> None:
        """Put back what ``scale_state`` gave; a run in another precision ignores it."""
        if self._scale_is_dynamic:
            self._scaler.cur_scale, self._scaler.cur_iter, self._scaler.last_overflow_iter = value, updates_since_change, -1

    def optimizer_bytes(self) -> tuple[int, int]:
        """States and fp32 masters by where they are, with the gradients that CPUAdam has beside the masters; (on the device, offloaded)."""
        flats = self._flat_parameters()
        states = [value for flat in flats for value in self.zero.optimizer.state.get(flat, {}).values() if isinstance(value, Tensor) and value.ndim]
        if self.plan.offload_optimizer == "none":
            return sum(tensor.nbytes for tensor in (*flats, *states)), 0
        beside = [flat.grad for flat in flats if flat.grad is not None]
        return 0, sum(tensor.nbytes for tensor in (*flats, *states, *beside)) + swapped_optimizer_bytes(self.zero, _MOMENTS)

    def apply(self, lr: float) -> tuple[float, bool]:
        """One update; collective over all ranks.

        Returns:
            The norm of the gradients over all parameters, and whether it was not finite, in which case nothing was changed.

        Raises:
            ModelError: at the first update, on every rank: parameters that should learn have no gradient.
        """
        if not self._gradients_are_checked:  # on every rank, also where nothing learns and nothing was watched
            self._gradients_are_checked = True
            self._stop_watching()
            refuse_unreached(self.strategy, self._reached)
        for group in self.zero.param_groups:
            group["lr"] = lr
        if self.in_place:
            self._hand_over_gradients()
        self.engine.step()
        self._grow()
        self._grow = nothing
        skipped = not self.engine.was_step_applied()
        norm = math.inf if skipped else float(self.engine.get_global_grad_norm())
        return norm, skipped

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        self._reached.add(name)

    def _stop_watching(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []

    def drop_gradients(self) -> None:
        """Forget what the passes since the last update have left, also those that were broken off."""
        if not self.in_place:
            forget_pass(self.engine)
        if self._on_host is not None:
            self._on_host.drop()
        for parameter in [*self._learning.values(), *self._placeholders]:
            parameter.grad = None

    def weight_stream(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of this rank that learn, and of stage 3 what else a checkpoint holds, whole and unrounded, on the CPU of the first replica.

        Gathered one by one, so every replica must go to the end. What is whole on the host already is no copy: the next update changes it.
        """
        return self._stream(None)

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        """``name/state`` to tensor, as ``NamedOptimizer`` gives it, gathered one by one; nothing before the first update."""
        step = self._step_count()
        if step == 0:
            return
        self._link_states()
        for key in _MOMENTS:
            for name, tensor in self._stream(key):
                yield f"{name}/{key}", tensor
        if self.strategy.context.replica == 0:
            for name in self._learning:
                yield f"{name}/step", torch.tensor(float(step))

    def full_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, whole weight in fp32), gathered one by one on every replica; collective over the replicas, which must name the same."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name in names:
            parameter = self._parameters[name]
            if name in self._learning:
                whole = safe_get_full_fp32_param(parameter)
                assert whole is not None and whole.numel() > 0, f"{name} could not be gathered"
                yield name, whole.detach().reshape(whole_shape(parameter))
            else:
                with gathered(parameter):
                    yield name, parameter.detach().float()

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor], states: dict[str, Tensor]) -> None:
        """Put back what ``weight_stream`` and ``state_stream`` gave, for the names in ``weights``; collective over the replicas."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        steps = [float(value) for key, value in states.items() if key.endswith("/step")]
        if steps:
            self._make_states(max(steps))
        for name, parameter in self._learning.items():
            if name not in weights:
                continue
            safe_set_full_fp32_param(parameter, weights[name].float())
            for key in _MOMENTS:
                if f"{name}/{key}" in states:
                    safe_set_full_optimizer_state(parameter, states[f"{name}/{key}"].float(), key)

    def _groups(self, settings: OptimizerConfig) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
        """Parameter groups with and without decay.

        The engine takes the norm group by group, each with collectives over the pipeline, so every rank must have both groups: one that
        would be empty gets a placeholder, which is not counted and does not move.
        """
        groups, placeholders = [], []
        for decayed in (True, False):
            members = [p for name, p in self._learning.items() if decays(name, whole_shape(p)) is decayed]
            if not members and self.in_place:
                members = [nn.Parameter(torch.zeros(2, dtype=TORCH_DTYPES[self._precision], device=self.strategy.context.device))]
                members[0].ds_pipe_replicated = True  # type: ignore[attr-defined]
                placeholders += members
            if members:
                groups.append({"params": members, "weight_decay": settings.weight_decay if decayed else 0.0})
        return groups, placeholders

    def _hand_over_gradients(self) -> None:
        """From ``.grad`` to where the engine looks at the boundary; what got no gradient has zeros, or it would reuse its last norm."""
        held = [parameter for name, parameter in self._learning.items() if not self._leaves_at_once(name)]
        parameters = [*held, *self._placeholders]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = zero_gradient(parameter)
        self.strategy.sum_shared_gradients()
        self.gradient_bytes = sum(parameter.grad.nbytes for parameter in held if parameter.grad is not None)
        self.zero.setup_buckets()
        if self.zero.use_grad_accum_attribute:
            for parameter in parameters:
                parameter.grad_accum, parameter.grad = parameter.grad, None  # type: ignore[attr-defined]
        if self._on_host is not None:
            self._on_host.hand_over()

    def _stream(self, key: str | None) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor on the CPU) of weights (None) or of a moment, gathered one by one; on other replicas than the first nothing."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, parameter in self._learning.items():
            whole = self._undivided(parameter, key)
            if whole is None:
                whole = safe_get_full_fp32_param(parameter) if key is None else safe_get_full_optimizer_state(parameter, key)
            assert whole is not None and whole.numel() > 0, f"{name} could not be gathered"
            if self.strategy.context.replica == 0:
                yield name, whole.detach().to("cpu").reshape(whole_shape(parameter))
        if key is None:
            saved = self.strategy.saved_names()
            for name, parameter in self._parameters.items():
                if name in saved and not parameter.requires_grad and hasattr(parameter, "ds_id"):  # stage 3 has parts of what does not learn, too
                    with gathered(parameter):
                        if self.strategy.context.replica == 0:
                            yield name, parameter.detach().to("cpu", copy=True)

    def _undivided(self, parameter: nn.Parameter, key: str | None) -> Tensor | None:
        """The engine's own tensor, [numel], where one replica holds it whole, as with offload on two cards: gathering would copy all of it."""
        mapping = getattr(parameter, "_hp_mapping", None)
        if self.strategy.context.replicas > 1 or mapping is None:
            return None
        fragment: Tensor = mapping.get_hp_fragment(key)
        return fragment if fragment.numel() == parameter.numel() else None

    def _flat_parameters(self) -> list[Tensor]:
        """The engine's flat fp32 partitions, which torch's optimizer updates."""
        if hasattr(self.zero, "fp32_partitioned_groups_flat"):
            return list(self.zero.fp32_partitioned_groups_flat)
        if hasattr(self.zero, "single_partition_of_fp32_groups"):
            return list(self.zero.single_partition_of_fp32_groups)
        return list(self.zero.fp32_groups_flat_partition)  # stage 1 with bf16 weights and no offload is another class

    def _step_count(self) -> int:
        states = [self.zero.optimizer.state.get(flat, {}) for flat in self._flat_parameters()]
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def _make_states(self, step: float) -> None:
        """States at a step count, as the optimizer's first step would make them."""
        as_tensor = isinstance(self.zero.optimizer, torch.optim.AdamW)
        for index, flat in enumerate(self._flat_parameters()):
            state = self.zero.optimizer.state[flat]
            with in_memory(self.zero, index):
                for key in _MOMENTS:
                    state.setdefault(key, torch.zeros_like(flat, dtype=torch.float32))
            state["step"] = torch.tensor(step) if as_tensor else int(step)
        self._link_states()

    def _link_states(self) -> None:
        """The engine links parameters to their states once, after the step of its first group, when the second has none yet: do it again."""
        if hasattr(self.zero, "_lazy_init_hp_params_optimizer_state"):
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()


def _optimizer(groups: list[dict[str, Any]], settings: OptimizerConfig, offload: str) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": settings.lr, "betas": (settings.betas[0], settings.betas[1]), "eps": settings.eps}
    if offload == "none":
        return torch.optim.AdamW(groups, **common)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=True, **common)
    return optimizer
