"""Rows of the parity matrix that one CUDA card can run, alone or beside the CPU. Skipped without a card.

Two ranks on one card are not among them: NCCL refuses to share a card, and gloo's sends and receives take tensors of the CPU only.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mpfinetune.strategies.deepspeed_ops import prepare_ops
from tests.multiproc.layouts import LAYOUTS, PRECISIONS, RECOMPUTE, SHAPES_OF_BLOCK_KIND, product_problem
from tests.multiproc.training_cases import CPU, build, differences, plain_loop, run_updates, worst_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
# The reference runs on the CPU, whose kernels sum in another order; AdamW turns that into parts of a step of 1e-3.
TOLERANCE, BF16_LOSS_TOLERANCE = 1e-4, 1e-2
CARD = torch.device("cuda", 0)
DEVICES: dict[str, tuple[torch.device, ...]] = {
    "local": (CARD,),
    "local, map of blocks": (CARD, CPU),
    "local, map inside blocks": (CARD, CPU),
    "local, Pipe": (CARD, CPU),
    "zero 1": (CARD,),
    "zero 2": (CARD,),
    "zero 3": (CARD,),
    "zero 3, both offloads": (CARD,),
}


@pytest.fixture(scope="module", autouse=True)
def built_ops() -> None:
    prepare_ops("cpu", "none", "cuda", print)


@pytest.mark.parametrize(("layout", "precision", "recompute", "family"), itertools.product(DEVICES, PRECISIONS, RECOMPUTE, SHAPES_OF_BLOCK_KIND))
def test_the_numbers_of_the_plain_loop(layout: str, precision: str, recompute: str, family: str) -> None:
    problem = product_problem(family, precision)
    strategy: Any = build(problem, {**LAYOUTS[layout][0](family), "recompute": recompute}, devices=DEVICES[layout])
    result, reference = run_updates(strategy, problem), plain_loop(problem)
    if precision == "fp32":
        name, worst = worst_of(differences(result, reference))
        assert worst <= TOLERANCE, f"{name}: {worst:.2e}"
    else:
        assert result["losses"] == pytest.approx(reference["losses"], abs=BF16_LOSS_TOLERANCE)
