"""What each part of a model costs for one microbatch, measured on a run with fake tensors: no weights, no GPU, no formula for any family.

One forward and one backward pass of the model as it will be trained (dtype, frozen parameters, adapters, quantised layers, loss) tell
what autograd keeps (saved-tensor hooks; a storage counted once, parameters left out), what is allocated in passing, and the floating
point operations. Blocks of the same build are measured once. Everything is measured without recompute: what a recomputed block keeps and
needs follows from its ``PartCost``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from mpfinetune.config import AdapterConfig, ModelTask
from mpfinetune.errors import ModelError
from mpfinetune.models.adapters import inject_fake_adapters
from mpfinetune.models.architecture import construct_model
from mpfinetune.models.facts import ModelFacts
from mpfinetune.models.fake_kernels import CudaAttention, QuantisedStandIn
from mpfinetune.models.fake_run import Ledger, Observer
from mpfinetune.models.quantize import Kind, quantised_bytes, quantised_layers
from mpfinetune.models.trainable import freeze

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class PartCost:
    """The prologue, one block, or the epilogue with the loss, for one microbatch of ``ModelCosts.rows`` x ``ModelCosts.tokens``.

    Peaks are above what was there when the part began: what the parts before it keep, its input and the side inputs.
    """

    name: str
    saved_bytes: int = 0  # kept for the backward pass, made by this part
    input_bytes: int = 0  # the hidden states that enter, where the part keeps them for the backward pass; else 0
    boundary_bytes: int = 0  # the hidden states that leave; of the epilogue the logits
    forward_peak_bytes: int = 0  # most bytes alive during the forward pass, what it keeps included
    backward_peak_bytes: int = 0  # the same of the backward pass, with the weights' gradients of one microbatch on their way; 0: it has none
    evaluation_peak_bytes: int = 0  # of a forward pass that keeps nothing
    forward_flops: int = 0
    backward_flops: int = 0
    forward_moved_bytes: int = 0  # read and written by the operations of the forward pass, weights included
    backward_moved_bytes: int = 0
    weight_bytes: int = 0  # of the weights as they are held; each is read once a pass

    @property
    def kept_bytes(self) -> int:
        """What is held for the backward pass, the part's input included."""
        return self.saved_bytes + self.input_bytes


@dataclass(frozen=True)
class ModelCosts:
    """The costs of all parts, without recompute. ``parts`` are the prologue, the blocks in order, the epilogue with the loss.

    Side inputs are what the model hands to its blocks besides the hidden states (masks, rotary tables); every stage makes them itself.
    A model without a chain of blocks has two parts, and all is in the second.
    """

    rows: int
    tokens: int
    parts: tuple[PartCost, ...]
    side_input_bytes: int  # all side inputs; alive during a stage's forward pass, and until its backward pass where a block is recomputed
    side_saved_bytes: int  # those of them that some block keeps for its backward pass

    @property
    def prologue(self) -> PartCost:
        return self.parts[0]

    @property
    def blocks(self) -> tuple[PartCost, ...]:
        return self.parts[1:-1]

    @property
    def epilogue(self) -> PartCost:
        return self.parts[-1]

    @property
    def saved_bytes(self) -> int:
        """All that one microbatch keeps in one process that holds the whole model."""
        return sum(part.kept_bytes for part in self.parts) + self.side_saved_bytes


@dataclass(frozen=True)
class CostQuestion:
    """Of what the costs are asked. ``learning`` are canonical names.

    Rows are taken to be of different lengths, so that the model makes masks: a microbatch without padding may need less.
    """

    task: ModelTask
    attention: str
    dtype: torch.dtype
    learning: frozenset[str]
    quantize: Kind = "none"
    adapter: AdapterConfig | None = None
    target: Literal["cpu", "cuda"] = "cpu"
    capability: tuple[int, int] | None = None  # of a CUDA card; None: not known, taken as 8.0 or more
    packed: bool = False  # rows of several rows, which the model tells apart by their positions


class CostMeter:
    """Measures one model at any size of microbatch. The model is built once, a measurement takes a fraction of a second, and is kept.

    Args:
        config: of the model, with a pad token where its head wants one.
        loss_sum: (logits, labels) -> the sum of the loss, as the run takes it.

    Raises:
        ModelError: the model cannot be run with fake tensors as it is asked for.
    """

    def __init__(self, config: PretrainedConfig, facts: ModelFacts, question: CostQuestion, loss_sum: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._facts, self._question, self._loss_sum = facts, question, loss_sum
        self._float_labels = question.task == "sequence_classification" and getattr(config, "num_labels", 0) == 1
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._measured: dict[tuple[int, int], ModelCosts] = {}
        with self._fake:
            self._model = construct_model(config, question.task, question.attention, question.dtype)
        self._like = _representatives(config, facts, question, self._model)
        self._prepare_model()

    def measure(self, rows: int, tokens: int) -> ModelCosts:
        """The costs of a microbatch of [rows, tokens].

        Every size is run: what is kept grows along a straight line with the rows, but peaks do not, since where they are changes.

        Raises:
            ModelError: the model asks for values, or an operation has no fake kernel.
        """
        if (rows, tokens) not in self._measured:
            self._measured[rows, tokens] = self._run(rows, tokens)
        return self._measured[rows, tokens]

    def _prepare_model(self) -> None:
        facts, question = self._facts, self._question
        own = sorted(set(self._like))
        self._untie()
        prefixes = tuple(f"{facts.block_name(index)}." for index in own)
        layers = {name: linear for name, linear in quantised_layers(facts, question.quantize).items() if name.startswith(prefixes)}
        for name, size in layers.items():
            bias: Any = self._model.get_submodule(name).bias
            with self._fake:
                stand_in = QuantisedStandIn(size.in_features, size.out_features, bias, question.dtype, question.quantize == "int8")
            self._model.set_submodule(name, stand_in)
        if question.adapter is not None and facts.adapted:
            adapted = sorted(name for name in facts.adapted if name.startswith(prefixes))
            inject_fake_adapters(self._model, facts, question.adapter, adapted, self._fake)
        freeze(self._model, facts, question.learning)
        for index, like in enumerate(self._like):
            if index != like:
                block = self._model.get_submodule(facts.block_name(index))
                block.forward = self._pass_through  # type: ignore[method-assign]
        for parameter in self._model.parameters():
            # A microbatch's gradient is added to the sum, which is counted elsewhere, and freed.
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def _untie(self) -> None:
        """Give every tied name a parameter of its own, as stages in different processes have. What a tie costs is ``ModelCosts``' reader's sum:
        one process holds the head's gradient of the tied matrix until the embedding's is there."""
        for first, *others in self._facts.tied_names:
            for name in others:
                owner, _, leaf = name.rpartition(".")
                with self._fake:
                    setattr(self._model.get_submodule(owner), leaf, nn.Parameter(torch.empty_like(self._model.get_parameter(first))))

    def _pass_through(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of a block that is built like another."""
        call = self._facts.block_call
        hidden = args[call.input_slot] if isinstance(call.input_slot, int) else kwargs[call.input_slot]
        if call.output_length is None:
            return hidden
        return tuple(hidden if index == call.output_index else None for index in range(call.output_length))

    def _run(self, rows: int, tokens: int) -> ModelCosts:
        question = self._question
        try:
            with self._fake, ExitStack() as stack, _quiet_shape_functions():
                # Values are not known in a fake run, so the model makes its masks.
                told_by = "position_ids" if question.packed else "attention_mask"
                batch = {name: torch.ones((rows, tokens), dtype=torch.int64) for name in ("input_ids", told_by)}
                labels = self._labels(rows, tokens)
                ledger = Ledger((*self._model.parameters(), *self._model.buffers(), *batch.values(), labels))
                observer = Observer(self._model, self._facts, ledger, [index == like for index, like in enumerate(self._like)])
                stack.callback(observer.remove)
                if question.target == "cuda":
                    stack.enter_context(CudaAttention(ledger, question.capability))
                stack.enter_context(ledger)
                self._pass(observer, batch, labels)
        except Exception as error:  # whatever a model's code raises when it is run without values
            reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
            raise ModelError(
                f"the model ({self._facts.model_type}) cannot be measured with fake tensors: {type(error).__name__}: {reason}"
            ) from error
        return ModelCosts(rows, tokens, self._parts(observer), *observer.side_bytes())

    def _pass(self, observer: Observer, batch: dict[str, Tensor], labels: Tensor) -> None:
        """One training pass and one evaluation pass; both begin in the prologue and end with the loss."""
        self._model.train()
        observer.begin("forward")
        with saved_tensors_hooks(observer.note_saved, lambda kept: kept.tensor):
            loss = self._loss(observer, batch, labels)
        if loss.requires_grad:
            observer.begin_backward()
            loss.backward()
        del loss
        self._model.eval()
        observer.begin("evaluation")
        with torch.no_grad():
            self._loss(observer, batch, labels)

    def _loss(self, observer: Observer, batch: dict[str, Tensor], labels: Tensor) -> Tensor:
        # As in the stages: nothing but the logits outlives the forward pass.
        logits = self._model(**batch).logits
        observer.note_logits(logits)
        return self._loss_sum(logits, labels)

    def _labels(self, rows: int, tokens: int) -> Tensor:
        if self._question.task == "causal_lm":
            return torch.ones((rows, tokens), dtype=torch.int64)
        return torch.ones((rows,), dtype=torch.float32 if self._float_labels else torch.int64)

    def _parts(self, observer: Observer) -> tuple[PartCost, ...]:
        last = len(self._like) + 1
        names = ["prologue", *(f"block {index}" for index in range(len(self._like))), "epilogue"]
        sources = [0, *(like + 1 for like in self._like), last]
        weights = self._weight_bytes()
        return tuple(
            PartCost(name, **observer.numbers(source), weight_bytes=size) for name, source, size in zip(names, sources, weights, strict=True)
        )

    def _weight_bytes(self) -> list[int]:
        facts, question = self._facts, self._question
        layers = quantised_layers(facts, question.quantize)
        sums = [0] * (len(self._like) + 2)
        for name, parameter in facts.parameters.items():
            owner, _, leaf = name.rpartition(".")
            if leaf == "weight" and owner in layers:
                size = quantised_bytes(layers[owner], question.quantize)
            else:
                size = parameter.numel * (4 if name in facts.adapter_names else question.dtype.itemsize)
            if not self._like or parameter.part == "epilogue":
                sums[-1] += size
            elif parameter.block is not None:
                sums[parameter.block + 1] += size
            else:
                sums[0] += size
        return sums


@contextmanager
def _quiet_shape_functions() -> Iterator[None]:
    """torch logs a page for a shape function that fails; its error says enough."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _representatives(config: PretrainedConfig, facts: ModelFacts, question: CostQuestion, model: nn.Module) -> list[int]:
    """For each block the first one of the same build: shapes, what learns in it and before it, what is quantised, its kind of attention."""
    if facts.refusal:
        return []
    quantised = quantised_layers(facts, question.quantize)
    kinds = getattr(config.get_text_config(), "layer_types", None) or [None] * facts.num_blocks
    attributes = _plain_attributes([model.get_submodule(facts.block_name(index)) for index in range(facts.num_blocks)])
    reached = any(facts.canonical_name(name) in question.learning for name, p in facts.parameters.items() if p.part in ("prologue", "every_stage"))
    firsts: dict[Any, int] = {}
    found = []
    for index in range(facts.num_blocks):
        prefix = len(facts.block_name(index))
        names = facts.names_of("block", index)
        learns = [facts.canonical_name(name) in question.learning for name in names]
        tensors = tuple(
            (name[prefix:], facts.parameters[name].shape, flag, name.rpartition(".")[0] in quantised)
            for name, flag in zip(names, learns, strict=True)
        )
        build = (reached, kinds[index], tensors, attributes[index])
        found.append(firsts.setdefault(build, index))
        reached = reached or any(learns)
    return found


def _plain_attributes(blocks: list[nn.Module]) -> list[frozenset[Any]]:
    """Per block the numbers and words that its modules carry, without those that are the block's own place in the list."""
    found: list[dict[tuple[str, str, str], Any]] = [
        {
            (name, type(module).__name__, key): value
            for name, module in block.named_modules()
            for key, value in vars(module).items()
            if not key.startswith("_") and isinstance(value, (bool, int, float, str))
        }
        for block in blocks
    ]
    places = {key for key in found[0] if all(attributes.get(key) == index for index, attributes in enumerate(found))} if len(found) > 1 else set()
    return [frozenset((key, value) for key, value in attributes.items() if key not in places) for attributes in found]
