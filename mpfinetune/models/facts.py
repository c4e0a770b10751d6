"""What a model is made of, found from one run with fake tensors: no weights, no GPU, no code for any family.

Hooks on the modules tell in which order they execute. The repeated layers are the *blocks*; what runs before them is the
*prologue* (embeddings), what runs after them the *epilogue* (final norm, pooler, head). A parameter outside the blocks whose effect
reaches blocks by another way than the hidden states (mpnet's relative attention bias) is held by *every stage*.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from mpfinetune.config import ModelTask
from mpfinetune.errors import ModelError
from mpfinetune.models.architecture import construct_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Part = Literal["prologue", "block", "epilogue", "every_stage"]
_ROWS, _TOKENS = 2, 8
ADAPTER_NAME = "default"  # peft's own; part of the live names of adapter parameters


@dataclass(frozen=True)
class ParameterFacts:
    """One named parameter: its size and the part of the model that uses it."""

    shape: tuple[int, ...]
    part: Part
    block: int | None = None

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class LinearFacts:
    """A linear layer inside a block; ``transposed`` where its weight is [in, out] (gpt2's Conv1D)."""

    in_features: int
    out_features: int
    transposed: bool = False


@dataclass(frozen=True)
class BlockCall:
    """How the model calls its blocks: where hidden states [B, T, D] go in and where they come out.

    ``input_slot`` is a position or a keyword; ``output_length`` is None where a block returns a tensor, else its tuple's length, with
    the hidden states at ``output_index``.
    """

    input_slot: int | str
    output_length: int | None
    output_index: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """The model's structure, as far as splitting and planning need it."""

    model_type: str
    blocks_path: str
    num_blocks: int
    hidden_size: int
    block_call: BlockCall
    parameters: dict[str, ParameterFacts]
    tied_names: tuple[tuple[str, ...], ...]
    prologue_modules: tuple[str, ...]
    epilogue_modules: tuple[str, ...]
    module_names: frozenset[str] = field(repr=False)
    max_positions: int | None = None  # tokens; None where nothing limits a row's length (alibi)
    refusal: str | None = None  # why the model cannot be cut into stages; it can still be trained whole
    linears: dict[str, LinearFacts] = field(default_factory=dict, repr=False)  # those of the blocks, by module name
    embeddings: frozenset[str] = frozenset()  # canonical names of the embedding tables
    task: ModelTask = "causal_lm"
    adapted: frozenset[str] = frozenset()  # the linear layers that carry an adapter; its parameters are in ``parameters``
    remembered: dict[Any, frozenset[str]] = field(default_factory=dict, init=False, repr=False, compare=False)  # answers asked for often

    def block_name(self, index: int) -> str:
        return f"{self.blocks_path}.{index}"

    def canonical_name(self, name: str) -> str:
        """The name under which the run knows a parameter of a live module.

        The first name of a tied parameter. Where peft has wrapped a layer, the base weight keeps its Hugging Face name (``x.base_layer.weight`` is
        ``x.weight``) and the adapter's have peft's file names (``x.lora_A.default.weight`` is ``x.lora_A.weight``). Any other name is its own.
        """
        if self.adapted and name not in self.parameters:
            name = name.replace(".base_layer.", ".").replace(f".{ADAPTER_NAME}.", ".")
        return next((names[0] for names in self.tied_names if name in names), name) if self.tied_names else name

    @property
    def classification_head(self) -> frozenset[str]:
        """The parameters of a classifier that stand outside the base model; of a language model, none."""
        base = self.blocks_path.partition(".")[0]
        outside = {name for name, facts in self.parameters.items() if facts.part == "epilogue" and name.partition(".")[0] != base}
        return frozenset(outside if self.task == "sequence_classification" else ())

    @cached_property
    def adapter_names(self) -> frozenset[str]:
        """The parameters of the adapters (``adapters.facts_with_adapters`` adds them)."""
        return frozenset(name for name in self.parameters if ".lora_" in name and name.rpartition(".lora_")[0] in self.adapted)

    def numel(self, names: Iterable[str]) -> int:
        """Number of elements behind the names, tied ones counted once."""
        return sum(self.parameters[name].numel for name in {self.canonical_name(name) for name in names})

    def names_of(self, part: Part, block: int | None = None) -> list[str]:
        return [name for name, facts in self.parameters.items() if facts.part == part and facts.block == block]


@dataclass
class _Call:
    """One executed call of a ModuleList's child, in the order of execution."""

    list_name: str
    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def inspect_model(config: PretrainedConfig, task: ModelTask, attention: str = "auto") -> ModelFacts:
    """Run the model once with fake tensors and read its structure off the run.

    A model without a chain of blocks comes back with ``refusal`` set and every parameter in the prologue.

    Raises:
        ModelError: the model cannot be built or run at all.
    """
    # bf16: the grouped matrix product of mixture-of-experts models has no fake kernel for fp32, and only the structure is asked here.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = construct_model(config, task, attention, torch.bfloat16)
        recorder = _Recorder(model)
        tokens = torch.ones((_ROWS, _TOKENS), dtype=torch.int64)
        try:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        except Exception as error:
            raise ModelError(f"the model ({config.model_type}) cannot be run with fake tensors: {type(error).__name__}: {error}") from error
        try:
            facts = _facts_from_run(config.model_type, model, recorder)
        except ModelError as error:
            facts = _unsplit_facts(config.model_type, model, str(error))
        return replace(facts, task=task)


class _Recorder:
    """Hooks on every module: the calls of ModuleList children, and the phase in which each module first ran."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[_Call] = []
        self.first_call: dict[str, int] = {}  # module name -> number of block-like calls finished before its first call
        self.last_call: dict[str, int] = {}
        self.open_calls = 0
        names = {module: name for name, module in model.named_modules()}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._note_call(name))
            if isinstance(module, nn.ModuleList):
                for index, child in enumerate(module):
                    if child in names:
                        child.register_forward_hook(self._note_block(name, index), with_kwargs=True)

    def _note_call(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.first_call.setdefault(name, len(self.calls))
            self.last_call[name] = len(self.calls)

        return hook

    def _note_block(self, list_name: str, index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.calls.append(_Call(list_name, index, args, kwargs, output))

        return hook


def _facts_from_run(model_type: str, model: nn.Module, recorder: _Recorder) -> ModelFacts:
    blocks_path = _find_chain(model_type, model, recorder.calls)
    calls = [call for call in recorder.calls if call.list_name == blocks_path]
    block_call = _block_call(model_type, calls)
    hidden = [_at(call, block_call.input_slot) for call in calls]
    if hidden[0].ndim != 3 or hidden[0].shape[:2] != (_ROWS, _TOKENS):
        raise ModelError(
            f"the model ({model_type}) hands tensors of shape {tuple(hidden[0].shape)} to its blocks, not hidden states [rows, tokens, width]"
        )
    block_parameters = {id(p): int(name.split(".", 1)[0]) for name, p in _child(model, blocks_path).named_parameters()}
    everywhere = _side_inputs(model_type, calls, hidden, block_parameters)
    first_block_call = recorder.calls.index(calls[0])
    phases = _phases(model, recorder, blocks_path, first_block_call)
    parameters: dict[str, ParameterFacts] = {}
    used_in_prologue = _reachable_parameters(hidden[:1])
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(f"{blocks_path}."):
            index = int(name[len(blocks_path) + 1 :].split(".", 1)[0])
            parameters[name] = ParameterFacts(tuple(parameter.shape), "block", index)
            continue
        part: Part = phases.get(name.rpartition(".")[0], "prologue" if id(parameter) in used_in_prologue else "epilogue")
        parameters[name] = ParameterFacts(tuple(parameter.shape), "every_stage" if id(parameter) in everywhere else part)
    prologue, epilogue = (_maximal_modules(model, parameters, part) for part in ("prologue", "epilogue"))
    _share_uncovered(parameters, prologue + epilogue)
    return ModelFacts(
        model_type=model_type,
        blocks_path=blocks_path,
        num_blocks=len(calls),
        hidden_size=hidden[0].shape[-1],
        block_call=block_call,
        parameters=parameters,
        tied_names=_tied_names(model),
        prologue_modules=prologue,
        epilogue_modules=epilogue,
        module_names=frozenset(name for name, _ in model.named_modules() if name),
        max_positions=_max_positions(model),
        linears=_block_linears(model, blocks_path),
        embeddings=_embeddings(model),
    )


def _unsplit_facts(model_type: str, model: nn.Module, refusal: str) -> ModelFacts:
    parameters = {name: ParameterFacts(tuple(p.shape), "prologue") for name, p in model.named_parameters(remove_duplicate=False)}
    names = frozenset(name for name, _ in model.named_modules() if name)
    limit, tables = _max_positions(model), _embeddings(model)
    return ModelFacts(model_type, "", 0, 0, BlockCall(0, None), parameters, _tied_names(model), (), (), names, limit, refusal, {}, tables)


def _block_linears(model: nn.Module, blocks_path: str) -> dict[str, LinearFacts]:
    """Plain linear layers only: a subclass may compute something else in its forward, and stacked experts are no layers."""
    found = {}
    for name, module in model.named_modules():
        transposed = type(module).__name__ == "Conv1D"
        if name.startswith(f"{blocks_path}.") and (transposed or type(module) is nn.Linear):
            rows, columns = module.get_parameter("weight").shape
            found[name] = LinearFacts(rows, columns, True) if transposed else LinearFacts(columns, rows)
    return found


def _embeddings(model: nn.Module) -> frozenset[str]:
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in tables)


def _max_positions(model: Any) -> int | None:
    """The longest row that the positions allow. A table with a padding row (roberta) starts to count after it."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not limit:
        return None
    padding_rows = [m.padding_idx for m in model.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == limit]
    is_vocabulary = limit == getattr(config, "vocab_size", None)
    unusable = 0 if is_vocabulary else max((row + 1 for row in padding_rows if row is not None), default=0)
    return int(limit) - unusable


def _tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    by_identity: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_identity.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in by_identity.values() if len(names) > 1)


def _find_chain(model_type: str, model: nn.Module, calls: list[_Call]) -> str:
    """The outermost ModuleList whose children all ran once, in order; the largest where there are several."""
    sequences: dict[str, list[int]] = {}
    for call in calls:
        sequences.setdefault(call.list_name, []).append(call.index)
    chains = [name for name, indices in sequences.items() if indices == list(range(len(list(_child(model, name).children()))))]
    chains = [name for name in chains if not any(name.startswith(f"{other}.") for other in sequences if other != name)]
    if chains:
        return max(chains, key=lambda name: sum(p.numel() for p in _child(model, name).parameters()))
    repeated = [name for name, indices in sequences.items() if len(indices) > len(set(indices))]
    if repeated:
        outermost = min(repeated, key=len)
        raise ModelError(
            f"the model ({model_type}) runs the same layers of '{outermost}' {len(sequences[outermost])} times: all its depth shares one set "
            "of weights, so there is nothing to split over stages. Use strategy: local."
        )
    raise ModelError(f"the model ({model_type}) has no list of layers that run once each in order, so it cannot be cut into stages")


def _block_call(model_type: str, calls: list[_Call]) -> BlockCall:
    """Find the slot by identity: the object that block i returns is the object that block i+1 is given."""
    if len(calls) == 1:
        tensors = [(slot, value) for slot, value in _slots(calls[0]) if isinstance(value, Tensor) and value.requires_grad]
        slot = tensors[0][0]
        length = len(calls[0].output) if isinstance(calls[0].output, tuple) else None
        return BlockCall(slot, length)
    conventions = set()
    for before, after in pairwise(calls):
        outputs = before.output if isinstance(before.output, tuple) else (before.output,)
        matches = [
            BlockCall(slot, len(outputs) if isinstance(before.output, tuple) else None, index)
            for index, output in enumerate(outputs)
            for slot, value in _slots(after)
            if isinstance(value, Tensor) and value is output and value.requires_grad
        ]
        if not matches:
            raise ModelError(
                f"the model ({model_type}) computes something between block {before.index} and block {after.index}: "
                "a stage boundary there would lose it, so this architecture cannot be split"
            )
        conventions.add(matches[0])
    if len(conventions) > 1:
        raise ModelError(f"the model ({model_type}) calls its blocks in {len(conventions)} different ways, so it cannot be split")
    return conventions.pop()


def _slots(call: _Call) -> list[tuple[int | str, Any]]:
    return [*enumerate(call.args), *call.kwargs.items()]


def _at(call: _Call, slot: int | str) -> Any:
    return call.args[slot] if isinstance(slot, int) else call.kwargs[slot]


def _side_inputs(model_type: str, calls: list[_Call], hidden: list[Tensor], block_parameters: dict[int, int]) -> set[int]:
    """Ids of the parameters that reach a block by another way than its hidden states.

    Raises:
        ModelError: such an input comes from an earlier block; it would have to cross a stage boundary.
    """
    found: set[int] = set()
    for call, own_hidden in zip(calls, hidden, strict=True):
        leaves = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        extras = [leaf for leaf in leaves if leaf.requires_grad and leaf is not own_hidden]
        reached = _reachable_parameters(extras)
        from_blocks = [block_parameters[identity] for identity in reached if identity in block_parameters]
        if from_blocks:
            raise ModelError(
                f"the model ({model_type}) hands a result of block {min(from_blocks)} to block {call.index} besides the hidden states, "
                "so its blocks are not one chain and cannot be cut into stages"
            )
        found |= reached
    return found


def _reachable_parameters(tensors: list[Tensor]) -> set[int]:
    """Ids of the leaf parameters in the autograd graph behind the tensors."""
    pending = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found = {id(tensor) for tensor in tensors if tensor.grad_fn is None and tensor.requires_grad}
    seen = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        pending += [following for following, _ in node.next_functions if following is not None]
    return found


def _phases(model: nn.Module, recorder: _Recorder, blocks_path: str, first_block_call: int) -> dict[str, Part]:
    """The part of each module outside the blocks that ran: before the first block, or after."""
    phases: dict[str, Part] = {}
    for name, _ in model.named_modules():
        if name in recorder.first_call and not name.startswith(f"{blocks_path}.") and not blocks_path.startswith(f"{name}.") and name:
            before = recorder.first_call[name] <= first_block_call
            after = recorder.last_call[name] > first_block_call
            phases[name] = "every_stage" if before and after else "prologue" if before else "epilogue"
    return phases


def _maximal_modules(model: nn.Module, parameters: dict[str, ParameterFacts], part: Part) -> tuple[str, ...]:
    """The largest modules whose parameters all belong to the part; they can be replaced whole."""
    found: list[str] = []

    def descend(name: str) -> None:
        own = [facts.part for key, facts in parameters.items() if key.startswith(f"{name}.")] if name else ["block"]
        if own and all(other == part for other in own):
            found.append(name)
            return
        for child_name, _ in (_child(model, name) if name else model).named_children():
            descend(f"{name}.{child_name}" if name else child_name)

    descend("")
    return tuple(found)


def _share_uncovered(parameters: dict[str, ParameterFacts], replaceable: tuple[str, ...]) -> None:
    """A parameter that no replaceable module holds (set directly on the model) stays on every stage."""
    for name, facts in parameters.items():
        if facts.part in ("prologue", "epilogue") and not any(name.startswith(f"{module}.") for module in replaceable):
            parameters[name] = ParameterFacts(facts.shape, "every_stage")


def _child(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name)
