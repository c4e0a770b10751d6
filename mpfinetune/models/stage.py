"""A pipeline stage: the model's own forward, entered at the stage's first block and left after its last.

Modules that other stages own are replaced in place by stubs without parameters, so every kept parameter keeps its Hugging Face name
and masks, rotary tables, positions and pooling are computed by the model's own code from the batch's small integer tensors. Only the
hidden states [B, T, D] cross a boundary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mpfinetune.models.facts import BlockCall, ModelFacts


@dataclass(frozen=True)
class StageSpan:
    """What one stage owns: blocks ``start`` to ``stop - 1``, and the prologue and epilogue if it is first and last."""

    start: int
    stop: int
    has_prologue: bool
    has_epilogue: bool

    def owns(self, facts: ModelFacts, name: str) -> bool:
        """Whether the stage holds the parameter, alone or with others."""
        parameter = facts.parameters[name]
        if parameter.part == "block":
            assert parameter.block is not None
            return self.start <= parameter.block < self.stop
        return parameter.part == "every_stage" or (self.has_prologue if parameter.part == "prologue" else self.has_epilogue)

    def parameter_names(self, facts: ModelFacts) -> list[str]:
        return [name for name in facts.parameters if self.owns(facts, name)]


def part_spans(facts: ModelFacts, span: StageSpan, bytes_per_parameter: int, limit_bytes: int) -> list[StageSpan]:
    """A span in consecutive parts that can be read alone, each of one block (or what stands before or after them) or of at most ``limit_bytes``."""
    if facts.refusal is not None:
        return [span]
    units = [StageSpan(span.start, span.start, True, False)] if span.has_prologue else []
    units += [StageSpan(index, index + 1, False, False) for index in range(span.start, span.stop)]
    units += [StageSpan(span.stop, span.stop, False, True)] if span.has_epilogue else []
    parts: list[StageSpan] = []
    for unit in units:
        joined = StageSpan(parts[-1].start, unit.stop, parts[-1].has_prologue, unit.has_epilogue) if parts else unit
        if parts and facts.numel(joined.parameter_names(facts)) * bytes_per_parameter <= limit_bytes:
            parts[-1] = joined
        else:
            parts.append(unit)
    return parts


class _LeaveForward(Exception):
    """Carries the hidden states of the stage's last block out of the model's forward."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Stub(nn.Module):
    """Stands for a module of another stage; keeps the plain attributes that the model's loop reads off it (``attention_type``)."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if not name.startswith("_") and name not in self.__dict__ and not isinstance(value, nn.Module):
                setattr(self, name, value)


class _ZerosStub(_Stub):
    """A prologue module on a later stage: zeros of the shape that the real one returns, found by running it on the meta device."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__(original)
        self._on_meta = (original,)  # in a tuple, so that its parameters are not registered

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        devices: list[torch.device] = []

        def to_meta(tensor: Tensor) -> Tensor:
            devices.append(tensor.device)
            return tensor.to("meta")

        meta_args, meta_kwargs = tree_map_only(Tensor, to_meta, (args, kwargs))
        with torch.no_grad():
            shapes = self._on_meta[0](*meta_args, **meta_kwargs)
        # Expanded from one element: the values are never read, only shape, type and device.
        return tree_map_only(Tensor, lambda t: torch.zeros((), dtype=t.dtype, device=devices[0]).expand(t.shape), shapes)


class _AbsentStub(_Stub):
    """An epilogue module on an earlier stage, or a block after the one that leaves: never reached."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a module of a later pipeline stage was called; the forward should have been left before")


class _ReceivedStub(_Stub):
    """A block of an earlier stage: returns the hidden states that were received."""

    def __init__(self, original: nn.Module, call: BlockCall, received: Callable[[], Tensor]) -> None:
        super().__init__(original)
        self._call = call
        self._received = received

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._received()
        if self._call.output_length is None:
            return hidden
        return tuple(hidden if index == self._call.output_index else None for index in range(self._call.output_length))


class _LeaveStub(_Stub):
    """The first block of the next stage: leaves the forward with the hidden states it was given."""

    def __init__(self, original: nn.Module, call: BlockCall) -> None:
        super().__init__(original)
        self._call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        slot = self._call.input_slot
        raise _LeaveForward(args[slot] if isinstance(slot, int) else kwargs[slot])


class StageModule(nn.Module):
    """One stage of a causal or classification model.

    Calling it with ``(hidden, **batch)`` gives hidden states [B, T, D], or logits ([B, T, V] or [B, C]) where the stage has the
    epilogue. The first stage takes no hidden states. ``batch`` holds input_ids [B, T], attention_mask [B, T] (of packed rows
    position_ids [B, T] instead) and, where the tokenizer makes them, token_type_ids [B, T].
    """

    def __init__(self, model: nn.Module, facts: ModelFacts, span: StageSpan) -> None:
        super().__init__()
        self.model = model
        self.span = span
        self._hidden: Tensor | None = None
        # Tokenizers make token_type_ids for models that do not take them.
        self._accepted = frozenset(inspect.signature(model.forward).parameters)
        if not (span.has_prologue and span.has_epilogue):
            self._replace_foreign_modules(facts)

    def forward(self, hidden: Tensor | None = None, **batch: Tensor) -> Tensor:
        if (hidden is None) != self.span.has_prologue:
            raise AssertionError("hidden states are for the stages after the first, and only for them")
        self._hidden = hidden
        try:
            return self.model(**{name: tensor for name, tensor in batch.items() if name in self._accepted}).logits
        except _LeaveForward as leave:
            return leave.hidden
        finally:
            self._hidden = None

    def _received(self) -> Tensor:
        assert self._hidden is not None
        return self._hidden

    def _replace_foreign_modules(self, facts: ModelFacts) -> None:
        span, call = self.span, facts.block_call
        if not span.has_prologue:
            for name in facts.prologue_modules:
                self.model.set_submodule(name, _ZerosStub(self.model.get_submodule(name)))
        if not span.has_epilogue:
            for name in facts.epilogue_modules:
                self.model.set_submodule(name, _AbsentStub(self.model.get_submodule(name)))
        for index in range(facts.num_blocks):
            name = facts.block_name(index)
            block = self.model.get_submodule(name)
            if index < span.start:
                self.model.set_submodule(name, _ReceivedStub(block, call, self._received))
            elif index == span.stop:
                self.model.set_submodule(name, _LeaveStub(block, call))
            elif index > span.stop:
                self.model.set_submodule(name, _AbsentStub(block))
        if span.start == 0 and not span.has_prologue:
            self._enter_before(self.model.get_submodule(facts.block_name(0)), call)
        if span.stop == facts.num_blocks and not span.has_epilogue:
            self._leave_after(self.model.get_submodule(facts.block_name(span.stop - 1)), call)

    def _enter_before(self, block: nn.Module, call: BlockCall) -> None:
        def swap_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if isinstance(call.input_slot, int):
                args = (*args[: call.input_slot], self._received(), *args[call.input_slot + 1 :])
            else:
                kwargs = {**kwargs, call.input_slot: self._received()}
            return args, kwargs

        block.register_forward_pre_hook(swap_in, with_kwargs=True)

    def _leave_after(self, block: nn.Module, call: BlockCall) -> None:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            raise _LeaveForward(output if call.output_length is None else output[call.output_index])

        block.register_forward_hook(leave)
