"""Take a DeepSpeed engine back to the state after its last update, when a forward or backward pass was broken off in the middle.

DeepSpeed has no call for it: gradients lie in buckets, in partitions and on the host, and its bookkeeping waits for the rest of a backward
pass. Written against 0.19; what is reset here is what its own ``step`` resets, and what a broken pass leaves besides.
"""

from __future__ import annotations

from typing import Any


def forget_pass(engine: Any) -> None:
    """Drop every gradient since the last update and end the pass that was under way; on one process, no exchange with others."""
    zero = engine.optimizer
    engine._unmanaged_backward_count = 0
    engine.zero_grad()
    zero.zero_grad(set_to_none=True)
    hooks = zero._backward_hook_state
    hooks.reset_for_new_step()
    hooks.remaining_grad_acc_hooks = hooks.backward_active_depth = 0
    if hasattr(zero, "params_already_reduced"):  # not the class for stage 1 with bf16 weights, whose gradients zero_grad has dropped
        already = zero.params_already_reduced
        for key in range(len(already)) if isinstance(already, list) else already:
            already[key] = False
        (_forget_stage_3 if hasattr(zero, "parameter_offload") else _forget_stages_1_and_2)(zero)


def _forget_stages_1_and_2(zero: Any) -> None:
    zero.micro_step_id = -1  # the first backward pass of an update overwrites what lies on the host
    for bucket in zero.ipg_buckets.values():
        bucket.clear()
    zero.extra_large_param_to_reduce.clear()
    zero._release_preflattened_grad_buffers()
    for group in zero.averaged_gradients:
        zero.averaged_gradients[group] = None
    for group in zero.all_grad_tensors:
        zero.all_grad_tensors[group] = None
    zero._release_ipg_buffers()
    if zero.cpu_offload:
        zero._offload_accumulated_param_ids = set()
        zero.reset_cpu_buffers()


def _forget_stage_3(zero: Any) -> None:
    for bucket in zero.ipg_buckets.values():
        bucket.clear_params()
    zero._offload_boundary_param_ids = set()
    if zero.offload_optimizer:
        zero.reset_cpu_buffers()
    else:
        zero.averaged_gradients = {}
    # Weights that were gathered for the pass, and the order of modules that was being recorded in it.
    zero.parameter_offload.release_backward_leftovers()
    coordinator = zero.parameter_offload.get_param_coordinator()
    if not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()
    coordinator.release_and_reset_all(zero.parameter_offload.module)
