"""Files and hub data sets, read into tables of records that know their true line numbers.

Nothing here knows a task or a tokenizer. Problems of single lines are collected in the table, so that the reader of the fields can report
them together with its own: one report holds every bad line (the first 20 are listed).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mpfinetune.errors import DataError, did_you_mean

MAX_LISTED = 20
LOCAL_SUFFIXES = (".tsv", ".csv", ".jsonl", ".json", ".txt", ".parquet")
_CODEC_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


@dataclass(frozen=True, slots=True)
class Record:
    """One row: the values by column, and the 1-based line (row, where the source has no lines) it came from."""

    line: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """What is wrong with one line, without its place."""

    line: int
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one source. ``bad`` holds lines that could not be read; ``raise_bad`` reports them with what the caller found."""

    name: str
    columns: tuple[str, ...]
    records: list[Record]
    bad: list[BadLine] = field(default_factory=list)
    counted: Literal["line", "row"] = "line"

    def place(self, line: int) -> str:
        """``file:12`` or ``name, row 12``."""
        return f"{self.name}:{line}" if self.counted == "line" else f"{self.name}, row {line}"

    def raise_bad(self, found: Iterable[BadLine] = ()) -> None:
        """Raise a DataError that lists the first 20 of all bad lines in file order; do nothing where there is none."""
        problems = sorted([*self.bad, *found], key=lambda problem: problem.line)
        if not problems:
            return
        listed = [f"{self.place(problem.line)}: {problem.text}" for problem in problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            listed.append(f"... and {len(problems) - MAX_LISTED} more")
        raise DataError("\n".join(listed))


# --- where a path leads -----------------------------------------------------------------------------------------------------------


def find_local(path: str, key: str) -> Path | None:
    """The local file or folder that ``path`` names, or None where it can only be a hub name.

    Raises:
        DataError: the path has the form of a local one and does not exist; decided without touching the network.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    if not _looks_local(path):
        return None
    folder = local.parent
    neighbours = os.listdir(folder) if folder.is_dir() else []
    where = "" if local.is_absolute() else f" (looked from {Path.cwd()})"
    raise DataError(f"{key}: '{path}': no such file or folder{did_you_mean(local.name, neighbours)}{where}")


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.lower().endswith(LOCAL_SUFFIXES) or path.count("/") > 1 or "\\" in path


# --- lines ------------------------------------------------------------------------------------------------------------------------


def _read_lines(path: Path, key: str, bad: list[BadLine]) -> Iterator[tuple[int, str]]:
    """Each line with its 1-based number, without its end (LF or CRLF) and without a BOM; lines that are not UTF-8 go to ``bad``.

    The file is cut at LF bytes only: str.splitlines would also cut at U+2028, U+0085 and form feeds inside a sentence.
    """
    try:
        with path.open("rb") as file:
            offset_bytes = 0
            for number, raw in enumerate(file, start=1):
                if number == 1 and raw[:2] in _CODEC_MARKS:
                    raise DataError(f"{path}: is {_CODEC_MARKS[raw[:2]]} text; {key} must name a UTF-8 file: save it again as UTF-8")
                try:
                    text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    bad.append(BadLine(number, _not_utf8(raw[error.start], offset_bytes + error.start)))
                else:
                    yield number, text.removesuffix("\n").removesuffix("\r")
                offset_bytes += len(raw)
    except OSError as error:
        raise DataError(f"{key}: '{path}' cannot be read: {error.strerror or error}") from error


def _not_utf8(byte: int, offset_bytes: int) -> str:
    return f"byte 0x{byte:02x} at byte offset {offset_bytes} of the file is not UTF-8; save the file as UTF-8"


def read_text(path: Path, key: str) -> str:
    """The whole file as one text; CRLF becomes LF.

    Raises:
        DataError: unreadable, not UTF-8 (all bad lines listed), or nothing but white space.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"{key}: '{path}' cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        bad: list[BadLine] = []
        for _ in _read_lines(path, key, bad):
            pass
        Table(str(path), (), [], bad).raise_bad()
        raise
    if not text.strip():
        raise DataError(f"{path}: the file is empty; {key} must name a file with text")
    return text


# --- TSV --------------------------------------------------------------------------------------------------------------------------


def read_tsv(path: Path, needed: tuple[str, ...], key: str, columns: tuple[str, ...] | None = None) -> Table:
    """Tab-separated lines, every cell taken as it stands (quotes are text: GLUE has bare ones). Empty lines are passed over.

    Args:
        needed: columns that must be there.
        columns: names by position of a file without a header; None: the first line is the header.

    Raises:
        DataError: missing, empty or non-UTF-8 file, missing columns, lines with another number of columns.
    """
    if not path.is_file():
        raise DataError(f"{key}: '{path}': no such file{_nearest_file(path)}")
    bad: list[BadLine] = []
    records: list[Record] = []
    names = columns
    for number, line in _read_lines(path, key, bad):
        if not line:
            continue
        cells = line.split("\t")
        if names is None:
            names = tuple(cells)
            require_columns(str(path), names, needed, key)
        elif len(cells) != len(names):
            bad.append(BadLine(number, f"{len(cells)} columns, must be {len(names)} ({_shown(names)}), parted by single tabs"))
        else:
            records.append(Record(number, dict(zip(names, cells, strict=True))))
    if not records and not bad:
        what = "the file is empty" if names is None or columns else "there is a header, but no row"
        raise DataError(f"{path}: {what}; {key} must name data with at least one row")
    table = Table(str(path), names or (), records, bad)
    table.raise_bad()
    return table


def require_columns(name: str, there: tuple[str, ...], needed: Iterable[str], key: str) -> None:
    """Raise a DataError that names each missing column, the nearest one and all that are there."""
    missing = [f"'{column}'{did_you_mean(column, there)}" for column in needed if column not in there]
    if missing:
        raise DataError(f"{name}: no column {', no column '.join(missing)}; columns there: {_shown(there)}; change {key} or data.task")


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    files = sorted(entry.name for entry in path.parent.iterdir())
    return did_you_mean(path.name, files) + f"; files there: {_shown(files)}"


def _shown(names: Iterable[str]) -> str:
    """Names in a message: a file without its header would otherwise put whole sentences here."""
    short = [name if len(name) <= 40 else name[:37] + "..." for name in names]
    return ", ".join(short[:MAX_LISTED]) + (", ..." if len(short) > MAX_LISTED else "") if short else "none"


# --- JSON -------------------------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path, key: str) -> Table:
    """One JSON object a line; empty lines are passed over. Broken lines are kept in ``table.bad`` for the report of check_fields.

    Raises:
        DataError: unreadable or empty file, or no line at all that is a JSON object.
    """
    bad: list[BadLine] = []
    records: list[Record] = []
    for number, line in _read_lines(path, key, bad):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            bad.append(BadLine(number, f"not valid JSON: {error.msg} (column {error.colno})"))
        except (ValueError, RecursionError) as error:
            bad.append(BadLine(number, f"not valid JSON: {error}"))
        else:
            _add_json_row(value, number, records, bad)
    return _json_table(path, records, bad, "line", key)


def read_json(path: Path, key: str) -> Table:
    """A .json file: one array of objects, or one object a line.

    Raises:
        DataError: as read_jsonl; a broken array names the line and column.
    """
    text = read_text(path, key)
    if not text.lstrip().startswith("["):
        return read_jsonl(path, key)
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg} (column {error.colno})") from error
    bad: list[BadLine] = []
    records: list[Record] = []
    for number, value in enumerate(values, start=1):
        _add_json_row(value, number, records, bad)
    return _json_table(path, records, bad, "row", key)


def _add_json_row(value: Any, number: int, records: list[Record], bad: list[BadLine]) -> None:
    if isinstance(value, dict):
        records.append(Record(number, value))
    else:
        bad.append(BadLine(number, f'the row is {json_type(value)}, must be an object like {{"text": ...}}'))


def _json_table(path: Path, records: list[Record], bad: list[BadLine], counted: Literal["line", "row"], key: str) -> Table:
    columns = tuple(dict.fromkeys(name for record in records for name in record.values))
    table = Table(str(path), columns, records, bad, counted)
    if not records:
        table.raise_bad()
        raise DataError(f"{path}: the file is empty; {key} must name a file with at least one row")
    return table


def json_type(value: Any) -> str:
    """The kind of a JSON value in a user's words."""
    if value is None:
        return "null"
    words: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return words.get(type(value), type(value).__name__)


def check_fields(table: Table, required: Mapping[str, type]) -> None:
    """Check that every record has each required field with a value of its type; ``found`` problems are reported with the broken lines.

    Raises:
        DataError: one line for each bad line: missing, null, wrong type or not encodable, told apart.
    """
    found = []
    for record in table.records:
        for name, wanted in required.items():
            problem = _field_problem(record.values, name, wanted)
            if problem:
                found.append(BadLine(record.line, problem))
    table.raise_bad(found)


def _field_problem(values: dict[str, Any], name: str, wanted: type) -> str:
    if name not in values:
        return f"field '{name}' is missing{did_you_mean(name, values)}; fields there: {_shown(values)}"
    value = values[name]
    if value is None:
        return f"field '{name}' is null, must be {json_type(wanted())}"
    if not isinstance(value, wanted):
        return f"field '{name}' is {json_type(value)}, must be {json_type(wanted())}"
    if isinstance(value, str) and not is_encodable(value):
        return f"field '{name}' holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    return ""


def is_encodable(text: str) -> bool:
    """False for lone surrogates: JSON's \\uXXXX escapes can spell them, tokenizers cannot read them."""
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


# --- through the datasets library -------------------------------------------------------------------------------------------------


def read_columnar(path: Path, key: str) -> Table:
    """A local .parquet or .csv file.

    Raises:
        DataError: the file cannot be read as what its suffix says, or has no row.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(path.suffix[1:].lower(), data_files=str(path), split="train")
    except Exception as error:  # whatever the reader raises, the file is what is wrong
        raise DataError(f"{key}: '{path}' cannot be read as {path.suffix}: {_first_line(error)}") from error
    return _table_of(str(path), rows, key)


def read_hub(path: str, config_name: str | None, splits: tuple[str, ...], key: str) -> Table:
    """The first of ``splits`` that the hub's data set (or its copy in the local cache) has. ``name:config`` names one of its configs.

    Raises:
        DataError: not reachable, unknown name or config, or none of the splits.
    """
    import datasets

    datasets.disable_progress_bars()
    name, _, config_in_path = path.partition(":")
    try:
        found = datasets.load_dataset(name, config_in_path or config_name)
    except Exception as error:  # network, name, config and cache all fail with types of their own
        raise DataError(
            f"{key}: '{path}' is no file or folder here, and the Hugging Face hub gave no data set of that name: {_first_line(error)}; "
            f"check the name and the network, or set {key} to local files"
        ) from error
    for split in splits:
        if split in found:
            return _table_of(f"{path} ({split})", found[split], key)
    raise DataError(
        f"{key}: '{path}' has no split {' or '.join(splits)}, only {_shown(found)}; name a file instead, "
        "or hold rows of the training split out with data.eval_fraction"
    )


def _table_of(name: str, rows: Any, key: str) -> Table:
    if len(rows) == 0:
        raise DataError(f"{name}: has no row; {key} must name data with at least one row")
    records = [Record(number, dict(values)) for number, values in enumerate(rows, start=1)]
    return Table(name, tuple(rows.column_names), records, counted="row")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
