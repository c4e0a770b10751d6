"""Stand-ins for kernels that a fake run on the CPU cannot take: a CUDA card's attention, bitsandbytes' products. They compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from mpfinetune.models.fake_run import Ledger

_FIRST_FLASH_CAPABILITY = (8, 0)  # FlashAttention-2 as torch builds it; also the first cards with bf16 kernels
_LARGEST_FLASH_HEAD = 256  # elements of a head


class CudaAttention(TorchFunctionMode):
    """scaled_dot_product_attention as a CUDA card would compute it; fake tensors on a CPU would take the CPU's kernel.

    torch's order of choice (aten/native/transformers/cuda/sdp_utils.cpp): flash (16 bit, no mask, compute capability 8.0 and up, heads of at
    most 256), memory-efficient (also fp32 and masks; neither grouped heads nor bf16 below 8.0), else plain matrix products, which keep the
    T x T matrix. The first two keep the same: query, key, value, mask, output and the logarithms of the sums. cuDNN's kernel, which torch
    prefers on some newer cards, keeps what flash keeps.

    Args:
        capability: of the card; None: one of 8.0 or more.
    """

    def __init__(self, ledger: Ledger, capability: tuple[int, int] | None) -> None:
        super().__init__()
        self._ledger = ledger
        self._modern = capability is None or capability >= _FIRST_FLASH_CAPABILITY

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        half = query.dtype in (torch.float16, torch.bfloat16)
        flash = half and self._modern and attn_mask is None and query.shape[-1] <= _LARGEST_FLASH_HEAD
        efficient = not enable_gqa and (self._modern or query.dtype != torch.bfloat16)
        if not (flash or efficient):
            with sdpa_kernel(SDPBackend.MATH):
                return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        width = value.shape[-1]
        if query.shape[-1] % 8:  # the kernels want aligned heads
            query, key, value = (pad(tensor, (0, -tensor.shape[-1] % 8)) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # Anew in every block: the mask as numbers to add.
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
        output: Tensor = _FusedAttention.apply(query, key, value, attn_mask, self._ledger)
        return output[..., :width] if output.shape[-1] != width else output


class _FusedAttention(torch.autograd.Function):
    """What a fused kernel keeps and allocates; no values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ledger: Ledger) -> Tensor:  # type: ignore[override]
        rows, heads, tokens = query.shape[:3]
        # The kernels write [B, T, H, D] and return it as [B, H, T, D].
        output = query.new_empty((rows, tokens, heads, value.shape[-1])).transpose(1, 2)
        log_sums = query.new_empty((rows, heads, tokens), dtype=torch.float32)
        ledger.count_flops(sdpa_flop_count(query.shape, key.shape, value.shape))
        ctx.save_for_backward(query, key, value, mask, output, log_sums)
        ctx.ledger = ledger
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        query, key, value, mask, _, log_sums = ctx.saved_tensors
        ctx.ledger.count_flops(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))
        # The kernels sum the query's gradient in fp32, and give grouped keys and values a gradient for every head before they add them up.
        sums = torch.empty_like(query, dtype=torch.float32), torch.empty_like(log_sums)
        spread = [tensor.new_empty((*query.shape[:2], *tensor.shape[2:])) for tensor in (key, value) if tensor.shape[1] != query.shape[1]]
        gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
        del sums, spread
        of_mask = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        return (*gradients, of_mask, None)


class QuantisedStandIn(nn.Linear):
    """A bitsandbytes layer for the fake run: nothing but the packed weight is kept, and it is unpacked for each product.

    ``keeps_input``: bitsandbytes' int8 layer holds its input until the backward pass, though nothing needs it.
    """

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None, dtype: torch.dtype, keeps_input: bool) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=dtype)
        self.bias = bias  # type: ignore[assignment]  # as torch's own where bias=False
        self.keeps_input = keeps_input

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _UnpackedProduct.apply(input, self.weight, self.bias, self.keeps_input)
        return product


class _UnpackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, packed: Tensor, bias: Tensor | None, keeps_input: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(packed, input if keeps_input else None)
        return linear(input, packed.clone(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        packed, _ = ctx.saved_tensors
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return (gradient @ packed.clone() if ctx.needs_input_grad[0] else None), None, of_bias, None
