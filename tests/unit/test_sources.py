"""Reading files: true line numbers, and one clear message for each way a file can be wrong."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from mpfinetune.data import sources
from mpfinetune.data.tasks import GLUE_TASKS
from mpfinetune.errors import DataError

SHARED = Path(os.environ.get("MPFINETUNE_SHARED", Path(__file__).resolve().parents[3] / "shared"))
needs_shared = pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="no shared data: set MPFINETUNE_SHARED or put it in ../shared")


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def message(error: pytest.ExceptionInfo[DataError]) -> str:
    return str(error.value)


# --- real data --------------------------------------------------------------------------------------------------------------------


@needs_shared
@pytest.mark.parametrize(
    ("task", "file", "rows"),
    [
        ("mrpc", "MRPC/train.tsv", 3668),
        ("mrpc", "MRPC/dev.tsv", 408),
        ("mrpc", "MRPC/test.tsv", 1725),
        ("sst2", "SST-2/train.tsv", 67349),
        ("sst2", "SST-2/dev.tsv", 872),
        ("rte", "RTE/train.tsv", 2490),
        ("rte", "RTE/dev.tsv", 277),
        ("cola", "CoLA/train.tsv", 8551),
        ("cola", "CoLA/dev.tsv", 1043),
        ("stsb", "STS-B/train.tsv", 5749),
        ("stsb", "STS-B/dev.tsv", 1500),
    ],
)
def test_real_glue_files_load_fully(task: str, file: str, rows: int) -> None:
    table_row = GLUE_TASKS[task]
    needed = (*table_row.text_columns, table_row.label_column)
    table = sources.read_tsv(SHARED / "data/glue" / file, needed, "data.path", table_row.positional_columns)
    assert len(table.records) == rows
    assert all(record.values[column] for record in table.records for column in needed)


@needs_shared
@pytest.mark.parametrize(("file", "rows"), [("gsm8k/train.jsonl", 7473), ("gsm8k/test.jsonl", 1319), ("self_instruct/seed_tasks.jsonl", 175)])
def test_real_jsonl_files_load_fully(file: str, rows: int) -> None:
    table = sources.read_jsonl(SHARED / "data" / file, "data.path")
    assert (len(table.records), table.bad) == (rows, [])


@needs_shared
def test_sts_b_test_file_has_no_header_and_says_so() -> None:
    with pytest.raises(DataError, match=r"no column 'sentence1', no column 'sentence2', no column 'score'; columns there: main-captions"):
        sources.read_tsv(SHARED / "data/glue/STS-B/sts-test.tsv", ("sentence1", "sentence2", "score"), "data.eval_path")


# --- TSV --------------------------------------------------------------------------------------------------------------------------


def test_tsv_with_bom_crlf_bare_quotes_and_no_newline_at_the_end(tmp_path: Path) -> None:
    path = write(tmp_path, "dev.tsv", b'\xef\xbb\xbfsentence\tlabel\r\n" Yes , he said .\t1\r\n\r\nhe said " no\t0')
    table = sources.read_tsv(path, ("sentence", "label"), "data.path")
    assert table.columns == ("sentence", "label")
    assert [(record.line, record.values["sentence"]) for record in table.records] == [(2, '" Yes , he said .'), (4, 'he said " no')]


def test_tsv_is_cut_at_newlines_only(tmp_path: Path) -> None:
    path = write(tmp_path, "dev.tsv", "sentence\tlabel\none\u2028two\u0085three\x0cfour\t1\n")
    assert sources.read_tsv(path, ("sentence", "label"), "data.path").records[0].values["sentence"] == "one\u2028two\u0085three\x0cfour"


def test_tsv_wrong_column_counts_name_every_line(tmp_path: Path) -> None:
    path = write(tmp_path, "dev.tsv", "sentence\tlabel\na\t1\nb\nc\t0\nd\te\t1\n")
    with pytest.raises(DataError) as error:
        sources.read_tsv(path, ("sentence", "label"), "data.path")
    assert message(error).splitlines() == [
        f"{path}:3: 1 columns, must be 2 (sentence, label), parted by single tabs",
        f"{path}:5: 3 columns, must be 2 (sentence, label), parted by single tabs",
    ]


def test_report_lists_twenty_lines_then_counts(tmp_path: Path) -> None:
    path = write(tmp_path, "dev.tsv", "sentence\tlabel\n" + "broken\n" * 33)
    with pytest.raises(DataError) as error:
        sources.read_tsv(path, ("sentence", "label"), "data.path")
    lines = message(error).splitlines()
    assert len(lines) == 21
    assert lines[-1] == "... and 13 more"


def test_tsv_missing_column_names_the_nearest_and_those_there(tmp_path: Path) -> None:
    path = write(tmp_path, "train.tsv", "sentence1\tsentence2\tgold_label\na\tb\t1\n")
    with pytest.raises(DataError) as error:
        sources.read_tsv(path, ("sentence", "label"), "data.path")
    assert "no column 'sentence' (did you mean 'sentence" in message(error)
    assert "'label' (did you mean 'gold_label'?)" in message(error)
    assert "columns there: sentence1, sentence2, gold_label" in message(error)


def test_tsv_missing_file_names_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, "train.tsv", "x")
    with pytest.raises(DataError, match=r"data\.path: '.*dev\.tsv': no such file.*files there: train\.tsv"):
        sources.read_tsv(tmp_path / "dev.tsv", (), "data.path")


@pytest.mark.parametrize(("content", "what"), [("", "the file is empty"), ("\n\n", "the file is empty"), ("a\tb\n", "there is a header, but no row")])
def test_tsv_without_rows(tmp_path: Path, content: str, what: str) -> None:
    path = write(tmp_path, "train.tsv", content)
    with pytest.raises(DataError, match=f"train.tsv: {what}; data.path must name data"):
        sources.read_tsv(path, ("a",), "data.path")


def test_non_utf8_names_line_and_byte_offset(tmp_path: Path) -> None:
    path = write(tmp_path, "train.tsv", b"sentence\tlabel\nfine\t1\ncaf\xe9\t0\n")
    with pytest.raises(DataError) as error:
        sources.read_tsv(path, ("sentence", "label"), "data.path")
    offset = path.read_bytes().index(b"\xe9")
    assert message(error) == f"{path}:3: byte 0xe9 at byte offset {offset} of the file is not UTF-8; save the file as UTF-8"


def test_utf16_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "train.jsonl", '{"text": "a"}\n'.encode("utf-16"))
    with pytest.raises(DataError, match=r"is UTF-16 text; data.path must name a UTF-8 file"):
        sources.read_jsonl(path, "data.path")


# --- JSONL ------------------------------------------------------------------------------------------------------------------------


def test_jsonl_tells_all_kinds_of_bad_lines_apart_in_one_report(tmp_path: Path) -> None:
    lines = [b'{"text": "good"}', b"", b'{"text": "broken"', b"[1]", b'{"text": null}', b'{"test": "x"}', b'{"text": 7}', b'{"text": "caf\xe9"}']
    path = write(tmp_path, "rows.jsonl", b"\n".join([*lines, b'{"text": "\\ud800"}', b'"just text"']))
    table = sources.read_jsonl(path, "data.path")
    with pytest.raises(DataError) as error:
        sources.check_fields(table, {"text": str})
    report = message(error).splitlines()
    expected = [
        (3, "not valid JSON: Expecting ',' delimiter (column 18)"),
        (4, "the row is a list, must be an object"),
        (5, "field 'text' is null, must be text"),
        (6, "field 'text' is missing (did you mean 'test'?); fields there: test"),
        (7, "field 'text' is a number, must be text"),
        (8, f"byte 0xe9 at byte offset {path.read_bytes().index(bytes([0xE9]))} of the file is not UTF-8"),
        (9, "field 'text' holds half of a surrogate pair"),
        (10, "the row is text, must be an object"),
    ]
    assert len(report) == len(expected)
    for line, (number, text) in zip(report, expected, strict=True):
        assert line.startswith(f"{path}:{number}: {text}")


def test_jsonl_good_file_with_blank_lines_keeps_true_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "rows.jsonl", '\ufeff{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    table = sources.read_jsonl(path, "data.path")
    sources.check_fields(table, {"text": str})
    assert [(record.line, record.values["text"]) for record in table.records] == [(1, "a"), (4, "b")]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_jsonl_empty(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl: the file is empty; data\.eval_path must"):
        sources.read_jsonl(write(tmp_path, "rows.jsonl", content), "data.eval_path")


def test_json_array_and_json_lines_under_the_same_suffix(tmp_path: Path) -> None:
    array = sources.read_json(write(tmp_path, "a.json", json.dumps([{"text": "a"}, {"text": "b"}], indent=1)), "data.path")
    lines = sources.read_json(write(tmp_path, "b.json", '{"text": "a"}\n{"text": "b"}\n'), "data.path")
    assert [record.values for record in array.records] == [record.values for record in lines.records]
    assert array.place(2).endswith("a.json, row 2")
    with pytest.raises(DataError, match=r"c\.json:3: not valid JSON"):
        sources.read_json(write(tmp_path, "c.json", '[\n{"text": "a"},\n{"text" "b"}]'), "data.path")


# --- text -------------------------------------------------------------------------------------------------------------------------


def test_text_is_read_whole_and_checked(tmp_path: Path) -> None:
    assert sources.read_text(write(tmp_path, "a.txt", "\ufeffone\r\n\r\ntwo\n"), "data.path") == "one\n\ntwo\n"
    with pytest.raises(DataError, match=r"b\.txt:2: byte 0xff at byte offset 4"):
        sources.read_text(write(tmp_path, "b.txt", b"one\n\xff"), "data.path")
    with pytest.raises(DataError, match=r"c\.txt: the file is empty"):
        sources.read_text(write(tmp_path, "c.txt", " \n"), "data.path")


# --- where a path leads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["data/rows.jsonl", "./rows", "/no/where", "a/b/c", "rows.txt", "glue.TSV", "~/nothing-here", "data\\rows"])
def test_missing_local_paths_never_touch_the_network(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started_seconds = time.monotonic()
    with pytest.raises(DataError, match="no such file or folder"):
        sources.find_local(path, "data.path")
    assert time.monotonic() - started_seconds < 0.5


def test_missing_local_path_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", "{}")
    with pytest.raises(DataError, match=r"data\.eval_path: '.*trian\.jsonl': no such file or folder \(did you mean 'train\.jsonl'\?\)"):
        sources.find_local(str(tmp_path / "trian.jsonl"), "data.eval_path")


@pytest.mark.parametrize("path", ["nyu-mll/glue", "imdb", "openai/gsm8k:main"])
def test_hub_names_are_not_taken_for_paths(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sources.find_local(path, "data.path") is None


# --- through the datasets library -------------------------------------------------------------------------------------------------


def test_hub_out_of_reach_names_the_key_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: object) -> None:
        raise ConnectionError("Couldn't reach 'nyu-mll/glue' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(DataError) as error:
        sources.read_hub("nyu-mll/glue", "mrpc", ("train",), "data.path")
    assert message(error).startswith("data.path: 'nyu-mll/glue' is no file or folder here, and the Hugging Face hub gave no data set")
    assert "ConnectionError: Couldn't reach" in message(error)
    assert "set data.path to local files" in message(error)


def test_hub_splits_and_config_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []
    found = datasets.DatasetDict(test=datasets.Dataset.from_dict({"question": ["1+1?"], "answer": ["2"]}))

    def load_dataset(*names: str) -> object:
        asked.append(names)
        return found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = sources.read_hub("openai/gsm8k:main", None, ("validation", "test"), "data.eval_path")
    assert asked == [("openai/gsm8k", "main")]
    assert table.records[0].values == {"question": "1+1?", "answer": "2"}
    assert table.place(1) == "openai/gsm8k:main (test), row 1"
    with pytest.raises(DataError, match=r"has no split train, only test; .*data\.eval_fraction"):
        sources.read_hub("openai/gsm8k:main", None, ("train",), "data.path")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_local_columnar_files(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / f"rows.{suffix}"
    getattr(datasets.Dataset.from_dict({"text": ["one, two", "three"]}), f"to_{suffix}")(str(path))
    table = sources.read_columnar(path, "data.path")
    assert [record.values["text"] for record in table.records] == ["one, two", "three"]


def test_broken_parquet_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = write(tmp_path, "rows.parquet", b"no parquet at all")
    with pytest.raises(DataError, match=r"data\.path: '.*rows\.parquet' cannot be read as \.parquet"):
        sources.read_columnar(path, "data.path")
