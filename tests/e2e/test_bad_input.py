"""Every mistake of the user's ends within seconds with exit code 2 and one clear message, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mpfinetune import dist
from mpfinetune.config import load_config
from tests.e2e.workspace import MRPC_HEADER, PIPELINE, Workspace, command, encoder_tokenizer, finish, make_model, mrpc_row, start, train
from tests.families import tiny_config

Change = dict[str, Any]


@dataclass(frozen=True)
class Mistake:
    """A change of a good config, as values or made by a function that also writes files, and what the message must hold."""

    fragments: tuple[str, ...]
    changes: Change = field(default_factory=dict)
    kind: str = "bert"
    make: Callable[[Workspace], Change] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    by: str = "train"  # the command that says it


# --- files that are wrong ---------------------------------------------------------------------------------------------------------


def by_map(*stages: str) -> Change:
    return {"strategy": "pipeline", "partition": {"stages": list(stages)}}


def mrpc_with(*lines: str) -> Callable[[Workspace], Change]:
    """The folder of a GLUE task whose train.tsv has these lines."""

    def make(work: Workspace) -> Change:
        folder = work.folder / "glue"
        folder.mkdir()
        (folder / "dev.tsv").write_text((work.data["mrpc"] / "dev.tsv").read_text())
        (folder / "train.tsv").write_text("".join(f"{line}\n" for line in lines))
        return {"data.path": str(folder)}

    return make


def jsonl_with(*lines: str, **changes: Any) -> Callable[[Workspace], Change]:
    def make(work: Workspace) -> Change:
        path = work.folder / "rows.jsonl"
        path.write_text("".join(f"{line}\n" for line in lines))
        return {"data.path": str(path), **changes}

    return make


def model_of(family: str, **changes: Any) -> Callable[[Workspace], Change]:
    return lambda work: {"model.path": str(make_model(work.folder / "model", family, **changes))}


def config_only(family: str) -> Callable[[Workspace], Change]:
    """The folder of a model that our tiny models' classes do not cover: config.json and a tokenizer."""

    def make(work: Workspace) -> Change:
        tiny_config(family).save_pretrained(work.folder / "model")
        encoder_tokenizer().save_pretrained(work.folder / "model")
        return {"model.path": str(work.folder / "model"), "model.init": "random"}

    return make


def bert_folder(damage: Callable[[Path], None]) -> Callable[[Workspace], Change]:
    def make(work: Workspace) -> Change:
        folder = make_model(work.folder / "model", "bert")
        damage(folder)
        return {"model.path": str(folder)}

    return make


def pickled_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "bert", ')


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def wrong_shapes(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 24}))


GOOD_TEXT = json.dumps({"text": "a b c"})
NO_TARGET = json.dumps({"prompt": " ".join("abcdefghij" * 4), "response": "a"})

MISTAKES: dict[str, Mistake] = {
    # the config
    "misspelt key": Mistake(("optimiser", "did you mean 'optimizer'"), {"optimiser": {"lr": 1e-4}}),
    "misspelt key in a section": Mistake(("train.epoch: unknown key", "epochs"), {"train.epoch": 2}),
    "wrong type": Mistake(("optimizer.lr: 'fast' given", "number"), {"optimizer.lr": "fast"}),
    "several at once": Mistake(("train.seeed", "batch.micro_size: 0"), {"train.seeed": 1, "batch.micro_size": 0}),
    "device without cards": Mistake(("device: cuda", "no CUDA card is visible"), {"device": "cuda"}, environment={"CUDA_VISIBLE_DEVICES": ""}),
    "negative number in a map": Mistake(("partition.device_map", "0 or more"), {"partition": {"device_map": {"bert": 0, "classifier": -1}}}),
    "folder that is a file": Mistake(("run_dir: '", "is a file", "name another"), {"run_dir": __file__}),
    "folder of a plan that is a file": Mistake(("run_dir: '", "is a file", "name another"), {"run_dir": __file__}, by="plan"),
    "folder under a file": Mistake(("run_dir: '", "lies under", "which is a file"), {"run_dir": f"{__file__}/run"}),
    # the split
    "more stages than blocks": Mistake(("partition.num_stages: 5", "4 blocks"), {**PIPELINE, "partition.num_stages": 5}),
    "map that leaves a block out": Mistake(("partition.stages", "bert.encoder.layer.2"), by_map("embed, 0-1", "3, head")),
    "map with a block twice": Mistake(("partition.stages", "bert.encoder.layer.1"), by_map("embed, 0-1", "1-3, head")),
    "map with an unknown name": Mistake(("nonsense",), by_map("embed, 0-1, nonsense", "2-3, head")),
    "map of another model": Mistake(
        ("partition.device_map", "model.layers.0"),
        {"strategy": "pipeline", "partition": {"device_map": {"model.embed_tokens": 0, "model.layers.0": 0, "lm_head": 1}}},
    ),
    "fewer microbatches than stages": Mistake(("batch.micro_size", "microbatches"), {**PIPELINE, "batch.micro_size": 4}),
    "albert over stages": Mistake(("albert", "same layers", "strategy: local"), dict(PIPELINE), make=config_only("albert")),
    "unknown card": Mistake(("hardware[0]", "rtx3091", "rtx3090"), {"hardware": [{"gpu": "rtx3091"}]}),
    "card smaller than one block": Mistake(
        ("partition.rule", "no split over 2 cards fits", "lacks"),
        {**PIPELINE, "partition.rule": "time", "hardware": [{"gpu": "rtx3090", "memory_gib": 0.0001}, {"gpu": "rtx3090"}]},
        by="plan",  # train uses the cards that are here
    ),
    # processes
    "world size that is no multiple": Mistake(
        ("3 processes", "multiple of 2", "torchrun --nproc_per_node 2 -m mpfinetune train"),
        dict(PIPELINE),
        environment={"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    ),
    "local with two processes": Mistake(
        ("strategy: local", "2 were started"),
        environment={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    ),
    "rank without world size": Mistake(("RANK", "not WORLD_SIZE", "torchrun"), environment={"RANK": "0"}),
    "rank 1 without world size": Mistake(("RANK", "not WORLD_SIZE", "torchrun"), environment={"RANK": "1"}),
    "world size without rank": Mistake(("WORLD_SIZE", "not RANK"), environment={"WORLD_SIZE": "2"}),
    "world size that is no number": Mistake(
        ("WORLD_SIZE", "'two'", "whole number"),
        environment={"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
    ),
    # the model
    "missing model folder": Mistake(("model.path: no such folder", "./no/such/model"), {"model.path": "./no/such/model"}),
    "hub id that the hub does not have": Mistake(
        ("model.path: 'no-such-org/no-such-model' is no local folder, and it cannot be had from the hub", "config.json"),
        {"model.path": "no-such-org/no-such-model"},
    ),
    "folder without config.json": Mistake(("no config.json",), make=bert_folder(without_config)),
    "broken config.json": Mistake(("model.path", "cannot be read"), make=bert_folder(broken_config)),
    "pickled weights only": Mistake(("pickled weights (.bin) only", "save_pretrained"), make=bert_folder(pickled_only)),
    "no weights": Mistake(("no *.safetensors", "model.init: random"), make=bert_folder(without_weights)),
    "cut weights": Mistake(("model.path", "cannot be read"), make=bert_folder(cut_weights)),
    "weights of other shapes": Mistake(("do not fit the model", "encoder.layer"), make=bert_folder(wrong_shapes)),
    "no tokenizer": Mistake(("model.tokenizer: no tokenizer can be loaded",), make=bert_folder(without_tokenizer)),
    "tokenizer larger than the vocabulary": Mistake(
        ("model.tokenizer", "30 tokens", "20"), {"model": {"overrides": {"vocab_size": 20}, "init": "random"}}
    ),
    "unknown override": Mistake(("model.overrides.hidden_dropout", "hidden_dropout_prob"), {"model.overrides": {"hidden_dropout": 0.1}}),
    "encoder-decoder": Mistake(("encoder-decoder (t5)", "decoder"), make=config_only("t5")),
    "encoder asked for the next token": Mistake(
        ("model.task: causal_lm", "bert is an encoder"), kind="llama", make=lambda work: {"model.path": str(work.models["bert"])}
    ),
    "model that mixes packed rows": Mistake(
        ("data.packing: true given, but opt lets packed rows see each other", "data.packing: false"),
        {"data.packing": True},
        kind="llama",
        make=model_of("opt", vocab_size=48),
    ),
    # the data
    "packing of classified rows": Mistake(("data.packing: True given", "padding: bucketed"), {"data.packing": True}),
    "missing file": Mistake(("data.path", "no/such/file.jsonl", "no such file"), {"data.path": "no/such/file.jsonl"}, kind="llama"),
    "missing split": Mistake(("train.tsv", "no such file"), make=lambda work: {"data.path": str(work.folder)}),
    "malformed lines": Mistake(
        ("rows.jsonl:2: not valid JSON", "rows.jsonl:3: the row is a list", "rows.jsonl:5: field 'text' is null"),
        kind="llama",
        make=jsonl_with(GOOD_TEXT, "{broken", "[1]", GOOD_TEXT, '{"text": null}'),
    ),
    "25 malformed lines": Mistake(("rows.jsonl:20:", "... and 5 more"), kind="llama", make=jsonl_with(*["{"] * 25, GOOD_TEXT)),
    "line with a column too few": Mistake(("train.tsv:3: 4 columns, must be 5",), make=mrpc_with(MRPC_HEADER, mrpc_row(0), "1\t2\t3\ta b")),
    "columns of another task": Mistake(("no column '#1 String'", "sentence"), make=mrpc_with("sentence\tlabel", "a b\t1")),
    "empty file": Mistake(("the file is empty",), kind="llama", make=jsonl_with()),
    "header only": Mistake(("there is a header, but no row",), make=mrpc_with(MRPC_HEADER)),
    "label outside the head": Mistake(
        ("train.tsv:3: label 3 is outside the head", "{1, 3}", "model.num_labels is 2"), make=mrpc_with(MRPC_HEADER, mrpc_row(1), mrpc_row(2, 3))
    ),
    "label that is no number": Mistake(("train.tsv:2: label 'yes'",), make=mrpc_with(MRPC_HEADER, mrpc_row(1, "yes"))),
    "no row with a target": Mistake(("none of its 2 rows has a target",), kind="llama", make=jsonl_with(NO_TARGET, NO_TARGET)),
    "rows longer than the positions": Mistake(("data.max_length: 65", "at most 64"), {"data.max_length": 65}),
    "longer than the positions, rotary": Mistake(("data.max_length: 65", "at most 64"), {"data.max_length": 65}, kind="llama"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_one_message(work: Workspace, name: str) -> None:
    mistake = MISTAKES[name]
    made = mistake.make(work) if mistake.make else {}
    config = work.config(mistake.kind, **{**mistake.changes, **made})
    before = sorted(work.folder.rglob("*"))
    began = time.monotonic()
    outcome = command(mistake.by, config, environment=mistake.environment)
    assert outcome.code == 2, outcome.text
    for fragment in mistake.fragments:
        assert fragment in outcome.text
    assert "Traceback" not in outcome.text
    assert len(re.findall(r"^mpfinetune: .*error:", outcome.text, flags=re.MULTILINE)) == 1, outcome.text
    assert time.monotonic() - began < 10
    assert sorted(work.folder.rglob("*")) == before, "a refused run writes nothing"


def as_rank(rank: int, local_rank: object) -> dict[str, str]:
    """The launcher's variables on two hosts of two processes each."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("rank", "local_rank", "speaks"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False), (3, "one", True)])
def test_the_first_process_of_each_host_says_what_is_wrong_there(work: Workspace, rank: int, local_rank: object, speaks: bool) -> None:
    """A folder may be missing on the second machine only; its ranks are 2 and 3."""
    outcome = command("train", work.config(**{"model.path": "./no/such/model"}), environment=as_rank(rank, local_rank))
    assert outcome.code == 2
    assert outcome.text.count("model.path: no such folder") == int(speaks), outcome.text


@pytest.mark.parametrize(("cards", "local_rank", "speaks"), [(1, 1, True), (1, 2, False), (2, 2, True)])
def test_a_process_without_a_card_says_so(work: Workspace, cards: int, local_rank: int, speaks: bool) -> None:
    """Those before it have cards and wait for it in silence."""
    config = work.config(**PIPELINE, **{"batch.micro_size": 1})

    def meet(prepared: object, reporter: object) -> None:
        with mock.patch.object(dist, "device_type", return_value="cuda"), mock.patch.object(dist, "visible_devices", return_value=cards):
            dist.init_distributed(load_config(config), 2)

    with mock.patch("mpfinetune.training.run.train", meet):
        outcome = command("train", config, environment=as_rank(local_rank, local_rank))
    assert outcome.code == 2
    assert outcome.text.count(f"process {local_rank} of this host has no card: {cards} are visible") == int(speaks), outcome.text


def test_a_host_with_too_little_memory_is_found_before_anything_starts(work: Workspace) -> None:
    with mock.patch("mpfinetune.training.prepare.host_memory_bytes", return_value=2**28):
        planned = command("plan", work.config(**PIPELINE))
        outcome = command("train", work.config(**PIPELINE))
    assert planned.code == 0 and "of host memory, but it has 0.2 GiB" in " ".join(planned.text.split())
    assert outcome.code == 2 and "GiB of host memory, but it has 0.2 GiB (device: cpu); take a smaller model" in " ".join(outcome.text.split())
    assert [path.name for path in work.run_dir().iterdir()] == ["plan.json"]


def test_a_refused_run_leaves_an_earlier_one_alone(work: Workspace) -> None:
    config = work.config("llama", **{"train.max_steps": 2})
    train(config)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in work.run_dir().rglob("*")}
    assert command("train", config, "data.max_length=999").code == 2
    assert command("train", config, "model.path=./nowhere", "checkpoint.resume=never").code == 2
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in work.run_dir().rglob("*")}


SAID = {
    "no pad token": ({}, "llama", None, "padding with EOS"),
    "rows without a target": ({}, "llama", jsonl_with(NO_TARGET, json.dumps({"prompt": "a", "response": "b c"})), "1 of 2 rows were dropped"),
    "rows that are cut": ({"data.max_length": 5}, "llama", None, "rows were cut to 5 tokens"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_chosen_or_left_out_is_said(work: Workspace, name: str) -> None:
    changes, kind, make, fragment = SAID[name]
    made = make(work) if make else {}
    outcome = command("train", work.config(kind, **{"train.max_steps": 1, **changes, **made}))
    assert outcome.code == 0 and fragment in outcome.text, outcome.text


# --- the same on real ranks -------------------------------------------------------------------------------------------------------


def ranks_by_hand(config: Path, world_size: int, port: int) -> list[tuple[int, str]]:
    """(exit code, text) of each rank: torchrun would hide the codes of all but the first, and kill the others."""
    place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [start("train", config, RANK=str(rank), LOCAL_RANK=str(rank), **place) for rank in range(world_size)]
    return [(outcome.code, outcome.text) for outcome in (finish(process, 60) for process in processes)]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def shape_of_the_last_block(folder: Path) -> None:
    """Weights that only the second rank reads are wrong: the first goes on alone until it hears of it."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.3.output.dense.weight"
    save_file({**weights, name: weights[name][:, :7].contiguous()}, folder / "model.safetensors", metadata={"format": "pt"})


ON_RANKS = {
    "label outside the head": (2, mrpc_with(MRPC_HEADER, mrpc_row(1), mrpc_row(2, 3)), "label 3 is outside the head"),
    "wrong weights on one rank": (2, bert_folder(shape_of_the_last_block), "do not fit the model"),
    "world size that is no multiple": (3, None, "torchrun --nproc_per_node 2"),
    "map error": (2, lambda work: by_map("embed, 0-1", "3, head"), "bert.encoder.layer.2"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name.startswith("wrong weights") else pytest.mark.slow) for name in ON_RANKS])
def test_every_rank_ends_and_one_speaks(work: Workspace, name: str) -> None:
    world_size, make, fragment = ON_RANKS[name]
    config = work.config(**{**(PIPELINE if name != "map error" else {}), **(make(work) if make else {})})
    began = time.monotonic()
    ended = ranks_by_hand(config, world_size, free_port())
    texts = "\n".join(text for _, text in ended)
    assert [code for code, _ in ended] == [2] * world_size, texts
    assert texts.count(fragment) == 1, texts
    assert "Traceback" not in texts
    assert time.monotonic() - began < 45  # most of it imports
    assert not work.run_dir().exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["label outside the head", "world size that is no multiple"])
def test_torchrun_shows_the_message_once(work: Workspace, name: str) -> None:
    world_size, make, fragment = ON_RANKS[name]
    config = work.config(**{**(PIPELINE if name != "map error" else {}), **(make(work) if make else {})})
    outcome = finish(start("torch.distributed.run", "--nproc_per_node", world_size, "-m", "mpfinetune", "train", config, module=False))
    assert outcome.code != 0
    assert outcome.text.count(fragment) == 1, outcome.text
    assert not work.run_dir().exists() and os.listdir(work.folder)
