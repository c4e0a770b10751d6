"""A stage's weights: read from the files tensor by tensor, its own only; drawn where no file holds them, whatever the split."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertModel, MiniMaxM2PreTrainedModel

from mpfinetune.config import ModelTask
from mpfinetune.errors import ModelError
from mpfinetune.models.buffers import persistent_buffers
from mpfinetune.models.facts import ModelFacts, inspect_model
from mpfinetune.models.load import stream_seed, weight_files
from mpfinetune.models.stage import StageModule, StageSpan
from mpfinetune.planning.partition import spans_from_sizes
from mpfinetune.strategies.build import build_stage
from tests.families import task_of, tiny_config
from tests.multiproc.training_cases import Problem, run_config

REPOSITORY = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
WHOLE = StageSpan(0, 4, True, True)
AUTO_CLASSES: dict[str, Any] = {"causal_lm": AutoModelForCausalLM, "sequence_classification": AutoModelForSequenceClassification}


def saved(family: str, folder: Path, *, shard_size: str = "5GB", task: ModelTask | None = None) -> dict[str, Tensor]:
    """A random model written by transformers; returns its parameters by name."""
    torch.manual_seed(11)
    model = AUTO_CLASSES[task or task_of(family)].from_config(tiny_config(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()  # ones and zeros could be right by accident
    model.save_pretrained(folder, max_shard_size=shard_size)
    return dict(model.named_parameters(remove_duplicate=False))


def loaded(
    family: str, span: StageSpan, folder: Path | None, precision: str = "fp32", task: ModelTask | None = None
) -> tuple[StageModule, list[str], ModelFacts]:
    problem = Problem(family, task=task, precision=precision)
    facts = inspect_model(tiny_config(family), problem.effective_task)
    config = run_config(problem, strategy="local", partition={})
    return *build_stage(config, tiny_config(family), facts, span, CPU, folder), facts


def parameters(stage: StageModule) -> dict[str, Tensor]:
    return dict(stage.model.named_parameters(remove_duplicate=False))


@pytest.fixture
def names_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each reading of a tensor's values out of a file, by name; a tensor read in pieces counts once."""
    read: list[str] = []
    original = safetensors.safe_open

    class Handle:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.real = original(*arguments, **options)

        def keys(self) -> list[str]:
            return list(self.real.keys())

        def get_slice(self, name: str) -> Any:
            return Slice(self.real.get_slice(name), name)

    class Slice:
        def __init__(self, real: Any, name: str) -> None:
            self.real, self.name, self.counted = real, name, False

        def __getitem__(self, key: Any) -> Any:
            read.extend([] if self.counted else [self.name])
            self.counted = True
            return self.real[key]

        def get_shape(self) -> Any:
            return self.real.get_shape()

    monkeypatch.setattr(safetensors, "safe_open", Handle)
    return read


# --- reading ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"], ids=["single", "shards"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mixtral", "qwen3_moe", "gpt_oss", "bert", "mpnet", "bloom"])
def test_each_stage_reads_its_own_tensors_and_no_others(family: str, shard_size: str, tmp_path: Path, names_read: list[str]) -> None:
    real = saved(family, tmp_path, shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard_size != "5GB")
    in_files = {name for file in weight_files(tmp_path) for name in load_file(file)}
    read_by_stage = []
    for span in spans_from_sizes((1, 3)):
        names_read.clear()
        stage, drawn, facts = loaded(family, span, tmp_path)
        assert drawn == []
        held = parameters(stage)
        assert sorted(held) == sorted(span.parameter_names(facts))
        assert all(torch.equal(value, real[name]) for name, value in held.items())
        assert len(set(names_read)) == len(names_read), "a tensor was read twice"
        read_by_stage.append(set(names_read))
    assert read_by_stage[0] | read_by_stage[1] == in_files
    shared = {key for names in facts.tied_names for key in names} | set(facts.names_of("every_stage"))
    assert not [name for name in read_by_stage[0] & read_by_stage[1] if not any(key.endswith(name) for key in shared)]


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_a_tied_head_that_the_file_leaves_out(family: str, tmp_path: Path, names_read: list[str]) -> None:
    real = saved(family, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    last, drawn, _ = loaded(family, spans_from_sizes((2, 2))[1], tmp_path)
    assert drawn == [] and torch.equal(parameters(last)["lm_head.weight"], real["lm_head.weight"])
    names_read.clear()
    whole, drawn, _ = loaded(family, WHOLE, tmp_path)
    held = parameters(whole)
    embedding = next(value for name, value in held.items() if "wte" in name or "embed_tokens" in name)
    assert drawn == [] and held["lm_head.weight"] is embedding
    assert len(names_read) == len(set(names_read)), "the tied tensor was read twice"


def test_a_tied_head_that_the_file_holds_under_both_names(tmp_path: Path) -> None:
    real = saved("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = real["lm_head.weight"].detach().clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for span in (WHOLE, *spans_from_sizes((2, 2))):
        stage, drawn, _ = loaded("gpt2", span, tmp_path)
        assert drawn == [] and all(torch.equal(value, real[name]) for name, value in parameters(stage).items())


def test_a_file_that_holds_the_tied_head_only(tmp_path: Path) -> None:
    real = saved("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for span in (WHOLE, *spans_from_sizes((2, 2))):
        stage, drawn, _ = loaded("gpt2", span, tmp_path)
        assert drawn == [] and all(torch.equal(value, real[name]) for name, value in parameters(stage).items())


def test_a_base_model_without_prefix_needs_a_new_head_only(tmp_path: Path) -> None:
    torch.manual_seed(2)
    base = BertModel(tiny_config("bert"))
    base.save_pretrained(tmp_path)
    first, last = (loaded("bert", span, tmp_path) for span in spans_from_sizes((2, 2)))
    assert first[1] == [] and last[1] == ["classifier.bias", "classifier.weight"]
    real = {f"bert.{name}": value for name, value in base.named_parameters()}
    for stage in (first[0], last[0]):
        held = {name: value for name, value in parameters(stage).items() if not name.startswith("classifier")}
        assert held and all(torch.equal(value, real[name]) for name, value in held.items())


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_language_model_becomes_a_classifier(family: str, tmp_path: Path) -> None:
    """The head of the other task is in the file and not in the model; the new one is in the model only."""
    real = saved(family, tmp_path)
    stage, drawn, _ = loaded(family, WHOLE, tmp_path, task="sequence_classification")
    assert drawn == ["score.weight"]
    assert all(torch.equal(value, real[name]) for name, value in parameters(stage).items() if name != "score.weight")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_bf16_from_files_of_fp32(family: str, tmp_path: Path) -> None:
    real = saved(family, tmp_path)
    stage, _, _ = loaded(family, spans_from_sizes((2, 2))[1], tmp_path, precision="bf16")
    assert all(torch.equal(value, real[name].bfloat16()) for name, value in parameters(stage).items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "minimax_m2"])
def test_persistent_buffers_have_the_value_and_type_of_from_pretrained(
    family: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """deepseek_v3 makes the buffer in fp32. minimax_m2 makes it in the type of the weights; here its class, too, says that it stays in fp32."""
    monkeypatch.setattr(MiniMaxM2PreTrainedModel, "_keep_in_fp32_modules_strict", ["e_score_correction_bias"])
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_()
    model.save_pretrained(tmp_path)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    real = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    assert real["model.layers.3.mlp.gate.weight"].dtype == (torch.float32 if family == "deepseek_v3" else dtype)
    seen: set[str] = set()
    for span in (WHOLE, *spans_from_sizes((2, 2))):
        stage, _, _ = loaded(family, span, tmp_path, precision, "causal_lm")
        buffers = persistent_buffers(stage.model)
        assert all(value.dtype == real[name].dtype == torch.float32 and torch.equal(value, real[name]) for name, value in buffers.items())
        # The router's weights are made in fp32, too: rounding them on the way would not show in their type.
        assert all(torch.equal(value, real[name]) for name, value in parameters(stage).items() if value.dtype == real[name].dtype)
        seen |= set(buffers)
    assert seen and seen == {name for name in real if "e_score_correction_bias" in name}


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "gpt_oss"])
def test_rotary_tables_are_right_after_empty_construction(family: str, tmp_path: Path) -> None:
    saved(family, tmp_path)
    stock = AUTO_CLASSES[task_of(family)].from_pretrained(tmp_path)
    real = dict(stock.named_buffers())
    for span in spans_from_sizes((2, 2)):
        buffers = dict(loaded(family, span, tmp_path)[0].model.named_buffers())
        assert [name for name in buffers if "inv_freq" in name]
        assert all(not value.is_meta and torch.equal(value, real[name]) for name, value in buffers.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_logits_are_those_of_from_pretrained(precision: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    tokens = torch.arange(3, 15).reshape(2, 6)
    first, last = (loaded("llama", span, tmp_path, precision)[0] for span in spans_from_sizes((2, 2)))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    with torch.no_grad():
        assert torch.equal(last(first(**batch), **batch), stock(**batch).logits)


# --- drawing ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert", "mpnet", "mixtral", "deepseek_v3"])
def test_random_weights_do_not_depend_on_the_split(family: str) -> None:
    whole = parameters(loaded(family, WHOLE, None)[0])
    for sizes in ((2, 2), (1, 1, 2), (0, 4)):
        for span in spans_from_sizes(sizes):
            held = parameters(loaded(family, span, None)[0])
            assert all(torch.equal(value, whole[name]) for name, value in held.items())
    # The same module of two blocks is drawn twice, not copied.
    matrices = [value for name, value in whole.items() if "layer" in name and value.ndim == 2]
    assert not any(torch.equal(left, right) for i, left in enumerate(matrices) for right in matrices[:i] if left.shape == right.shape)


def test_the_head_drawn_does_not_depend_on_the_split(tmp_path: Path) -> None:
    BertModel(tiny_config("bert")).save_pretrained(tmp_path)
    heads = [parameters(loaded("bert", span, tmp_path)[0])["classifier.weight"] for span in (WHOLE, StageSpan(3, 4, False, True))]
    assert torch.equal(heads[0], heads[1]) and heads[0].std() > 0


def test_drawn_weights_are_as_wide_as_transformers_draws_them() -> None:
    torch.manual_seed(0)
    stock = dict(AutoModelForCausalLM.from_config(tiny_config("llama")).named_parameters())
    for name, value in parameters(loaded("llama", WHOLE, None)[0]).items():
        assert float(value.detach().std()) == pytest.approx(float(stock[name].detach().std()), rel=0.15, abs=1e-6), name


def test_drawing_leaves_the_random_stream_alone() -> None:
    before = torch.get_rng_state()
    loaded("llama", WHOLE, None)
    assert torch.equal(torch.get_rng_state(), before)


def test_stream_seeds() -> None:
    seeds = {stream_seed(*parts) for parts in ((1, "a"), (1, "b"), (2, "a"), (12, ""), (1, 2))}
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, "a") == 6885665436231814845  # the same on every machine and version


# --- files that are wrong ---------------------------------------------------------------------------------------------------------


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def no_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def pickled(folder: Path) -> None:
    no_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def index_of_a_missing_shard(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors", "model.norm.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weights": 3}')


def another_width(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(40, 32)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_short, "a weight file in .* cannot be read"),
        (no_header, "a weight file in .* cannot be read"),
        (empty, "a weight file in .* cannot be read"),
        (no_weights, r"holds no \*\.safetensors; .* set model\.init: random"),
        (pickled, r"holds pickled weights \(\.bin\) only; .* save_pretrained, which makes model\.safetensors"),
        (index_of_a_missing_shard, r"names files that are not there: model-00002-of-00002\.safetensors"),
        (broken_index, "is not a valid index of safetensors files"),
        (another_width, r"do not fit the model: .*model\.layers\.3\.mlp\.up_proj\.weight.*40, 32.*48, 32"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_wrong_file_is_the_users_error(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    saved("llama", tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=message) as raised:
        loaded("llama", spans_from_sizes((2, 2))[1], tmp_path)
    assert str(raised.value).startswith("model.path: ")


def test_another_vocabulary_names_the_tensor(tmp_path: Path) -> None:
    saved("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.wte.weight"] = torch.zeros(100, 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for span in spans_from_sizes((2, 2)):
        with pytest.raises(ModelError, match=r"do not fit the model: .*(wte|lm_head)\.weight.*100"):
            loaded("gpt2", span, tmp_path)


def test_a_mismatch_in_another_stage_is_that_stages_error(tmp_path: Path) -> None:
    saved("llama", tmp_path)
    another_width(tmp_path)
    assert loaded("llama", spans_from_sizes((2, 2))[0], tmp_path)[1] == []


# --- memory -----------------------------------------------------------------------------------------------------------------------

PEAK = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig
import accelerate, safetensors.torch, transformers.models.llama.modeling_llama
import transformers.core_model_loading, transformers.conversion_mapping
from mpfinetune.models.facts import inspect_model
from mpfinetune.models.stage import StageSpan
from mpfinetune.strategies.build import build_stage
from tests.multiproc.training_cases import Problem, run_config

torch.set_num_threads(1)

def peak():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024

folder, precision, span = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
hf_config = AutoConfig.from_pretrained(folder)
facts = inspect_model(hf_config, "causal_lm")
config = run_config(Problem("llama", precision=precision), strategy="local", partition={})
stage, _ = build_stage(config, hf_config, facts, StageSpan(*span), torch.device("cpu"), folder)
own = sum(parameter.numel() * parameter.element_size() for parameter in stage.parameters())
print(json.dumps([peak(), own]))
"""


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """The folder of a model with about 300 MB of fp32 weights, tied or not; each is written once."""

    @cache
    def saved_model(tied: bool) -> Path:
        folder = tmp_path_factory.mktemp("large")
        save_large_model(folder, tied)
        return folder

    return saved_model


def save_large_model(folder: Path, tied: bool) -> None:
    config = tiny_config(
        "llama", vocab_size=16000, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, tie_word_embeddings=tied,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def peak_and_own_bytes(folder: Path, precision: str, span: tuple[int, int, bool, bool]) -> tuple[int, int]:
    command = [sys.executable, "-c", PEAK, str(folder), precision, json.dumps(span)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    peak, own = json.loads(done.stdout.splitlines()[-1])
    return peak, own


@pytest.fixture(scope="module")
def bare_peak(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Of a process that runs the same code on a model of 0.1 MB."""
    folder = tmp_path_factory.mktemp("bare")
    saved("llama", folder)
    return peak_and_own_bytes(folder, "bf16", (0, 4, True, True))[0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc, which only Linux has")
@pytest.mark.parametrize(
    ("tied", "precision", "span"),
    [(False, "fp32", (4, 8, False, True)), (False, "bf16", (0, 8, True, True)), (True, "fp32", (0, 8, True, True))],
    ids=["half", "whole-in-bf16", "whole-tied"],
)
def test_a_rank_needs_its_own_bytes_and_little_more(
    tied: bool, precision: str, span: tuple[int, int, bool, bool], bare_peak: int, large_model: Callable[[bool], Path]
) -> None:
    """Holding the whole model would be twice the bytes of a half; the fp32 of the file beside bf16, three times."""
    folder = large_model(tied)
    assert sum(file.stat().st_size for file in weight_files(folder)) > 200 * 2**20
    peak, own = peak_and_own_bytes(folder, precision, span)
    used = f"{(peak - bare_peak) / 2**20:.0f} MiB above the bare process for {own / 2**20:.0f} MiB of weights, at most 15 % more allowed"
    assert peak - bare_peak <= 1.15 * own, used
