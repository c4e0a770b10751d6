"""DeepSpeed's own JSON, generated from the run's config: one typed source, no ``auto``, no second place for batch sizes.

Keys of ``deepspeed: {...}`` are passed through; those that say what another key of the run's config says already are refused unless
they say the same.
"""

from __future__ import annotations

from typing import Any

from mpfinetune.config import RunConfig
from mpfinetune.errors import ConfigError
from mpfinetune.models.facts import ModelFacts
from mpfinetune.planning.engines import engine_precision
from mpfinetune.planning.plan import Plan
from mpfinetune.planning.swap import SUB_GROUP_ELEMENTS, weight_buffer_elements

# DeepSpeed's default of 5e8 elements would be a buffer of 2 GB on the card.
_BUCKET_ELEMENTS = 16 * 2**20

# DeepSpeed's key -> the key of the run's config that decides it. Sections stand for all keys within.
OWNED: dict[str, str] = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.global_size and batch.micro_size",
    "gradient_clipping": "train.clip_norm",
    "optimizer": "optimizer",
    "scheduler": "train.scheduler",
    "bf16": "precision",
    "bfloat16": "precision",
    "fp16.enabled": "precision",
    "amp": "precision",
    "torch_autocast": "precision",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.offload_optimizer.device": "offload.optimizer",
    "zero_optimization.offload_optimizer.nvme_path": "offload.nvme_path",
    "zero_optimization.offload_param.device": "offload.parameters",
    "zero_optimization.offload_param.nvme_path": "offload.nvme_path",
    "zero_optimization.cpu_offload": "offload.optimizer",
    "managed_gradient_accumulation": "strategy (the update is one call of the engine)",
    "gradient_allreduce_op": "strategy (the loss is divided by the targets of the whole global batch already)",
    "prescale_gradients": "strategy (the loss is divided by the targets of the whole global batch already)",
    "gradient_predivide_factor": "strategy (the loss is divided by the targets of the whole global batch already)",
    "communication_data_type": "precision (gradients are summed in fp32)",
    "data_types": "precision (gradients accumulate in fp32)",
    "zero_optimization.overlap_comm": "strategy (the engine sees gradients at the update only)",
}


def engine_config(config: RunConfig, facts: ModelFacts, plan: Plan) -> dict[str, Any]:
    """The JSON of this run's engines.

    Raises:
        ConfigError: a key of ``deepspeed`` contradicts the config; every one is named, with both keys and values.
    """
    ours = _generated(config, facts, plan)
    problems: list[str] = []
    _merge(ours, config.deepspeed, "", plan, problems)
    if problems:
        raise ConfigError(problems)
    return ours


def _generated(config: RunConfig, facts: ModelFacts, plan: Plan) -> dict[str, Any]:
    precision = engine_precision(facts, plan.precision)
    zero: dict[str, Any] = {"stage": plan.zero_stage, "reduce_bucket_size": _BUCKET_ELEMENTS, "allgather_bucket_size": 4 * _BUCKET_ELEMENTS}
    pinned = plan.device_type == "cuda"
    for key, device in (("offload_optimizer", plan.offload_optimizer), ("offload_param", plan.offload_parameters)):
        if device != "none":
            zero[key] = {"device": device, "pin_memory": pinned}
            if device == "nvme":
                zero[key]["nvme_path"] = config.offload.nvme_path
                zero["sub_group_size"] = SUB_GROUP_ELEMENTS
    if plan.offload_parameters == "nvme":
        zero["offload_param"] |= {"max_in_cpu": 0, "buffer_size": weight_buffer_elements(config, facts, plan.replicas)}
        # A weight has one of the few buffers for as long as it is kept for its next use.
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    generated: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.train.clip_norm or 0.0,
        "managed_gradient_accumulation": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 2**31,
        "zero_optimization": zero,
    }
    if plan.zero_stage < 3:
        generated["gradient_allreduce_op"] = "sum"  # stage 3 knows the mean only: there the loss is multiplied by the replicas
        zero["overlap_comm"] = False
    if precision == "bf16":
        generated["bf16"] = {"enabled": True}
    elif precision == "fp16":
        # The rule of update.LossScale: from 2**16, halved at each overflow, doubled after 2000 updates without one.
        generated["fp16"] = {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
    return generated


def _merge(ours: dict[str, Any], given: dict[str, Any], prefix: str, plan: Plan, problems: list[str]) -> None:
    for key, value in given.items():
        path = f"{prefix}{key}"
        if value == "auto":
            problems.append(f"deepspeed.{path}: 'auto' given, but nothing is left open here; leave the key out")
        elif path in OWNED:
            mine = {"train_batch_size": plan.global_size, "gradient_accumulation_steps": plan.microbatches}.get(path, ours.get(key))
            if value != mine or isinstance(value, bool) != isinstance(mine, bool):
                problems.append(
                    f"deepspeed.{path}: {value!r} ({type(value).__name__}) given, but {OWNED[path]} of this config decides it and makes it {mine!r}"
                    f"{'' if mine is None else f' ({type(mine).__name__})'}; leave the key out and change {OWNED[path].partition(' ')[0]}"
                )
        elif isinstance(value, dict) and isinstance(ours.get(key, {}), dict):
            if key not in ours and any(owned.startswith(f"{path}.") for owned in OWNED):
                _merge({}, value, f"{path}.", plan, problems)
                if key in ("offload_optimizer", "offload_param"):
                    continue  # settings of an offload that is off
            _merge(ours.setdefault(key, {}), value, f"{path}.", plan, problems)
        else:
            ours[key] = value
