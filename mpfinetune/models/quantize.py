"""Quantised bases: the linear layers of the blocks in 4 or 8 bits (bitsandbytes), quantised tensor by tensor while they are read.

Embeddings, norms, biases and the head keep the run's precision. A layer is made by bitsandbytes' own class, so peft recognises it and its
backward pass gives the gradient of its input. What is quantised is never moved or cast afterwards (``.to`` would quantise again or fail).
"""

from __future__ import annotations

import ctypes
import logging
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpfinetune.errors import ConfigError
from mpfinetune.models.facts import LinearFacts, ModelFacts
from mpfinetune.models.stage import StageModule

Kind = Literal["none", "nf4", "int8"]
# bitsandbytes' defaults: weights share a scale in blocks of 64, the scales (double quantisation) in blocks of 256.
BLOCK, SCALE_BLOCK = 64, 256
_NF4_TABLES_BYTES = 4 * (16 + 256) + 4  # per tensor: the values of a 4-bit and of an 8-bit code in fp32, and the scales' mean


def quantised_layers(facts: ModelFacts, kind: Kind) -> dict[str, LinearFacts]:
    """The linear layers that are held in fewer bits.

    Raises:
        ConfigError: none can be, with the reason.
    """
    if kind == "none":
        return {}
    chosen = {name: linear for name, linear in facts.linears.items() if why_not(linear, kind) is None}
    if not chosen:
        reasons = sorted({str(why_not(linear, kind)) for linear in facts.linears.values()}) or [facts.refusal or "its blocks hold no linear layers"]
        raise ConfigError(f"quantize: '{kind}' given, but no layer of the model ({facts.model_type}) can be: {'; '.join(reasons)}; set none")
    return chosen


def why_not(linear: LinearFacts, kind: Kind) -> str | None:
    """Why a layer keeps its precision, or None where it is quantised."""
    # bitsandbytes' quantize_4bit has given wrong numbers for short rows without an error (seen with its CPU kernels).
    if kind == "nf4" and linear.in_features % BLOCK:
        return f"a row of {linear.in_features} weights is no multiple of nf4's block of {BLOCK}"
    return None


def left_layers(facts: ModelFacts, kind: Kind) -> dict[str, str]:
    """The linear layers of the blocks that keep their precision, each with the reason; for the run's messages."""
    if kind == "none":
        return {}
    reasons = {name: why_not(linear, kind) for name, linear in facts.linears.items()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def in_words(facts: ModelFacts, kind: Kind) -> str:
    """How many layers are quantised and which are left, for the run's messages."""
    chosen, left = quantised_layers(facts, kind), left_layers(facts, kind)
    words = f"quantize: {len(chosen)} of {len(facts.linears)} linear layers of the blocks in {kind}; embeddings, norms and head keep the precision"
    if left:
        endings = sorted({f"{name.rpartition('.')[2]} ({reason})" for name, reason in left.items()})
        words += f"; so do {len(left)} layers: {', '.join(endings)}"
    return words


def quantised_bytes(linear: LinearFacts, kind: Kind) -> int:
    """Bytes of one layer's weight with its statistics."""
    count = linear.in_features * linear.out_features
    if kind == "int8":
        return count + 4 * linear.out_features
    scales = -(-count // BLOCK)
    return -(-count // 2) + scales + 4 * -(-scales // SCALE_BLOCK) + _NF4_TABLES_BYTES


def statistics_of(module: nn.Module) -> list[Tensor]:
    """The scales and code tables that bitsandbytes keeps beside the quantised weights of a module; a shared one may be there twice."""
    found: list[Tensor | None] = []
    for parameter in module.parameters():
        found.append(getattr(parameter, "SCB", None))
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            found += [state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    # Where the scales of int8 weights go at the first forward pass.
    found += [getattr(getattr(child, "state", None), "SCB", None) for child in module.modules()]
    return [tensor for tensor in found if tensor is not None]


@dataclass(frozen=True)
class TensorQuantizer:
    """Quantises one weight as it is read or drawn. For transformers' loader it stands where its own quantizers do.

    The loader asks ``pre_quantized``, ``param_needs_quantization`` and ``get_quantize_ops`` and calls the operation's ``convert``.
    """

    kind: Kind
    layers: dict[str, LinearFacts]  # of one stage
    dtype: torch.dtype
    pre_quantized = False

    def takes(self, name: str) -> bool:
        """Whether the parameter is quantised."""
        owner, _, leaf = name.rpartition(".")
        return leaf == "weight" and owner in self.layers

    def quantise(self, name: str, weight: Tensor, device: torch.device) -> nn.Parameter:
        """A weight as the files hold it ([out, in], gpt2's Conv1D [in, out]) as bitsandbytes' parameter on ``device``."""
        import bitsandbytes as bnb

        return_freed_memory()
        if self.layers[name.rpartition(".")[0]].transposed:
            weight = weight.T
        weight = weight.detach().to(self.dtype).contiguous()
        parameter: Any
        if self.kind == "nf4":
            parameter = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4", blocksize=BLOCK)
        else:
            # Its class quantises while it leaves the CPU, and nowhere else.
            parameter = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        quantised: nn.Parameter = parameter.to(device)
        return quantised

    # --- what transformers' loader calls ---

    def param_needs_quantization(self, model: Any, name: str, **_: Any) -> bool:
        return self.takes(name)

    def get_quantize_ops(self) -> TensorQuantizer:
        return self

    def convert(self, input_dict: dict[str, Any], **_: Any) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name, value in input_dict.items():
            tensor = value[0] if isinstance(value, list) else value
            result[name] = self.quantise(name, tensor, tensor.device)
        return result


def nf4_round_trip_error(device: torch.device) -> float:
    """Whether bitsandbytes works here: the largest error of a matrix of weights in [-1, 1] that is quantised and read back."""
    import bitsandbytes.functional as bnb_functional

    weights = torch.linspace(-1.0, 1.0, 16 * BLOCK, device=device).reshape(-1, BLOCK)
    packed, state = bnb_functional.quantize_4bit(weights, blocksize=BLOCK, quant_type="nf4")
    return float((bnb_functional.dequantize_4bit(packed, state) - weights).abs().max())


def return_freed_memory() -> None:
    """Give what was freed back to the system. glibc keeps the room of the full-precision tensors, scattered between the small quantised ones:
    a llama of 302 MiB in bf16 ended at 313 MiB instead of 100."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def replace_linears(stage: StageModule, facts: ModelFacts, kind: Kind, dtype: torch.dtype) -> TensorQuantizer | None:
    """Put bitsandbytes' empty layers where the stage's own linear layers are; its parameters are on meta before and after.

    Args:
        dtype: of the computation, and of the biases.

    Returns:
        What quantises the weights while they are filled in; None for ``none``.
    """
    if kind == "none":
        return None
    import bitsandbytes as bnb

    # It says at every call of every layer that int8 computes in fp16; once, in the documentation, is enough.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    blocks = tuple(f"{facts.block_name(index)}." for index in range(stage.span.start, stage.span.stop))
    own = {name: linear for name, linear in quantised_layers(facts, kind).items() if name.startswith(blocks)} if blocks else {}
    for name, linear in own.items():
        old = stage.model.get_submodule(name)
        sizes = (linear.in_features, linear.out_features)
        new: Any
        if kind == "nf4":
            new = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=dtype, compress_statistics=True, quant_type="nf4", device="meta")
            # On CPUs with bf16 instructions an evaluation would repack the weights in place and compute in bf16 whatever the run's precision.
            new.support_avx512bf16_for_cpu = False
        else:
            new = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0, device="meta")
        new.bias = old.bias
        new.train(old.training)
        stage.model.set_submodule(name, new)
    # peft looks here for what its adapters stand on.
    stage.model.is_loaded_in_4bit = kind == "nf4"  # type: ignore[assignment]
    stage.model.is_loaded_in_8bit = kind == "int8"  # type: ignore[assignment]
    return TensorQuantizer(kind, own, dtype)
