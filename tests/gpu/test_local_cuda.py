"""`strategy: local` over a card and the CPU: the only place where two kinds of device really meet. Skipped without a card."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpfinetune.strategies.local_pipe import LocalPipeStrategy
from tests.multiproc.training_cases import CPU, SUB_BLOCK_MAPS, Problem, build, differences, local_over, plain_loop, run_updates, worst_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card: the maps over cuda:0 and cpu need one")
# The reference runs on the CPU, whose kernels sum in another order; AdamW turns that into parts of a step of 1e-3.
TOLERANCE = 1e-4
CARD = torch.device("cuda", 0)
ORDERS = [(CARD, CPU), (CPU, CARD)]


@pytest.mark.parametrize("devices", ORDERS, ids=["card first", "cpu first"])
@pytest.mark.parametrize("family", sorted(SUB_BLOCK_MAPS))
def test_a_map_inside_blocks_equals_the_plain_loop(family: str, devices: tuple[torch.device, ...]) -> None:
    problem = Problem(family)
    strategy = build(problem, local_over(device_map=SUB_BLOCK_MAPS[family]), devices=devices)
    assert {parameter.device for parameter in strategy.named_parameters().values()} == set(devices)
    placement = strategy.plan.placement
    assert placement is not None
    for name, buffer in strategy.stages[0].model.named_buffers():
        assert buffer.device == devices[placement.device_of(name)], name
    assert worst_of(differences(run_updates(strategy, problem), plain_loop(problem)))[1] < TOLERANCE


@pytest.mark.parametrize("devices", ORDERS, ids=["card first", "cpu first"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "mpnet"])
def test_microbatches_over_both_equal_the_plain_loop(family: str, devices: tuple[torch.device, ...]) -> None:
    problem = Problem(family)
    strategy: Any = build(problem, local_over(local_overlap=True), devices=devices)
    assert isinstance(strategy, LocalPipeStrategy)
    assert len(strategy._copies) == (family in ("gpt2", "mpnet"))  # the tied head; the relative attention bias of every stage
    result = run_updates(strategy, problem)
    strategy.close()
    assert worst_of(differences(result, plain_loop(problem)))[1] < TOLERANCE
