"""Two stages, chained by hand in one process, are the whole model bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.models.stage import StageModule, StageSpan, _Stub, _ZerosStub
from mpfinetune.planning.partition import spans_from_sizes
from mpfinetune.strategies.build import build_stage
from tests.families import VOCAB_SIZE, task_of, tiny_config
from tests.multiproc.training_cases import Problem, run_config

# Blocks that return tensors, tuples of one and of two; tied; learned positions; several attention kinds; experts; a bias for every stage.
CHAINED = ("llama", "gpt2", "gpt_neo", "bloom", "falcon", "gemma2", "mixtral", "bert", "modernbert", "mpnet", "deberta-v2")
CUTS = ((2, 2), (1, 3), (0, 4), (4, 0), (1, 2, 1))


@cache
def facts_of(family: str) -> ModelFacts:
    return inspect_model(tiny_config(family), task_of(family))


def stage_of(family: str, span: StageSpan, precision: str = "fp32") -> StageModule:
    config = run_config(Problem(family, precision=precision), strategy="local", partition={})
    return build_stage(config, tiny_config(family), facts_of(family), span, torch.device("cpu"), None)[0]


def chain_of(family: str, sizes: tuple[int, ...]) -> list[StageModule]:
    """The stages, their tied copies made equal as the strategy does before the first step."""
    facts, first = facts_of(family), {}
    stages = [stage_of(family, span) for span in spans_from_sizes(sizes)]
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            parameter.data.copy_(first.setdefault(facts.canonical_name(name), parameter.data))
    return stages


def whole_of(family: str) -> StageModule:
    return stage_of(family, StageSpan(0, 4, True, True))


def batch_of(padding: str, rows: int = 3, tokens: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(rows, tokens, dtype=torch.int64)
    for row, padded in enumerate((0, 3, 5)):
        if padding == "right" and padded:
            mask[row, -padded:] = 0
        elif padding == "left":
            mask[row, :padded] = 0
    return {"input_ids": torch.randint(3, VOCAB_SIZE, (rows, tokens), generator=generator) * mask, "attention_mask": mask}


def run_chain(stages: list[StageModule], batch: dict[str, Tensor]) -> Tensor:
    """The boundary is a leaf, as it is after a receive; its gradient is handed back as a send would."""
    hidden: Tensor | None = None
    boundaries: list[tuple[Tensor, Tensor]] = []
    for stage in stages:
        output = stage(**batch) if hidden is None else stage(hidden, **batch)
        if stage is not stages[-1]:
            hidden = output.detach().requires_grad_()
            boundaries.append((output, hidden))
    output.square().sum().backward()
    for sent, received in reversed(boundaries):
        sent.backward(received.grad)
    return output.detach()


def gradients(stages: list[StageModule], facts: ModelFacts) -> dict[str, Tensor]:
    """Summed over the copies of tied and shared parameters."""
    summed: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:
                key = facts.canonical_name(name)
                summed[key] = summed[key] + parameter.grad if key in summed else parameter.grad
    return summed


@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("family", CHAINED)
def test_a_chain_of_stages_is_the_whole_model(family: str, sizes: tuple[int, ...]) -> None:
    facts = facts_of(family)
    whole, stages = whole_of(family), chain_of(family, sizes)
    batch = batch_of("right")
    expected = run_chain([whole], batch)
    assert torch.equal(run_chain(stages, batch), expected)
    found, real = gradients(stages, facts), gradients([whole], facts)
    assert found.keys() == real.keys()
    several = {facts.canonical_name(n) for n in facts.names_of("every_stage")} | {names[0] for names in facts.tied_names}
    for name, gradient in real.items():
        if name in several:  # a sum in another order
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(found[name], gradient), name


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma2", "bert", "mpnet"])
def test_masks_reach_every_stage(family: str, padding: str) -> None:
    batch = batch_of(padding)
    stages = chain_of(family, (2, 2))
    expected = run_chain([whole_of(family)], batch)
    assert torch.equal(run_chain(stages, batch), expected)
    # The test would not see a mask that is ignored, were its effect too small.
    hidden = stages[0](**batch)
    without = stages[1](hidden, **{**batch, "attention_mask": torch.ones_like(batch["attention_mask"])})
    assert (padding == "none") == bool(torch.allclose(without, expected, atol=1e-6))


def test_token_types_reach_the_embeddings() -> None:
    types = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]]).expand(3, 9)
    batch = {**batch_of("right"), "token_type_ids": types}
    expected = run_chain([whole_of("bert")], batch)
    assert torch.equal(run_chain(chain_of("bert", (2, 2)), batch), expected)
    assert not torch.equal(run_chain([whole_of("bert")], batch_of("right")), expected)


@pytest.mark.parametrize("family", CHAINED)
def test_a_stage_holds_its_own_parameters_under_their_names(family: str) -> None:
    facts, real = facts_of(family), dict(whole_of(family).model.named_parameters(remove_duplicate=False))
    for stage in chain_of(family, (1, 2, 1)):
        held = dict(stage.model.named_parameters(remove_duplicate=False))
        assert sorted(held) == sorted(stage.span.parameter_names(facts))
        assert all(torch.equal(parameter, real[name]) for name, parameter in held.items())
        stubs = [module for module in stage.modules() if isinstance(module, _Stub)]
        assert stubs and not any(list(stub.parameters()) + list(stub.buffers()) for stub in stubs)


def test_a_stage_drops_the_weights_of_the_others() -> None:
    """The zeros' stub keeps the module it stands for, for its shapes only: on meta, so that it takes no memory."""
    stage = chain_of("llama", (2, 2))[1]
    kept = [module._on_meta[0] for module in stage.modules() if isinstance(module, _ZerosStub)]
    assert len(kept) == 1 and all(parameter.is_meta for parameter in kept[0].parameters())


def test_a_stub_keeps_what_the_loop_reads_off_a_layer() -> None:
    stage = chain_of("gemma2", (2, 2))[1]
    whole = whole_of("gemma2")
    kinds = [getattr(layer, "attention_type", None) for layer in stage.model.model.layers]
    assert kinds == [getattr(layer, "attention_type", None) for layer in whole.model.model.layers]


def test_the_zeros_of_a_stub_take_no_memory() -> None:
    stub = _ZerosStub(nn.Embedding(10, 4, device="meta"))
    zeros = stub(torch.ones(2, 3, dtype=torch.int64))
    assert zeros.shape == (2, 3, 4) and zeros.untyped_storage().nbytes() == 4 and not zeros.any()


def test_stage_0_leaves_the_forward_after_its_last_block() -> None:
    stage = chain_of("llama", (2, 2))[0]
    output = stage(**batch_of("right"))
    assert output.shape == (3, 9, 32)
    last = stage.model.model.layers[1]
    seen: list[Any] = []
    last.register_forward_hook(lambda module, args, out: seen.append(out))
    assert torch.equal(stage(**batch_of("right")), seen[0])


@pytest.mark.parametrize("index", [0, 1])
def test_hidden_states_are_for_the_later_stages_only(index: int) -> None:
    stages = chain_of("llama", (2, 2))
    hidden = (torch.zeros(3, 9, 32),) if index == 0 else ()
    with pytest.raises(AssertionError, match="for the stages after the first"):
        stages[index](*hidden, **batch_of("right"))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bert", "phi"])
def test_every_stage_has_the_buffers_of_its_modules_on_its_device(family: str) -> None:
    """Rotary tables and masks, also those that no file holds; real, not on meta, and equal to the whole model's."""
    real = dict(whole_of(family).model.named_buffers())
    for stage in chain_of(family, (2, 2)):
        buffers = dict(stage.model.named_buffers())
        assert all(buffer.device.type == "cpu" and torch.equal(buffer, real[name]) for name, buffer in buffers.items())
        assert all(name in buffers for name in real if "rotary" in name)


def test_evaluation_after_training_and_back() -> None:
    stages = chain_of("bert", (2, 2))
    batch = batch_of("right")
    for stage in stages:
        stage.eval()
        assert not any(module.training for module in stage.modules())
    with torch.no_grad():
        first = stages[1](stages[0](**batch), **batch)
    assert torch.equal(run_chain([stage.train() for stage in stages], batch), first)
