"""The promise: however a model is split, a run has the numbers of one big card.

Each case trains a tiny random model for a few updates of padded, uneven batches and compares the loss, the global gradient norm, every
parameter and the evaluation logits with two references: the strategy ``local``, and a plain PyTorch loop that knows nothing of the product's
step (none with adapters: there ``local`` is the reference). Two tables: ``COLUMNS``, ways of splitting and feeding, each for the families that it may
treat differently; and the product of ``LAYOUTS`` with precision, recompute and family, of which every pair of values is run by default.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch

from mpfinetune.errors import ConfigError
from tests.families import FAMILIES
from tests.multiproc.layouts import (
    GRADIENTS_OFFLOADED,
    LAYOUTS,
    LOCAL,
    OFFLOADED,
    PRECISIONS,
    PRODUCT,
    RECOMPUTE,
    SHAPES_OF_BLOCK_KIND,
    WHOLE_BLOCKS,
    product_problem,
    split_for_good,
    zero,
)
from tests.multiproc.rank_pool import RankPool
from tests.multiproc.training_cases import (
    SUB_BLOCK_MAPS,
    Problem,
    adapter_problem,
    differences,
    local_over,
    make_batches,
    plain_loop,
    train,
    worst_of,
)

pytestmark = pytest.mark.usefixtures("one_thread", "built_ops")
TOLERANCE = 1e-5
# int8 computes in fp16 and rounds what enters a layer to 8 bits, so a last bit of fp32 can become a whole step of 1/127.
INT8_TOLERANCE = 1e-3
BF16_LOSS_TOLERANCE = 1e-2
CASE = "tests.multiproc.training_cases:train"
FOUR_STAGES = {"partition": {"rule": "uniform", "num_stages": 4}}
THREE_STAGES = {"partition": {"rule": "uniform", "num_stages": 3}}
# The engine and its first import may take long on a busy machine.
LIMIT_SECONDS = 180.0


@dataclass(frozen=True)
class Column:
    """One way of splitting or feeding a model, and the families it is run for."""

    families: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)  # of the config
    problem: dict[str, Any] = field(default_factory=dict)  # fields of Problem
    ranks: int = 2  # 0: in the test's own process
    tolerance: float = TOLERANCE
    adapter: dict[str, Any] | None = None  # keys of the config for ``adapter_problem``; None: no adapter

    def problem_of(self, family: str) -> Problem:
        return replace(Problem(family) if self.adapter is None else adapter_problem(family, **self.adapter), **self.problem)


def by_map(*stages: str) -> dict[str, Any]:
    return {"partition": {"stages": list(stages)}}


def on_blocks(*blocks: int) -> dict[str, Any]:
    """LoRA on the named blocks of a llama only: the other stages learn nothing."""
    return {"adapter": {"type": "lora", "rank": 4, "targets": [f"model.layers.{block}.self_attn.q_proj" for block in blocks]}}


def micro(size: int) -> dict[str, Any]:
    return {"batch": {"global_size": 8, "micro_size": size}}


ALL = (*FAMILIES, "deberta-v2")
LABEL_COUNTS = {"label_counts": (1, 1, 6, 6), "shapes": ((4, 8), (4, 8))}
OWN_INPUT = ("self_attn.o_proj", "mlp.down_proj")  # of a llama's layers
ONLY_THE_LAST_BLOCK_LEARNS = {"frozen": ("transformer.w*", "transformer.h.[012].*", "transformer.ln_f*")}
SCORED_BY_LAST_TOKEN = {"task": "sequence_classification", "model_changes": (("pad_token_id", 0),)}

COLUMNS: dict[str, Column] = {
    "1f1b": Column(ALL),
    "gpipe": Column(ALL, {"schedule": "gpipe"}),
    "interleaved_1f1b": Column(SHAPES_OF_BLOCK_KIND, {"schedule": "interleaved_1f1b", **FOUR_STAGES}),
    "interleaved_zero_bubble": Column(SHAPES_OF_BLOCK_KIND, {"schedule": "interleaved_zero_bubble", **FOUR_STAGES}),
    "zbv": Column(SHAPES_OF_BLOCK_KIND, {"schedule": "zbv", **FOUR_STAGES}),
    "three_stages_per_rank": Column(
        ("llama",),
        {"schedule": "interleaved_1f1b", "stages_per_rank": 3, "partition": {"rule": "uniform", "num_stages": 6}},
        {"model_changes": (("num_hidden_layers", 6),)},
    ),
    # stages x replicas
    "replicas": Column(SHAPES_OF_BLOCK_KIND, ranks=4),
    "replicas_zbv": Column(("gpt2",), {"schedule": "zbv", **FOUR_STAGES, **micro(1)}, ranks=4),
    "replicas_odd_micro": Column(("gpt2",), micro(1), {"shapes": ((5, 7), (3, 11))}, ranks=4),
    "four_stages": Column(("llama", "gpt2", "mpnet"), FOUR_STAGES, ranks=4),
    "three_stages": Column(("llama", "gpt2", "mpnet"), THREE_STAGES, ranks=3),
    # cuts by hand
    "embed_alone": Column(("llama", "gpt2", "bloom", "bert", "mpnet"), by_map("embed", "0-3, head")),
    "head_alone": Column(("llama", "gpt2", "bloom", "bert", "mpnet"), by_map("embed, 0-3", "head")),
    "most_on_the_last": Column(SHAPES_OF_BLOCK_KIND, by_map("embed, 0", "1-3, head")),
    "embed_and_head_alone": Column(("llama", "gpt2"), by_map("embed", "0-1", "2-3", "head"), ranks=4),
    # batches
    "left_padded": Column(("llama", "mistral", "gpt2", "bloom", "bert"), problem={"left_padded": True}),
    "token_types": Column(("bert",), problem={"token_types": True}),
    # several rows in one, against the plain loop on the rows alone
    "packed": Column(("llama", "mistral", "gemma3_text", "gpt2", "deepseek_v3"), problem={"packed": True}),
    "packed_recompute_replicas": Column(("llama",), {"recompute": "full"}, {"packed": True}, ranks=4),
    "packed_zero_2": Column(("gpt2",), zero(2), {"packed": True}),
    "packed_pipe": Column(("llama",), local_over(local_overlap=True), {"packed": True}, ranks=0),
    "packed_lora_nf4": Column(("llama",), problem={"packed": True}, adapter={"quantize": "nf4"}),
    "micro_3_of_8_7_5": Column(SHAPES_OF_BLOCK_KIND, micro(3)),
    "micro_1_with_one_row": Column(("llama", "bert"), micro(1), {"shapes": ((8, 6), (1, 9), (2, 4))}),
    "accumulate_1": Column(("llama",), {"batch": {"global_size": 4, "micro_size": 1}}, LABEL_COUNTS),
    "accumulate_2": Column(("llama",), {"batch": {"global_size": 4, "micro_size": 2}}, LABEL_COUNTS),
    "accumulate_4": Column(("llama",), {"schedule": "gpipe", "batch": {"global_size": 4, "micro_size": 4}}, LABEL_COUNTS),
    # tasks, losses and update rules
    "last_token": Column(("llama", "gpt2"), problem=SCORED_BY_LAST_TOKEN),
    "last_token_left_padded": Column(("llama",), problem={**SCORED_BY_LAST_TOKEN, "left_padded": True}),
    "regression": Column(("bert", "roberta"), problem={"num_labels": 1}),
    "five_labels": Column(("distilbert",), problem={"num_labels": 5}),
    "rows_ignored": Column(SHAPES_OF_BLOCK_KIND, problem={"ignored": True}),
    "regression_ignored": Column(("bert",), problem={"ignored": True, "num_labels": 1}),
    "sgd_momentum": Column(SHAPES_OF_BLOCK_KIND, problem={"optimizer": (("name", "sgd"), ("momentum", 0.9), ("lr", 1e-3))}),
    "no_clipping": Column(("gpt2",), problem={"clip_norm": None}),
    "eager_attention": Column(("llama", "bert"), {"model": {}}),
    # DeepSpeed's engines. The norm is taken group by group over all ranks, and the first rank here has no parameter without decay
    "offload_embed_alone": Column(("llama",), {**OFFLOADED, **by_map("embed", "0-3, head")}),
    # a rank on which nothing learns must have the same kind of engine, or the two do not meet in the same exchanges
    "offload_last_block_learns_bf16": Column(
        ("gpt2",), OFFLOADED, {"precision": "bf16", "config": (("trainable", ["transformer.h.3"]),)}, tolerance=BF16_LOSS_TOLERANCE
    ),
    "offload_zbv": Column(("gpt2",), {**OFFLOADED, "schedule": "zbv", **FOUR_STAGES}),
    "offload_gradients_looped": Column(("llama",), {**GRADIENTS_OFFLOADED, "schedule": "interleaved_1f1b", **FOUR_STAGES}),
    "offload_gradients_gpipe": Column(("gpt2",), {**GRADIENTS_OFFLOADED, "schedule": "gpipe"}),
    "offload_gradients_embed_alone": Column(("llama",), {**GRADIENTS_OFFLOADED, **by_map("embed", "0-3, head")}),
    "offload_gradients_last_block": Column(("gpt2",), GRADIENTS_OFFLOADED, ONLY_THE_LAST_BLOCK_LEARNS),
    "offload_gradients_lora_nf4": Column(("llama",), GRADIENTS_OFFLOADED, adapter={"quantize": "nf4"}),
    "offload_replicas": Column(("llama", "gpt2"), OFFLOADED, ranks=4),
    "offload_last_block_learns": Column(("gpt2",), OFFLOADED, ONLY_THE_LAST_BLOCK_LEARNS),
    "zero_1_offload": Column(("gpt2",), zero(1, optimizer="cpu")),
    "zero_2_offload": Column(("llama",), zero(2, optimizer="cpu")),
    # adapters, quantised bases and stages without anything to learn
    "lora": Column(SHAPES_OF_BLOCK_KIND, adapter={}),
    "lora_gpipe": Column(("llama",), {"schedule": "gpipe"}, adapter={}),
    "lora_zbv": Column(("llama",), {"schedule": "zbv", **FOUR_STAGES}, adapter={}),
    "lora_nf4": Column(("llama", "bert"), adapter={"quantize": "nf4"}),
    "lora_int8": Column(("llama", "bert"), adapter={"quantize": "int8"}, tolerance=INT8_TOLERANCE),
    "lora_offload": Column(SHAPES_OF_BLOCK_KIND, OFFLOADED, adapter={}),
    "lora_nf4_bf16_offload_recompute": Column(
        ("llama",), {**OFFLOADED, "recompute": "full"}, adapter={"quantize": "nf4", "precision": "bf16"}, tolerance=BF16_LOSS_TOLERANCE
    ),
    "lora_replicas_of_the_whole": Column(("llama",), {"partition": {"num_stages": 1}}, adapter={}),
    "lora_map_of_blocks": Column(("bert",), local_over(device_map=WHOLE_BLOCKS["bert"]), adapter={"quantize": "int8"}, ranks=0),
    "lora_map_inside_blocks": Column(("gpt2",), local_over(device_map=SUB_BLOCK_MAPS["gpt2"]), adapter={"quantize": "nf4"}, ranks=0),
    "lora_pipe": Column(("llama",), local_over(local_overlap=True), adapter={"quantize": "nf4"}, ranks=0),
    "rslora": Column(("llama",), adapter={"adapter": {"type": "rslora", "rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}}),
    "dora_nf4": Column(("bert",), adapter={"quantize": "nf4", "adapter": {"type": "dora", "rank": 4, "targets": ["query", "value"]}}),
    "lora_first_frozen": Column(("llama",), adapter=on_blocks(2, 3)),
    "lora_last_frozen": Column(("llama",), adapter=on_blocks(0)),
    "lora_middle_learns": Column(("llama",), {"schedule": "interleaved_1f1b", **FOUR_STAGES}, adapter=on_blocks(1)),
    "lora_zbv_frozen_ends": Column(("llama",), {"schedule": "zbv", **FOUR_STAGES}, adapter=on_blocks(1)),
    "lora_zero_bubble_frozen_ends": Column(("llama",), {"schedule": "interleaved_zero_bubble", **FOUR_STAGES}, adapter=on_blocks(2)),
    "lora_recompute_frozen_first": Column(("llama",), {"recompute": "full"}, adapter=on_blocks(3)),
    "lora_pooler_learns": Column(("bert",), adapter={"trainable": ["bert.pooler"]}),
    # their engine is fp32, whatever the base is in
    "zero_1_lora_int8": Column(("bert",), zero(1), adapter={"quantize": "int8"}, tolerance=INT8_TOLERANCE),
    "zero_1_offload_dora": Column(("bert",), zero(1, optimizer="cpu"), adapter={"adapter": {"type": "dora", "rank": 4, "targets": ["query"]}}),
    "zero_2_lora": Column(("gpt2",), zero(2), adapter={}),
    "zero_2_offload_lora_nf4_bf16": Column(
        ("llama",), zero(2, optimizer="cpu"), adapter={"quantize": "nf4", "precision": "bf16"}, tolerance=BF16_LOSS_TOLERANCE
    ),
    "zero_3_rslora": Column(("gpt2",), split_for_good(), adapter={"adapter": {"type": "rslora", "rank": 4, "alpha": 8}}),
    "zero_3_dora_recompute": Column(
        ("bert",),
        {**split_for_good(optimizer="cpu", parameters="cpu"), "recompute": "full"},
        adapter={"adapter": {"type": "dora", "rank": 4, "targets": ["query", "value"]}},
    ),
    # Layers with an input of their own: stage 3 adds up the gradients of an input that several share in another order, and bf16 rounds each sum.
    "zero_3_lora_bf16_frozen_ends": Column(
        ("llama",),
        split_for_good(optimizer="cpu", parameters="cpu"),
        adapter={
            "precision": "bf16",
            "adapter": {"type": "lora", "rank": 4, "targets": [f"model.layers.{block}.{layer}" for block in (1, 2) for layer in OWN_INPUT]},
        },
        tolerance=BF16_LOSS_TOLERANCE,
    ),
    "head_learns": Column(("bert",), adapter={"adapter": {"type": "none"}, "trainable": ["head"]}),
}
MATRIX = [pytest.param(family, name, id=f"{name}-{family}") for name, column in COLUMNS.items() for family in column.families]


def _is_in_default_tier(layout: str, precision: str, recompute: str, family: str) -> bool:
    """With these every pair of values of two different axes occurs; ``test_every_pair_is_run`` holds it."""
    diagonal = list(LAYOUTS).index(layout) + RECOMPUTE.index(recompute)
    return PRECISIONS[diagonal % 2] == precision and SHAPES_OF_BLOCK_KIND[diagonal % 3] == family


PAIRWISE = [case for case in PRODUCT if _is_in_default_tier(*case)]
PRODUCT_CASES = [pytest.param(*case, id="-".join(case).replace(" ", "_"), marks=() if case in PAIRWISE else pytest.mark.slow) for case in PRODUCT]


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


def run(request: pytest.FixtureRequest, ranks: int, case: str = CASE, **arguments: Any) -> list[dict[str, Any]]:
    if not ranks:
        return [train(**arguments)]
    pool: RankPool = request.getfixturevalue({2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[ranks])
    return pool.run(case, arguments, LIMIT_SECONDS)


@cache
def local_reference(problem: Problem) -> dict[str, Any]:
    return train(problem, LOCAL)


@cache
def plain_reference(problem: Problem) -> dict[str, Any]:
    return plain_loop(problem)


def references(problem: Problem) -> dict[str, dict[str, Any]]:
    """What the split runs are compared with; the two must also agree with each other."""
    if problem.config:  # adapters and quantised bases, or `trainable`: what the plain loop does not know
        return {"local": train(problem, LOCAL)}
    found = {"local": local_reference(problem), "plain": plain_reference(problem)}
    check_numbers(found["local"], found["plain"], "local against the plain loop", TOLERANCE)
    return found


def check_numbers(result: dict[str, Any], reference: dict[str, Any], what: str, tolerance: float) -> float:
    """Loss, norm, evaluation logits and every parameter that the result holds; returns the largest difference."""
    name, difference = worst_of(differences(result, reference))
    assert difference <= tolerance, f"{what}: worst difference {difference:.2e} in {name}, tolerance {tolerance:.0e}"
    return difference


def whole_logits(results: list[dict[str, Any]], rows: int) -> torch.Tensor:
    """Those of all replicas, without the fill rows at the end."""
    return torch.cat([result["logits"] for result in results if result["logits"] is not None])[:rows]


def merge(results: list[dict[str, Any]], problem: Problem) -> dict[str, Any]:
    """The run that the ranks' parts make together; what several of them hold must be the same."""
    for key in ("losses", "norms", "skipped"):
        assert all(result[key] == results[0][key] for result in results), f"the ranks report different {key}"
    held: dict[str, torch.Tensor] = {}
    types: dict[str, torch.dtype] = {}
    for result in results:
        assert result["frozen_changed"] == []
        types |= result["types"]
        for name, value in result["parameters"].items():
            assert torch.equal(value, held.setdefault(name, value)), f"the copies of {name} differ"
    first = [name for result in results if result["replica"] == 0 for name in result["first_held"]]
    assert sorted(set(first)) == sorted(first) and set(held) <= set(first)
    return {**results[0], "parameters": held, "types": types, "logits": whole_logits(results, make_batches(problem)[-1].real_rows)}


def check_split(results: list[dict[str, Any]], problem: Problem, tolerance: float, what: str) -> None:
    """A split run against its references, and the copies on its ranks against each other."""
    merged = merge(results, problem)
    for reference_name, reference in references(problem).items():
        assert sorted(merged["parameters"]) == sorted(reference["parameters"])
        assert merged["types"] == reference.get("types", merged["types"]), "a parameter is held in another type"
        check_numbers(merged, reference, f"{what} against {reference_name}", tolerance)


@pytest.mark.parametrize(("family", "column_name"), MATRIX)
def test_split_equals_whole(request: pytest.FixtureRequest, family: str, column_name: str) -> None:
    column = COLUMNS[column_name]
    problem = column.problem_of(family)
    changes = dict(column.changes)
    if "model" in changes:
        changes["model"] = {"path": "in memory", "task": problem.effective_task, "init": "random", "attention": "eager"}
    results = run(request, column.ranks, problem=problem, changes=changes)
    assert len(results) == max(1, column.ranks)
    check_split(results, problem, column.tolerance, f"{family}, {column_name}")


@pytest.mark.parametrize(("layout", "precision", "recompute", "family"), PRODUCT_CASES)
def test_product(
    request: pytest.FixtureRequest, record_property: Callable[[str, object], None], layout: str, precision: str, recompute: str, family: str
) -> None:
    """bf16 rounds after other sums, so its parameters part by whole steps of eight bits: its loss is compared, with one process in bf16."""
    problem = product_problem(family, precision)
    changes, ranks = LAYOUTS[layout][0](family), LAYOUTS[layout][1]
    merged = merge(run(request, ranks, problem=problem, changes={**changes, "recompute": recompute}), problem)
    reference = plain_reference(problem)
    assert sorted(merged["parameters"]) == sorted(reference["parameters"])
    if precision == "fp32":
        worst = check_numbers(merged, reference, f"{layout}, recompute {recompute}, {family}", TOLERANCE)
    else:
        worst = max(abs(a - b) for a, b in zip(merged["losses"], reference["losses"], strict=True))
        assert worst <= BF16_LOSS_TOLERANCE, f"{layout}, recompute {recompute}, {family}: losses part by {worst:.2e}"
        assert merged["norms"] == pytest.approx(reference["norms"], rel=2e-2)
    record_property("worst_difference", worst)


def test_every_pair_is_run() -> None:
    axes = [list(LAYOUTS), PRECISIONS, RECOMPUTE, SHAPES_OF_BLOCK_KIND]
    for left, right in itertools.combinations(range(4), 2):
        assert {(case[left], case[right]) for case in PAIRWISE} == set(itertools.product(axes[left], axes[right]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_local_does_not_depend_on_the_micro_size(size: int) -> None:
    problem = Problem("llama", **LABEL_COUNTS)
    result = train(problem, {**LOCAL, "batch": {"global_size": 4, "micro_size": size}})
    check_numbers(result, plain_loop(problem), f"micro size {size}", TOLERANCE)


def test_albert_is_refused_by_the_pipeline_and_trains_whole() -> None:
    problem = Problem("albert")
    with pytest.raises(ConfigError, match=r"strategy: the model \(albert\) runs the same layers .* nothing to split over stages"):
        train(problem, {})
    references(problem)


def test_schedules_are_dropped_and_built_again_without_changing_the_numbers(request: pytest.FixtureRequest) -> None:
    problem = Problem("llama", shapes=((8, 12), (7, 9), (8, 12), (5, 9)))
    results = run(request, 2, "tests.multiproc.training_cases:train_with_small_cache", problem=problem, changes={})
    check_split(results, problem, TOLERANCE, "one cached schedule")


@pytest.mark.parametrize(
    ("name", "value"),
    [("transformer.h.0.ln_1.weight", float("inf")), ("transformer.wte.weight", float("nan")), ("transformer.ln_f.bias", float("-inf"))],
    ids=["first-stage", "tied", "last-stage"],
)
def test_a_gradient_that_is_not_finite_changes_nothing(request: pytest.FixtureRequest, name: str, value: float) -> None:
    problem = Problem("gpt2", shapes=((8, 12), (7, 9), (5, 16)))
    clean = run(request, 2, problem=replace(problem, shapes=problem.shapes[:1]), changes={})
    # The last of the batches is the poisoned one, so what is left must be the state after the first update.
    poisoned = run(request, 2, problem=replace(problem, shapes=problem.shapes[:2]), changes={}, poison=(1, name, value))
    for before, after in zip(clean, poisoned, strict=True):
        assert after["skipped"] == [False, True]
        for key in ("parameters", "moments"):
            assert before[key].keys() == after[key].keys()
            assert all(torch.equal(before[key][n], after[key][n]) for n in before[key]), f"{key} have changed"


def test_training_goes_on_after_a_skipped_update(request: pytest.FixtureRequest) -> None:
    problem = Problem("llama", shapes=((8, 12), (8, 12), (5, 16)))
    results = run(request, 2, problem=problem, changes={}, poison=(0, "model.norm.weight", float("nan")))
    assert [result["skipped"] for result in results] == [[True, False, False]] * 2
    assert all(torch.isfinite(value).all() for result in results for value in result["parameters"].values())
    local = train(problem, LOCAL, poison=(0, "model.norm.weight", float("nan")))
    for result in results:
        assert result["losses"] == pytest.approx(local["losses"], abs=TOLERANCE)


def test_a_stop_request_of_one_rank_reaches_all(request: pytest.FixtureRequest) -> None:
    for result in run(request, 2, problem=Problem("llama"), changes={}, stop_rank=1):
        assert result["stops"] == [False, True, False]


@pytest.mark.parametrize(
    ("ranks", "changes"), [(4, micro(3)), (2, {"schedule": "zbv", **FOUR_STAGES}), (2, zero(3))], ids=["replicas", "zbv", "zero 3"]
)
def test_every_rank_learns_whether_packed_rows_mix(request: pytest.FixtureRequest, ranks: int, changes: dict[str, Any]) -> None:
    said = {
        family: run(request, ranks, "tests.multiproc.training_cases:error_of_packed_rows", problem=Problem(family), changes=changes)
        for family in ("llama", "opt")
    }
    assert said["llama"] == ["nothing"] * ranks
    assert all("opt lets packed rows see each other" in error for error in said["opt"]) and len(said["opt"]) == ranks


def test_dropout_is_a_function_of_the_seed_and_differs_between_stages(request: pytest.FixtureRequest) -> None:
    changes = (("resid_pdrop", 0.5), ("embd_pdrop", 0.5), ("attn_pdrop", 0.0))
    problem = Problem("gpt2", shapes=((8, 12),), model_changes=changes)
    first, second = (run(request, 2, "tests.multiproc.training_cases:dropout_masks", problem=problem, changes={}) for _ in range(2))
    for before, after in zip(first, second, strict=True):
        assert before["losses"] == after["losses"]
        assert all(torch.equal(value, after["parameters"][name]) for name, value in before["parameters"].items())
    # Of each of 4 microbatches: two blocks with two dropouts, and the one after the embedding, which has no weights and runs everywhere.
    masks = [result["masks"] for result in first]
    assert len(masks[0]) == len(masks[1]) == 4 * (2 * 2 + 1)
    assert not any(torch.equal(left, right) for left in masks[0] for right in masks[1])
    assert first[0]["losses"] != plain_loop(replace(problem, model_changes=()))["losses"]
