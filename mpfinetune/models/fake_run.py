"""What a run with fake tensors allocates, keeps, computes and moves, part by part: the instruments that ``costs`` reads.

Nothing here holds data: a fake tensor has a shape, a type and a storage of a known size. A storage counts from the operation that made it
until nothing refers to it, so the bytes are those that an allocator would have handed out, without its rounding.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from mpfinetune.models.facts import ModelFacts

Phase = Literal["forward", "backward", "evaluation"]


def storage_key(tensor: Tensor) -> int:
    """Equal for two tensors exactly where they share memory, as long as one of them lives."""
    return tensor.untyped_storage()._cdata


class Ledger(TorchDispatchMode):
    """Counts, for the present ``phase`` and ``part``: the most bytes alive, the floating point operations, the bytes read and written.

    ``outside`` are the tensors that are there anyway and are counted elsewhere: parameters, buffers, the batch.
    """

    def __init__(self, outside: Iterable[Tensor]) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self.part = 0
        self.live_bytes = 0
        self.peak_bytes: dict[tuple[Phase, int], int] = {}
        self.flops: dict[tuple[Phase, int], int] = defaultdict(int)
        self.moved_bytes: dict[tuple[Phase, int], int] = defaultdict(int)
        self._outside = {storage_key(tensor) for tensor in outside}
        self._sizes: dict[int, int] = {}
        self._is_view: dict[Any, bool] = {}

    def enter(self, phase: Phase, part: int) -> None:
        """What follows belongs to this part."""
        self.phase, self.part = phase, part
        self._note_peak()

    def is_outside(self, tensor: Tensor) -> bool:
        return storage_key(tensor) in self._outside

    def count_flops(self, flops: int) -> None:
        self.flops[self.phase, self.part] += flops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _grouped_product(args, kwargs) if func is torch.ops.aten._grouped_mm.default else func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in outputs:
            self._follow(tensor)
        if not self._views(func):
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.moved_bytes[self.phase, self.part] += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.count_flops(flop_registry[packet](*args, **kwargs, out_val=result))
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
            self.count_flops(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
        elif packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.count_flops(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
        return result

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes or key in self._outside:
            return
        self._sizes[key] = storage.nbytes()
        self.live_bytes += self._sizes[key]
        self._note_peak()
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)

    def _note_peak(self) -> None:
        at = (self.phase, self.part)
        self.peak_bytes[at] = max(self.peak_bytes.get(at, 0), self.live_bytes)

    def _views(self, func: Any) -> bool:
        """Whether the operation only looks at its input in another shape."""
        if func not in self._is_view:
            returns = func._schema.returns
            self._is_view[func] = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        return self._is_view[func]


def _grouped_product(args: Any, kwargs: Any) -> Tensor:
    """Experts' products in any type: the shape function of torch 2.13 knows bf16 only, its kernels know more."""
    kind = args[0].dtype
    args, kwargs = tree_map_only(Tensor, lambda t: t.to(torch.bfloat16) if t.is_floating_point() else t, (args, kwargs))
    product: Tensor = torch.ops.aten._grouped_mm.default(*args, **kwargs).to(kind)
    return product


class Kept:
    """A tensor that autograd keeps, until it lets go of it."""

    def __init__(self, observer: Observer, tensor: Tensor) -> None:
        # Detached: an operation that keeps its own output would else hold itself for ever where its backward pass is never run.
        self.observer, self.tensor = observer, tensor.detach()
        observer.keep(tensor)

    def __del__(self) -> None:
        self.observer.let_go(self.tensor)


class Observer:
    """Hooks that tell the ledger which part runs, and sort what autograd keeps into own, input and side inputs."""

    def __init__(self, model: nn.Module, facts: ModelFacts, ledger: Ledger, is_measured: list[bool]) -> None:
        self._ledger = ledger
        self._call = facts.block_call
        self._last = len(is_measured) + 1
        self._phase: Phase = "forward"
        self._start_live: dict[tuple[Phase, int], int] = {}
        self._uses: dict[int, int] = {}  # storage -> how often autograd keeps it
        self._saved: dict[int, tuple[int, dict[int, int], int]] = {}  # storage -> bytes, and the sum and part that they are counted in
        self._saved_after: dict[int, int] = {}  # part -> all that is kept when its forward pass ends
        self._own: dict[int, int] = dict.fromkeys(range(self._last + 1), 0)
        self._input: dict[int, int] = dict.fromkeys(range(self._last + 1), 0)
        self._output: dict[int, int] = dict.fromkeys(range(self._last + 1), 0)
        self._hidden: int | None = None  # storage of the hidden states that entered the present part
        self._side: dict[int, int] = {}
        self._side_saved: dict[int, int] = {}
        self._handles: list[Any] = []
        for index, measured in enumerate(is_measured):
            block = model.get_submodule(facts.block_name(index))
            if measured:
                self._handles.append(block.register_forward_pre_hook(self._enter_block(index + 1), with_kwargs=True))
            if measured or index == len(is_measured) - 1:
                self._handles.append(block.register_forward_hook(self._leave_block(index + 1, measured)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def begin(self, phase: Phase) -> None:
        self._phase = phase
        self._hidden = None
        # A model that is not cut is one part, the last.
        self._start(0 if self._last > 1 else self._last)

    def begin_backward(self) -> None:
        self._note_saved_so_far()
        self._phase = "backward"
        self._ledger.enter("backward", self._last)

    def note_saved(self, tensor: Tensor) -> Any:
        """The packing half of saved-tensor hooks; ``Kept.tensor`` is the other."""
        return Kept(self, tensor)

    def keep(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if self._ledger.is_outside(tensor):
            return
        self._uses[key] = self._uses.get(key, 0) + 1
        if self._uses[key] > 1:
            return
        size, part = tensor.untyped_storage().nbytes(), self._ledger.part
        place = self._input if key == self._hidden else self._side_saved if key in self._side else self._own
        self._saved[key] = (size, place, part)
        place[part] = place.get(part, 0) + size

    def let_go(self, tensor: Tensor) -> None:
        """Also in the forward pass, where a branch that leads nowhere is cut off (DoRA's norms)."""
        key = storage_key(tensor)
        if self._phase != "forward" or self._ledger.is_outside(tensor):
            return
        self._uses[key] -= 1
        if not self._uses[key]:
            size, place, part = self._saved.pop(key)
            place[part] -= size

    def note_logits(self, logits: Tensor) -> None:
        self._output[self._last] = logits.numel() * logits.element_size()

    def side_bytes(self) -> tuple[int, int]:
        return sum(self._side.values()), sum(self._side_saved.values())

    def numbers(self, part: int) -> dict[str, int]:
        """What was seen of a part, by the names of ``costs.PartCost``."""
        ledger = self._ledger
        forward: tuple[Phase, int] = ("forward", part)
        backward: tuple[Phase, int] = ("backward", part)
        evaluation: tuple[Phase, int] = ("evaluation", part)
        # The backward pass of a part begins when all later ones are over: what is kept then is what was kept when its forward ended.
        before = self._saved_after.get(part, 0) - self._own[part]
        return {
            "saved_bytes": self._own[part],
            "input_bytes": self._input[part],
            "boundary_bytes": self._output[part],
            "forward_peak_bytes": ledger.peak_bytes.get(forward, 0) - self._start_live.get(forward, 0),
            "backward_peak_bytes": ledger.peak_bytes[backward] - before if backward in ledger.peak_bytes else 0,
            "evaluation_peak_bytes": ledger.peak_bytes.get(evaluation, 0) - self._start_live.get(evaluation, 0),
            "forward_flops": ledger.flops[forward],
            "backward_flops": ledger.flops[backward],
            "forward_moved_bytes": ledger.moved_bytes[forward],
            "backward_moved_bytes": ledger.moved_bytes[backward],
        }

    def _note_saved_so_far(self) -> None:
        self._saved_after[self._ledger.part] = sum(size for size, *_ in self._saved.values())

    def _start(self, part: int) -> None:
        if self._phase == "forward":
            self._note_saved_so_far()
        self._ledger.enter(self._phase, part)
        self._start_live[self._phase, part] = self._ledger.live_bytes

    def _enter_block(self, part: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            slot = self._call.input_slot
            hidden = args[slot] if isinstance(slot, int) else kwargs[slot]
            self._hidden = storage_key(hidden)
            self._note_side_inputs(args, kwargs)
            if part == 1:
                self._output[0] = hidden.numel() * hidden.element_size()
                self._enter_backward_at(hidden, 0)
            self._start(part)

        return hook

    def _note_side_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for leaf in tree_leaves((args, kwargs)):
            # Only in the first pass: later, memory that was given back has the old keys.
            if self._phase == "forward" and isinstance(leaf, Tensor) and not self._ledger.is_outside(leaf) and storage_key(leaf) != self._hidden:
                self._side[storage_key(leaf)] = leaf.untyped_storage().nbytes()

    def _leave_block(self, part: int, measured: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output if self._call.output_length is None else output[self._call.output_index]
            self._hidden = storage_key(hidden)
            if measured:
                self._output[part] = hidden.numel() * hidden.element_size()
                self._enter_backward_at(hidden, part)
            if part == self._last - 1:
                self._start(self._last)

        return hook

    def _enter_backward_at(self, hidden: Tensor, part: int) -> None:
        """The backward pass of a part begins when the gradient of what it gave is there."""
        if self._phase == "forward" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._ledger.enter("backward", part))
