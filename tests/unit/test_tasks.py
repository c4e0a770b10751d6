"""From files to tokenised rows: cutting, targets, label checks, held-out rows. Real data and tokenizers where they are there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpfinetune.config import RunConfig, config_from_dict
from mpfinetune.data import sources
from mpfinetune.data.causal_lm import conversation_segments
from mpfinetune.data.tasks import GLUE_TASKS, LoadedData, Row, choose_pad_token, load_rows
from mpfinetune.errors import DataError

SHARED = Path(os.environ.get("MPFINETUNE_SHARED", Path(__file__).resolve().parents[3] / "shared"))
needs_data = pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no shared data: set MPFINETUNE_SHARED or put it in ../shared")
STORIES = SHARED / "models" / "stories260k"
CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def wordpiece() -> Any:
    """A tiny BERT-like tokenizer: one token per known word, with segment ids for pairs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", "yes", "no"]
    tokenizer = Tokenizer(models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(4)  # as shipped with sentence-transformers' models; must not cut behind our back
    tokenizer.enable_padding(length=9)
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names)


@pytest.fixture
def words() -> Any:
    """A causal tokenizer of whole words with BOS in front and, trap, EOS behind; it has a chat template and no pad token."""
    return word_tokenizer()


def word_tokenizer(**names: Any) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", *"abcdefghijklmnopqrstuvwxyz", "Q", "A", ":"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", **names})
    made.chat_template = CHATML
    return made


@pytest.fixture(scope="module")
def stories() -> Any:
    if not STORIES.is_dir():
        pytest.skip("no shared models: set MPFINETUNE_SHARED or put them in ../shared")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(STORIES)


def run_config(task: str | None, **data: Any) -> RunConfig:
    model = {"path": "tiny", "task": "sequence_classification" if task else "causal_lm"}
    return config_from_dict({"model": model, "data": {"task": task, "max_length": 64, **data}, "run_dir": "run"})


def write_glue(folder: Path, header: str, train: list[str], dev: list[str] | None = None) -> str:
    for name, rows in (("train.tsv", train), ("dev.tsv", dev or train)):
        (folder / name).write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return str(folder)


def write_jsonl(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def load(config: RunConfig, tokenizer: Any, num_labels: int = 2, max_positions: int | None = None) -> tuple[LoadedData, list[str]]:
    said: list[str] = []
    return load_rows(config, tokenizer, num_labels, max_positions, said.append), said


def fails(config: RunConfig, tokenizer: Any, num_labels: int = 2, max_positions: int | None = None) -> str:
    with pytest.raises(DataError) as error:
        load(config, tokenizer, num_labels, max_positions)
    return str(error.value)


def labels_of(row: Row) -> list[int]:
    assert isinstance(row.labels, list)
    return row.labels


def targets(tokenizer: Any, row: Row) -> str:
    return str(tokenizer.decode([label for label in labels_of(row) if label != -100]))


# --- classification ---------------------------------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(
    ("task", "folder", "classes"), [("mrpc", "MRPC", 2), ("sst2", "SST-2", 2), ("rte", "RTE", 2), ("cola", "CoLA", 2), ("stsb", "STS-B", 1)]
)
def test_real_glue_tasks_become_rows(task: str, folder: str, classes: int, wordpiece: Any) -> None:
    config = run_config(task, path=str(SHARED / "data/glue" / folder), train_rows=200, eval_rows=50)
    loaded, _ = load(config, wordpiece, classes)
    assert (len(loaded.train), len(loaded.evaluation)) == (200, 50)
    assert loaded.metric_names == GLUE_TASKS[task].metrics
    assert loaded.regression == (task == "stsb")
    labels = [row.labels for row in loaded.train]
    if task == "stsb":
        assert all(isinstance(label, float) and 0 <= label <= 5 for label in labels)
    else:
        assert set(labels) == {0, 1}
    assert all(2 < len(row.input_ids) <= 64 for row in loaded.train)


@needs_data
def test_real_mrpc_whole_counts(wordpiece: Any) -> None:
    loaded, said = load(run_config("mrpc", path=str(SHARED / "data/glue/MRPC"), max_length=40), wordpiece)
    assert (len(loaded.train), len(loaded.evaluation)) == (3668, 408)
    assert sum(row.labels == 1 for row in loaded.train) == 2474  # the published share of paraphrases
    assert max(len(row.input_ids) for row in loaded.train) == 40
    assert len(said) == 2
    assert "train.tsv: " in said[0]
    assert said[0].endswith(" of 3668 rows were cut to 40 tokens (data.max_length)")


def test_pairs_are_cut_longest_first_and_counted(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ["1\t1\t2\ta b c d e f g h\ty z", "0\t3\t4\ta\tb"])
    loaded, said = load(run_config("mrpc", path=path, max_length=8), wordpiece)
    cut, whole = loaded.train
    assert wordpiece.convert_ids_to_tokens(cut.input_ids) == ["[CLS]", "a", "b", "c", "[SEP]", "y", "z", "[SEP]"]
    assert cut.token_type_ids == [0, 0, 0, 0, 0, 1, 1, 1]
    assert (whole.input_ids, whole.token_type_ids) == (wordpiece("a", "b", padding=False, truncation=False)["input_ids"], [0, 0, 0, 1, 1])
    assert said[0] == f"{tmp_path / 'train.tsv'}: 1 of 2 rows were cut to 8 tokens (data.max_length)"
    assert (cut.labels, whole.labels) == (1, 0)


def test_row_limits_take_the_first_and_eval_path_replaces_dev(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "sentence\tlabel", ["a\t1", "b\t0", "c\t1"], ["d\t0", "e\t1"])
    (tmp_path / "other.tsv").write_text("label\tsentence\n1\tz\n")
    loaded, _ = load(run_config("sst2", path=path, train_rows=2, eval_rows=1), wordpiece)
    assert [wordpiece.decode(row.input_ids[1:-1]) for row in [*loaded.train, *loaded.evaluation]] == ["a", "b", "d"]
    loaded, _ = load(run_config("sst2", path=path, eval_path=str(tmp_path / "other.tsv")), wordpiece)
    assert [wordpiece.decode(row.input_ids[1:-1]) for row in loaded.evaluation] == ["z"]


def test_rte_names_follow_the_hubs_order(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "index\tsentence1\tsentence2\tlabel", ["0\ta\tb\tentailment", "1\ta\tb\tnot_entailment"])
    assert [row.labels for row in load(run_config("rte", path=path), wordpiece)[0].train] == [0, 1]
    path = write_glue(tmp_path, "index\tsentence1\tsentence2\tlabel", ["0\ta\tb\tentailment", "1\ta\tb\tcontradiction"])
    message = fails(run_config("rte", path=path), wordpiece)
    assert message == f"{tmp_path / 'train.tsv'}:3: label 'contradiction' in column 'label', must be one of entailment, not_entailment"


def test_labels_outside_the_head_name_the_set_the_size_and_the_key(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "sentence\tlabel", ["a\t1", "b\t3", "c\t0"])
    message = fails(run_config("sst2", path=path), wordpiece)
    assert f"{tmp_path / 'train.tsv'}:3: label 3 is outside the head: labels found {{0, 1, 3}}, model.num_labels is 2" in message
    assert [row.labels for row in load(run_config("sst2", path=path), wordpiece, num_labels=4)[0].train] == [1, 3, 0]
    assert "labels found {0, 1, 3}, model.num_labels is 1" in fails(run_config("sst2", path=path), wordpiece, num_labels=1)


def test_scores_for_a_classification_head_and_classes_for_regression(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "sentence\tlabel", ["a\t1", "b\t3.8"])
    assert "train.tsv:3: label 3.8 is a score, but data.task: sst2 has a classification head" in fails(run_config("sst2", path=path), wordpiece)
    message = fails(run_config("stsb", path=path), wordpiece, num_labels=2)
    assert message == "model.num_labels: 2 given, must be 1: data.task: stsb predicts a score (regression)"


def test_regression_labels_must_be_finite_numbers(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "sentence1\tsentence2\tscore", ["a\tb\t3.8", "a\tb\tnan", "a\tb\t"])
    message = fails(run_config("stsb", path=path), wordpiece, num_labels=1)
    assert [line.partition("train.tsv:")[2] for line in message.splitlines()] == [
        "3: label 'nan' in column 'score', must be a number",
        "4: label '' in column 'score', must be a number",
    ]


def test_unlabelled_test_rows(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "sentence\tlabel", ["a\t-1", "b\t-1"])
    assert "every label is -1: a test set without labels; data.path must" in fails(run_config("sst2", path=path), wordpiece)
    path = write_glue(tmp_path, "sentence\tlabel", ["a\t1", "b\t-1"])
    assert "-1 marks rows without a label" in fails(run_config("sst2", path=path), wordpiece)


def test_wrong_task_for_the_columns(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "sentence1\tsentence2\tgold_label", ["a\tb\t0"])
    message = fails(run_config("sst2", path=path), wordpiece)
    assert "no column 'sentence' (did you mean" in message
    assert message.endswith("change data.path or data.task")


def test_folder_and_file_mistakes(wordpiece: Any, tmp_path: Path) -> None:
    assert "no such file" in fails(run_config("sst2", path=str(tmp_path)), wordpiece)
    write_glue(tmp_path, "sentence\tlabel", ["a\t1"])
    message = fails(run_config("sst2", path=str(tmp_path / "train.tsv")), wordpiece)
    assert "is a file; for a GLUE task it must be the folder with train.tsv and dev.tsv" in message
    (tmp_path / "dev.tsv").write_text("")
    assert "dev.tsv: the file is empty" in fails(run_config("sst2", path=str(tmp_path)), wordpiece)


def test_max_length_against_positions_and_special_tokens(wordpiece: Any, tmp_path: Path) -> None:
    path = write_glue(tmp_path, "sentence1\tsentence2\tscore", ["a\tb\t1.0"])
    message = fails(run_config("stsb", path="/not/even/read", max_length=600), wordpiece, 1, max_positions=512)
    assert message == "data.max_length: 600 given, must be at most 512, the number of positions of tiny"
    assert load(run_config("stsb", path=path, max_length=512), wordpiece, 1, max_positions=512)
    assert "must be more than the tokenizer's 3 special tokens" in fails(run_config("stsb", path=path, max_length=3), wordpiece, 1)


def test_glue_from_the_hub_is_the_default(wordpiece: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def read_hub(path: str, config_name: str, splits: tuple[str, ...], key: str) -> sources.Table:
        asked.append((path, config_name, splits, key))
        records = [sources.Record(1, {"sentence1": "a", "sentence2": "b", "label": 1, "idx": 0})]
        return sources.Table(path, ("sentence1", "sentence2", "label", "idx"), records, counted="row")

    monkeypatch.setattr(sources, "read_hub", read_hub)
    loaded, _ = load(run_config("mrpc"), wordpiece)
    assert asked == [("nyu-mll/glue", "mrpc", ("train",), "data.path"), ("nyu-mll/glue", "mrpc", ("validation",), "data.path")]
    assert [row.labels for row in loaded.train] == [1]


# --- causal LM: targets -----------------------------------------------------------------------------------------------------------


def test_text_rows_learn_every_token_and_end_in_one_eos(words: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"text": "a b c"}])
    row = load(run_config(None, path=path), words)[0].train[0]
    assert words.convert_ids_to_tokens(row.input_ids) == ["<s>", "a", "b", "c", "</s>"]  # one EOS, though the tokenizer adds its own
    assert labels_of(row)[1:] == row.input_ids[1:]


def test_prompt_and_response_are_parted_exactly(words: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"question": "a b", "answer": "c d"}])
    config = run_config(None, path=path, columns={"prompt": "question", "response": "answer"}, prompt_template="Q : {prompt} A :")
    row = load(config, words)[0].train[0]
    assert words.convert_ids_to_tokens(row.input_ids) == ["<s>", "Q", ":", "a", "b", "A", ":", "c", "d", "</s>"]
    assert row.labels == [-100] * 7 + row.input_ids[7:]
    assert row.token_type_ids is None


@needs_data
def test_real_gsm8k_with_a_real_tokenizer(stories: Any) -> None:
    columns = {"prompt": "question", "response": "answer"}
    gsm8k = SHARED / "data/gsm8k"
    config = run_config(
        None, path=str(gsm8k / "train.jsonl"), eval_path=str(gsm8k / "test.jsonl"), columns=columns, max_length=512, train_rows=300, eval_rows=40
    )
    loaded, said = load(config, stories)
    assert len(loaded.evaluation) <= 40
    assert (loaded.metric_names, loaded.best_metric, loaded.lower_is_better) == ((), "loss", True)
    first = json.loads((gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    row = loaded.train[0]
    assert row.input_ids[0] == stories.bos_token_id
    prompt_ids = stories(first["question"])["input_ids"]
    assert row.input_ids[: len(prompt_ids)] == prompt_ids
    assert labels_of(row)[: len(prompt_ids)] == [-100] * len(prompt_ids)
    assert labels_of(row)[len(prompt_ids) :] == row.input_ids[len(prompt_ids) :]
    assert row.input_ids[-1] == stories.eos_token_id or len(row.input_ids) == 512
    dropped = next((line for line in said if "train.jsonl" in line and "dropped" in line), "0 of")
    assert len(loaded.train) == 300 - int(dropped.partition(".jsonl: ")[2].split(" ")[0] or 0)


def test_chat_renders_turns_and_learns_the_answer(words: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"prompt": "a b", "response": "c"}])
    row = load(run_config(None, path=path, chat=True), words)[0].train[0]
    assert words.convert_ids_to_tokens(row.input_ids) == ["<|user|>", "a", "b", "</s>", "<|assistant|>", "c", "</s>"]
    assert targets(words, row) == words.decode(words("c", add_special_tokens=False)["input_ids"] + [2])


def test_messages_learn_all_assistant_turns_and_only_those(words: Any, tmp_path: Path) -> None:
    turns = [("system", "s"), ("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "e"), ("user", "f")]
    path = write_jsonl(tmp_path, [{"talk": [{"role": role, "content": text} for role, text in turns]}])
    row = load(run_config(None, path=path, columns={"messages": "talk"}), words)[0].train[0]
    whole = "<|system|>s</s><|user|>a</s><|assistant|>b c</s><|user|>d</s><|assistant|>e</s><|user|>f</s>"
    assert row.input_ids == words(whole, add_special_tokens=False)["input_ids"]
    assert [words.convert_ids_to_tokens(label) if label != -100 else "" for label in labels_of(row)] == (
        ["", "", "", "", "", "", "", "b", "c", "</s>", "", "", "", "", "e", "</s>", "", "", ""]
    )


def test_templates_that_rewrite_earlier_turns_are_refused(words: Any, tmp_path: Path) -> None:
    words.chat_template = "{% for m in messages %}{{ '<|' + m.role + '|>' + ('last ' if loop.last else '') + m.content }}{% endfor %}"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = write_jsonl(tmp_path, [{"messages": talk}])
    assert "rows.jsonl:1: the tokenizer's chat template renders message 1 differently" in fails(run_config(None, path=path), words)


def test_templates_that_refuse_and_tokenizers_without_one(words: Any, tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = write_jsonl(tmp_path, [talk])
    words.chat_template = "{{ raise_exception('roles must alternate') }}"
    assert "rows.jsonl:1: the tokenizer's chat template refuses the conversation: roles must alternate" in fails(run_config(None, path=path), words)
    words.chat_template = None
    assert "rows.jsonl holds messages, but the tokenizer '' has no chat template; set model.tokenizer" in fails(run_config(None, path=path), words)
    path = write_jsonl(tmp_path, [{"prompt": "a", "response": "b"}])
    assert fails(run_config(None, path=path, chat=True), words).startswith("data.chat: true given, but the tokenizer '' has no chat template")


def test_malformed_messages_are_reported_by_line(words: Any, tmp_path: Path) -> None:
    bad: list[Any] = [[], ["a"], [{"role": "user"}], [{"role": "user", "content": None}], [{"role": 3, "content": "a"}], "a"]
    path = write_jsonl(tmp_path, [{"messages": value} for value in bad[:-1]])
    assert [line.partition("rows.jsonl:")[2] for line in fails(run_config(None, path=path), words).splitlines()] == [
        "1: field 'messages' is an empty list, must hold at least one message",
        "2: messages[0] is text, must be an object with role and content",
        "3: messages[0].content is missing, must be text",
        "4: messages[0].content is null, must be text",
        "5: messages[0].role is a number, must be text",
    ]
    path = write_jsonl(tmp_path, [{"messages": bad[-1]}])
    assert "rows.jsonl:1: field 'messages' is text, must be a list" in fails(run_config(None, path=path), words)


def test_conversation_without_generation_prompt_support(words: Any) -> None:
    words.chat_template = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    segments = conversation_segments(words, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert segments == [("user:a\n", False), ("assistant:b\n", True)]


# --- causal LM: cutting, dropping, columns ----------------------------------------------------------------------------------------


def test_rows_are_cut_dropped_and_counted(words: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a b c d e f", "response": "g"}, {"prompt": "a b c", "response": "d e f"}]
    loaded, said = load(run_config(None, path=write_jsonl(tmp_path, rows), max_length=6), words)
    assert [words.convert_ids_to_tokens(row.input_ids) for row in loaded.train] == [["<s>", "a", "b", "</s>"], ["<s>", "a", "b", "c", "d", "e"]]
    assert [line.partition("rows.jsonl: ")[2] for line in said] == [
        "2 of 3 rows were cut to 6 tokens (data.max_length)",
        "1 of 3 rows were dropped: no target token (1 lost it beyond data.max_length: 6)",
    ]


def test_a_target_at_position_zero_only_is_no_target(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", eos_token="</s>")
    loaded, said = load(run_config(None, path=write_jsonl(tmp_path, [{"text": ""}, {"text": "a"}])), tokenizer)
    assert [row.input_ids for row in loaded.train] == [[2, 1]]
    assert said[0].endswith("1 of 2 rows were dropped: no target token (0 lost it beyond data.max_length: 64)")


def test_no_row_with_a_target_is_an_error(words: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"prompt": "a b c d e f", "response": "g"}] * 3)
    message = fails(run_config(None, path=path, max_length=4), words)
    assert message.startswith(f"{path}: none of its 3 rows has a target token within 4 tokens; raise data.max_length")


def test_unknown_columns_and_unfitting_ones(words: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"question": "a", "answer": "b"}])
    message = fails(run_config(None, path=path), words)
    assert "the columns question, answer give no rows for causal_lm" in message
    assert "data.columns, for example {prompt: question, response: answer}" in message
    message = fails(run_config(None, path=path, columns={"prompt": "qestion", "response": "answer"}), words)
    assert message == f"data.columns.prompt: 'qestion' is no column of {path} (did you mean 'question'?); columns there: question, answer"


def test_field_missing_in_the_first_row_is_named(words: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"prompt": "a"}, {"prompt": "a", "response": "b"}])
    assert fails(run_config(None, path=path), words).startswith(f"{path}:1: field 'response' is missing")


def test_files_that_cannot_be_rows(words: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.xlsx").write_text("x")
    assert "ends in '.xlsx', must be one of .jsonl, .json, .parquet, .csv, .txt" in fails(run_config(None, path=str(tmp_path / "rows.xlsx")), words)
    assert "is a folder; name the .jsonl" in fails(run_config(None, path=str(tmp_path)), words)
    assert "no such file or folder" in fails(run_config(None, path=str(tmp_path / "none.jsonl")), words)
    path = write_jsonl(tmp_path, [{"text": "a"}])
    assert "data.chat: true given, but" in fails(run_config(None, path=path, chat=True), words)
    assert fails(run_config(None, path=path, eval_path=write_jsonl(tmp_path, [], "empty.jsonl")), words).endswith(
        "empty.jsonl: the file is empty; data.eval_path must name a file with at least one row"
    )


# --- causal LM: plain text and held-out rows --------------------------------------------------------------------------------------


@needs_data
def test_real_text_is_packed_without_losing_a_token(stories: Any) -> None:
    path = SHARED / "data/wikitext2/valid.txt"
    loaded, _ = load(run_config(None, path=str(path), max_length=128), stories)
    lengths = [len(row.input_ids) for row in loaded.train]
    assert set(lengths[:-1]) == {128}
    assert 2 <= lengths[-1] <= 128
    assert all(row.labels == row.input_ids for row in loaded.train)
    ids = [token for row in loaded.train for token in row.input_ids]
    expected = stories(path.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    assert ids == expected[: len(ids)]
    assert len(expected) - len(ids) <= 1


@pytest.mark.parametrize(("count", "lengths"), [(7, [4, 4]), (8, [4, 4]), (9, [4, 4, 2]), (10, [4, 4, 3])])
def test_packing_keeps_a_short_last_block_but_not_one_token(words: Any, tmp_path: Path, count: int, lengths: list[int]) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" ".join("abcdefghij"[:count]))
    assert [len(row.input_ids) for row in load(run_config(None, path=str(path), max_length=4), words)[0].train] == lengths


@pytest.mark.parametrize(("fraction", "held_out"), [(0.2, 2), (0.001, 1), (0.99, 9)])
def test_held_out_rows(words: Any, tmp_path: Path, fraction: float, held_out: int) -> None:
    path = write_jsonl(tmp_path, [{"text": letter} for letter in "abcdefghij"])
    config = run_config(None, path=path, eval_fraction=fraction)
    loaded, _ = load(config, words)
    assert len(loaded.evaluation) == held_out
    ids = [row.input_ids[1] for row in loaded.train], [row.input_ids[1] for row in loaded.evaluation]
    assert sorted(ids[0] + ids[1]) == sorted(words.convert_tokens_to_ids(list("abcdefghij")))
    assert load(config, words)[0] == loaded
    config.train.seed += 1
    assert load(config, words)[0] != loaded


def test_held_out_rows_respect_limits_and_need_two_rows(words: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [{"text": letter} for letter in "abcdefghij"])
    loaded, _ = load(run_config(None, path=path, eval_fraction=0.5, train_rows=3, eval_rows=1), words)
    assert (len(loaded.train), len(loaded.evaluation)) == (3, 1)
    path = write_jsonl(tmp_path, [{"text": "a"}])
    assert "1 row cannot be split by data.eval_fraction: 0.5" in fails(run_config(None, path=path, eval_fraction=0.5), words)


# --- pad token --------------------------------------------------------------------------------------------------------------------


def test_pad_token_choice(wordpiece: Any, words: Any) -> None:
    said: list[str] = []
    assert choose_pad_token(wordpiece, said.append) == 0
    assert said == []
    size = len(words)
    assert choose_pad_token(words, said.append) == words.eos_token_id == 2
    assert "padding with EOS ('</s>'); real EOS targets stay targets" in said[0]
    assert choose_pad_token(word_tokenizer(eos_token=None), said.append) == 0
    assert "padding with id 0" in said[1]
    assert len(words) == size
    assert words.pad_token is None


def test_without_eos_rows_end_without_one_and_it_is_said(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(eos_token=None)
    loaded, said = load(run_config(None, path=write_jsonl(tmp_path, [{"text": "a b"}])), tokenizer)
    assert tokenizer.convert_ids_to_tokens(loaded.train[0].input_ids) == ["<s>", "a", "b"]
    assert said[0].startswith("the tokenizer has no EOS token")
