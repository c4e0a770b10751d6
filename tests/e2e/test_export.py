"""Exports and evaluations: what a run leaves is a plain Hugging Face model that scores as the run said."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.run_cases import build_local
from tests.e2e.workspace import PIPELINE, Workspace, checkpoint_of, command, evaluations, make_model, train
from tests.families import task_of
from tests.multiproc.rank_pool import RankPool

TRAIN_CASE = "tests.e2e.run_cases:train"
TOLERANCE = 1e-5


def load(folder: Path, task: str) -> Any:
    """The model as any user of transformers loads it; nothing may be missing, unexpected or of another shape."""
    auto = AutoModelForCausalLM if task == "causal_lm" else AutoModelForSequenceClassification
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def trained_model(config_folder: Path, checkpoint: Path, task: str) -> Any:
    """A fresh model of transformers with the checkpoint's weights put in by name: no code of the export."""
    auto = AutoModelForCausalLM if task == "causal_lm" else AutoModelForSequenceClassification
    model = auto.from_config(AutoConfig.from_pretrained(config_folder)).eval()
    weights: dict[str, Tensor] = {}
    for file in checkpoint.glob("weights-*.safetensors"):
        weights |= load_file(file)
    left = model.load_state_dict(weights, strict=False)
    assert not left.unexpected_keys
    model.tie_weights()
    return model


def stored_names(folder: Path) -> set[str]:
    names: list[str] = []
    for file in folder.glob("*.safetensors"):
        names += list(load_file(file))
    assert len(names) == len(set(names)), "a tensor is stored twice"
    return set(names)


def logits(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 30, (3, 9), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=mask).logits.float()


def plain_evaluation(model: Any, work: Workspace, kind: str) -> dict[str, float]:
    """Row by row, with transformers and torch only."""
    folder = work.models[kind]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, targets, right = 0.0, 0, 0
    with torch.no_grad():
        if kind == "bert":
            for line in (work.data["mrpc"] / "dev.tsv").read_text().splitlines()[1:]:
                label, _, _, first, second = line.split("\t")
                output = model(**tokenizer(first, second, return_tensors="pt")).logits
                total += functional.cross_entropy(output, torch.tensor([int(label)])).item()
                right += int(output.argmax()) == int(label)
                targets += 1
            return {"loss": total / targets, "accuracy": right / targets}
        for line in work.data["held_out"].read_text().splitlines():
            ids = torch.tensor([tokenizer(json.loads(line)["text"]).input_ids])  # <s> ... </s>
            total += functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
            targets += ids.shape[1] - 1
    return {"loss": total / targets, "perplexity": math.exp(total / targets)}


@pytest.mark.parametrize("family", ["gpt2", "gemma", "mixtral", "bert"])
def test_a_two_stage_run_exports_a_plain_model(work: Workspace, two_ranks: RankPool, family: str) -> None:
    config = work.config(family, **PIPELINE, **{"train.max_steps": 4})
    two_ranks.run(TRAIN_CASE, {"config": str(config)})
    folder, task, base = work.run_dir() / "export", task_of(family), work.models[family]
    model = load(folder, task)
    assert torch.allclose(logits(model), logits(trained_model(base, checkpoint_of(work.run_dir(), 4), task)), rtol=0, atol=TOLERANCE)
    assert (logits(model) - logits(load(base, task))).abs().max() > 1e-4, "nothing was trained"
    assert stored_names(folder) == stored_names(base)
    exported, original = (json.loads((path / "config.json").read_text()) for path in (folder, base))
    assert exported["use_cache"] == original["use_cache"]
    assert exported["architectures"] == original["architectures"]
    changed = {key for key in {*original, *exported} if exported.get(key) != original.get(key)}
    assert changed <= {"pad_token_id", "problem_type"}
    said, plain = evaluations(work.run_dir())[4], plain_evaluation(model, work, family)
    assert {name: said[name] for name in plain} == pytest.approx(plain, abs=TOLERANCE, rel=TOLERANCE)
    text = "a b c d"
    assert AutoTokenizer.from_pretrained(folder)(text).input_ids == AutoTokenizer.from_pretrained(base)(text).input_ids


LAYOUTS: dict[str, dict[str, Any]] = {"one process": {}, "pipeline": PIPELINE, "zero": {"strategy": "zero", "zero": {"stage": 2}}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_persistent_buffers_are_in_the_export(work: Workspace, two_ranks: RankPool, layout: str) -> None:
    """deepseek_v3's files hold the biases that route the experts, which are no parameters: without them other experts would be taken."""
    base = make_model(work.folder / "model", "deepseek_v3")
    original = load_file(base / "model.safetensors")
    biases = {name: torch.randn(tensor.shape) for name, tensor in original.items() if "e_score_correction_bias" in name}
    assert len(biases) == 3
    save_file(original | biases, base / "model.safetensors", {"format": "pt"})
    config = work.config("llama", **LAYOUTS[layout], **{"model.path": str(base), "train.max_steps": 2})
    if layout == "one process":
        train(config)
    else:
        two_ranks.run(TRAIN_CASE, {"config": str(config)})
    folder = work.run_dir() / "export"
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == original.keys()
    assert all(stored[name].dtype == torch.float32 and torch.equal(stored[name], value) for name, value in biases.items())
    model = load(folder, "causal_lm")
    assert all(torch.equal(dict(model.named_buffers())[name], value) for name, value in biases.items())
    trained = trained_model(base, checkpoint_of(work.run_dir(), 2), "causal_lm")
    assert (logits(model) - logits(trained)).abs().max() > 1e-3, "the biases choose no other experts"
    trained.load_state_dict(biases, strict=False)
    assert torch.allclose(logits(model), logits(trained), rtol=0, atol=TOLERANCE)
    # What the run itself scored with.
    plain = plain_evaluation(model, Workspace({"llama": base}, work.data, work.folder), "llama")
    assert evaluations(work.run_dir())[2]["loss"] == pytest.approx(plain["loss"], abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_trained_by_an_engine_is_one_of_peft(work: Workspace, two_ranks: RankPool, stage: int) -> None:
    changes = {"strategy": "zero", "zero": {"stage": stage}, "adapter": {"type": "lora", "rank": 4}, "optimizer.lr": 1e-2, "train.max_steps": 2}
    two_ranks.run(TRAIN_CASE, {"config": str(work.config("llama", **changes))})
    folder, base = work.run_dir() / "export", load(work.models["llama"], "causal_lm")
    before = logits(base)
    model = PeftModel.from_pretrained(base, folder)
    assert (logits(model) - before).abs().max() > 1e-3, "nothing was trained"
    (written,) = checkpoint_of(work.run_dir(), 2).glob("weights-*")
    assert stored_names(folder) == {f"base_model.model.{name}" for name in load_file(written)}, "only the adapter is saved"
    said, plain = evaluations(work.run_dir())[2], plain_evaluation(model, work, "llama")
    assert {name: said[name] for name in plain} == pytest.approx(plain, abs=TOLERANCE, rel=TOLERANCE)


def test_generation_settings_of_the_base_model_are_kept(work: Workspace) -> None:
    folder = make_model(work.folder / "model", "llama")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, 4], "temperature": 0.7, "do_sample": True}))
    train(work.config("llama", **{"model.path": str(folder), "train.max_steps": 1}))
    exported = json.loads((work.run_dir() / "export" / "generation_config.json").read_text())
    assert (exported["eos_token_id"], exported["temperature"], exported["do_sample"]) == ([2, 4], 0.7, True)
    assert exported.get("use_cache", True) is True
    model = load(work.run_dir() / "export", "causal_lm")
    assert model.generate(torch.tensor([[1, 7]]), max_new_tokens=3).shape[1] > 2


def test_real_weights_are_exported_as_they_were_read(work: Workspace, stories: Path) -> None:
    """With a rate too small to move anything, the export holds the base model's own tensors under the same names."""
    train(work.config("llama", **{"model.path": str(stories), "optimizer.lr": 1e-30, "optimizer.weight_decay": 0.0, "train.max_steps": 1}))
    exported, base = (load_file(path / "model.safetensors") for path in (work.run_dir() / "export", stories))
    assert exported.keys() == base.keys()
    assert all(torch.equal(exported[name], base[name]) for name in base)


def test_bf16_is_exported_as_bf16_from_masters_in_fp32(work: Workspace) -> None:
    train(work.config("llama", **{"precision": "bf16", "train.max_steps": 2}))
    exported = load_file(work.run_dir() / "export" / "model.safetensors")
    masters = load_file(next(checkpoint_of(work.run_dir(), 2).glob("weights-*")))
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert AutoConfig.from_pretrained(work.run_dir() / "export").dtype == torch.bfloat16


@pytest.mark.parametrize("by_verb", [False, True])
def test_a_chosen_pad_token_is_said_and_exported(work: Workspace, by_verb: bool) -> None:
    """gpt2 has none; its classification head needs one for more than one row."""
    work.models["gpt2_head"] = make_model(work.folder / "model", "gpt2", task="sequence_classification", num_labels=2)
    config = work.config("bert", **{"model.path": str(work.models["gpt2_head"]), "train.max_steps": 2})
    text = train(config)
    assert "no pad token" in text and "</s>" in text
    folder = work.run_dir() / "export"
    if by_verb:
        folder = work.folder / "exported"
        assert command("export", config, "--output", folder).code == 0
    model, tokenizer = load(folder, "sequence_classification"), AutoTokenizer.from_pretrained(folder)
    assert model.config.pad_token_id == 2
    rows = tokenizer(["a b c", "a"], padding=True, return_tensors="pt")
    alone = [model(**tokenizer(text, return_tensors="pt")).logits for text in ("a b c", "a")]
    assert torch.allclose(model(**rows).logits, torch.cat(alone), atol=TOLERANCE)


def test_a_pad_token_chosen_for_a_causal_lm_does_not_stop_the_training_of_eos(work: Workspace) -> None:
    folder = make_model(work.folder / "model", "llama", pad_token_id=None)
    config = work.config("llama", **{"model.path": str(folder), "train.max_steps": 1})
    trainer = build_local(config)
    for stage in trainer.strategy.stages.values():
        embeddings = [module for module in stage.modules() if isinstance(module, torch.nn.Embedding)]
        assert [module.padding_idx for module in embeddings] == [None]
    train(config)
    assert AutoConfig.from_pretrained(work.run_dir() / "export").pad_token_id == 2


# --- verbs ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(material: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    work = Workspace(material.models, material.data, tmp_path_factory.mktemp("scored"))
    changes = {"checkpoint": {"every_steps": 2, "keep": 9}, "eval": {"every_steps": 2, "at_start": True}, "optimizer.lr": 0.02}
    train(work.config("llama", **changes))
    return work


def test_evaluation_comes_when_asked(scored: Workspace) -> None:
    assert list(evaluations(scored.run_dir())) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("changes", [{"eval.at_start": False}, {"eval.every_steps": 3, "train.max_steps": 5}])
def test_evaluation_is_at_the_end_in_any_case(work: Workspace, changes: dict[str, Any]) -> None:
    train(work.config("llama", **changes))
    steps = [8] if "eval.at_start" in changes else [0, 3, 5]
    assert list(evaluations(work.run_dir())) == steps


@pytest.mark.parametrize("which", ["last", "best", "base", "folder"])
def test_the_eval_verb_scores_the_checkpoint_that_it_is_given(scored: Workspace, which: str) -> None:
    run_dir = scored.run_dir()
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    by_step = {step: metrics["loss"] for step, metrics in evaluations(run_dir).items()}
    step = {"last": 8, "base": 0, "folder": 4, "best": min((s for s in by_step if s), key=lambda s: by_step[s])}[which]
    argument = checkpoint_of(run_dir, 4) if which == "folder" else which
    outcome = command("eval", scored.folder / "run.yaml", "--checkpoint", argument)
    assert outcome.code == 0, outcome.text
    assert f"loss {by_step[step]:.4f}" in outcome.text
    assert before == {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}, "an evaluation writes nothing"


@pytest.mark.parametrize("which", ["last", "base"])
def test_two_ranks_score_as_one_does(scored: Workspace, two_ranks: RankPool, which: str) -> None:
    """A checkpoint of a whole run, read by two stages; both ranks know the result."""
    config = scored.config("llama", name="split", **PIPELINE, **{"run_dir": str(scored.run_dir())})
    metrics = two_ranks.run("tests.e2e.run_cases:evaluate", {"config": str(config), "which": which})
    wanted = evaluations(scored.run_dir())[8 if which == "last" else 0]
    for found in metrics:
        assert found == pytest.approx(wanted, abs=TOLERANCE, rel=TOLERANCE)


def test_the_base_model_scores_as_plain_pytorch_says(scored: Workspace) -> None:
    plain = plain_evaluation(load(scored.models["llama"], "causal_lm"), scored, "llama")
    assert evaluations(scored.run_dir())[0] == pytest.approx(plain, rel=TOLERANCE)


@pytest.mark.parametrize("which", ["best", "folder"])
def test_the_export_verb_writes_the_checkpoint_that_it_is_given(scored: Workspace, tmp_path: Path, which: str) -> None:
    argument = checkpoint_of(scored.run_dir(), 4) if which == "folder" else which
    outcome = command("export", scored.folder / "run.yaml", "--checkpoint", argument, "--output", tmp_path / "out")
    assert outcome.code == 0, outcome.text
    losses = {step: metrics["loss"] for step, metrics in evaluations(scored.run_dir()).items() if step}
    wanted = losses[4] if which == "folder" else min(losses.values())
    assert plain_evaluation(load(tmp_path / "out", "causal_lm"), scored, "llama")["loss"] == pytest.approx(wanted, abs=TOLERANCE)


REFUSED = {
    "nothing trained": (("export", "{config}", "run_dir={empty}"), "no checkpoint in"),
    "no such checkpoint": (("export", "{config}", "--checkpoint", "{empty}"), "no complete checkpoint"),
    "eval without a checkpoint": (("eval", "{config}", "run_dir={empty}"), "no checkpoint in"),
    "eval without rows": (("eval", "{config}", "data.eval_path=null"), "data.eval_path"),
    "folder in use": (("export", "{config}", "--output", "{full}"), "is not an empty folder"),
    "a file": (("export", "{config}", "--output", "{full}/kept.txt"), "is not an empty folder"),
    "another head": (("eval", "{config}", "model.overrides.intermediate_size=24", "model.init=random"), "[48"),
    "export of another model": (("export", "{config}", "model.overrides.intermediate_size=24"), "does not hold the model's parameters"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_verbs_refuse_with_one_message_and_touch_nothing(scored: Workspace, tmp_path: Path, name: str) -> None:
    arguments, fragment = REFUSED[name]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept.txt").write_text("mine")
    places = {"config": scored.folder / "run.yaml", "empty": tmp_path / "empty", "full": tmp_path / "full"}
    outcome = command(*(argument.format(**places) for argument in arguments))
    assert outcome.code == 2, outcome.text
    assert fragment in outcome.text and "Traceback" not in outcome.text
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "kept.txt"]


# --- memory -----------------------------------------------------------------------------------------------------------------------


def test_no_logits_outlive_their_microbatch(work: Workspace) -> None:
    """An evaluation of 7 rows in microbatches of 2: at each, the logits of those before are gone."""
    import weakref

    trainer = build_local(work.config("llama"))
    original, seen, alive = trainer.strategy.loss_sum, [], []

    def watched(output: Tensor, labels: Tensor) -> Tensor:
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(output))
        return original(output, labels)

    trainer.strategy.loss_sum = watched
    trainer.evaluate()
    assert len(seen) == 4
    # The one just before may still be held by the loop's own variables while the next forward pass runs.
    assert max(alive) <= 1
    assert all(reference() is None for reference in seen)
