"""Rows for the next-token loss, from plain text, prompt and response, or conversations.

Segments (prompt, response, turn) are tokenised one by one and joined, so the line between what is given and what is learnt falls between
two tokens, and a prompt has the tokens that it will have when text is generated.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpfinetune.config import DataConfig
from mpfinetune.data import sources
from mpfinetune.data.packing import pack_rows
from mpfinetune.data.rows import IGNORED, Row, Say, encode_plain, leading_special_ids, say_cut
from mpfinetune.data.sources import BadLine, Table
from mpfinetune.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Segment = tuple[str, bool]  # a text, and whether its tokens are targets
FORMS = (("messages",), ("prompt", "response"), ("text",))  # tried in this order


def load_causal_lm(data: DataConfig, tokenizer: PreTrainedTokenizerFast, seed: int, say: Say) -> tuple[list[Row], list[Row]]:
    """Training and evaluation rows.

    Raises:
        DataError: see the readers; also where no row holds a target.
    """
    assert data.path is not None  # config rule
    if data.eval_fraction > 0 and not data.eval_path:
        rows = _rows_of(data, data.path, "data.path", None, tokenizer, say)
        train, evaluation = _hold_out(rows, data.eval_fraction, seed, data.path)
        train, evaluation = train[: data.train_rows], evaluation[: data.eval_rows]
    else:
        train = _rows_of(data, data.path, "data.path", data.train_rows, tokenizer, say)
        evaluation = _rows_of(data, data.eval_path, "data.eval_path", data.eval_rows, tokenizer, say) if data.eval_path else []
    return pack_rows(train, data.max_length, data.path, say) if data.packing else train, evaluation


def _rows_of(data: DataConfig, path: str, key: str, limit: int | None, tokenizer: PreTrainedTokenizerFast, say: Say) -> list[Row]:
    local = sources.find_local(path, key)
    if local is not None and local.suffix.lower() == ".txt":
        if data.chat:
            raise DataError(f"data.chat: true given, but {local} is plain text; set data.chat: false")
        return _pack(sources.read_text(local, key), tokenizer, data.max_length, str(local))[:limit]
    table = _read_table(local, path, key)
    segments = _segments(table, data, tokenizer, limit)
    framed = not (data.chat or _form(table, data.columns) == ("messages",))  # a chat template writes BOS and EOS itself
    return _finish(_tokenise(segments, tokenizer, framed, say), data.max_length, table.name, say)


def _read_table(local: Path | None, path: str, key: str) -> Table:
    if local is None:
        return sources.read_hub(path, None, ("train",) if key == "data.path" else ("validation", "test"), key)
    if local.is_dir():
        raise DataError(f"{key}: '{local}' is a folder; name the .jsonl, .json, .parquet, .csv or .txt file in it")
    readers = {".jsonl": sources.read_jsonl, ".json": sources.read_json, ".parquet": sources.read_columnar, ".csv": sources.read_columnar}
    reader = readers.get(local.suffix.lower())
    if reader is None:
        raise DataError(f"{key}: '{local}' ends in '{local.suffix}', must be one of .jsonl, .json, .parquet, .csv, .txt")
    return reader(local, key)


# --- from columns to segments -----------------------------------------------------------------------------------------------------


def _form(table: Table, renamed: dict[str, str]) -> tuple[str, ...]:
    """Which of FORMS the first row has, after the renames of data.columns.

    Raises:
        DataError: a renamed column is not there, or no form fits.
    """
    for role, column in renamed.items():
        if column not in table.columns:
            hint = did_you_mean(column, table.columns)
            raise DataError(f"data.columns.{role}: '{column}' is no column of {table.name}{hint}; columns there: {', '.join(table.columns)}")
    forms = [form for form in FORMS if all(renamed.get(role, role) in table.columns for role in form) and set(renamed) <= set(form)]
    if forms:
        return forms[0]
    table.raise_bad()
    raise DataError(
        f"{table.name}: the columns {', '.join(table.columns)} give no rows for causal_lm: wanted are text, or prompt and response, or messages; "
        "say which is which in data.columns, for example {prompt: question, response: answer}"
    )


def _segments(table: Table, data: DataConfig, tokenizer: PreTrainedTokenizerFast, limit: int | None) -> list[list[Segment]]:
    form = _form(table, data.columns)
    names = [data.columns.get(role, role) for role in form]
    sources.check_fields(table, {name: list if role == "messages" else str for role, name in zip(form, names, strict=True)})
    if form == ("text",):
        if data.chat:
            raise DataError(f"data.chat: true given, but {table.name} has text, no prompt and response; set data.chat: false or data.columns")
        return [[(record.values[names[0]], True)] for record in table.records[:limit]]
    if form == ("prompt", "response") and not data.chat:
        prompt, response = names
        # replace, not format: a template may hold other braces, and a prompt may hold anything.
        return [
            [(data.prompt_template.replace("{prompt}", record.values[prompt]), False), (record.values[response], True)]
            for record in table.records[:limit]
        ]
    return _chat_segments(table, form, names, tokenizer, limit)


def _chat_segments(
    table: Table, form: tuple[str, ...], names: list[str], tokenizer: PreTrainedTokenizerFast, limit: int | None
) -> list[list[Segment]]:
    if not getattr(tokenizer, "chat_template", None):
        cause = "data.chat: true given" if form != ("messages",) else f"{table.name} holds messages"
        raise DataError(
            f"{cause}, but the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template; "
            "set model.tokenizer to one that has, or use prompt and response with data.chat: false"
        )
    rows: list[list[Segment]] = []
    bad: list[BadLine] = []
    for record in table.records[:limit]:
        try:
            if form == ("messages",):
                messages = _checked_messages(record.values[names[0]], names[0])
            else:
                messages = [{"role": role, "content": record.values[name]} for role, name in zip(("user", "assistant"), names, strict=True)]
            rows.append(conversation_segments(tokenizer, messages))
        except ValueError as error:
            bad.append(BadLine(record.line, str(error)))
    table.raise_bad(bad)
    return rows


def _checked_messages(messages: list[Any], name: str) -> list[dict[str, Any]]:
    if not messages:
        raise ValueError(f"field '{name}' is an empty list, must hold at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"{name}[{index}] is {sources.json_type(message)}, must be an object with role and content")
        for part in ("role", "content"):
            value = message.get(part)
            if not isinstance(value, str):
                what = f"is {sources.json_type(value)}" if part in message else "is missing"
                raise ValueError(f"{name}[{index}].{part} {what}, must be text")
            if not sources.is_encodable(value):
                raise ValueError(f"{name}[{index}].{part} holds half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return messages


def conversation_segments(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[Segment]:
    """The rendered conversation cut at the assistant's turns, which are the targets, with the mark that ends a turn.

    A turn is found by rendering the conversation up to it and including it; both must be beginnings of the whole.

    Raises:
        ValueError: the template refuses the conversation, or renders an earlier turn differently once more turns follow.
    """
    whole = _render(tokenizer, messages, False)
    segments: list[Segment] = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], True) if index else ""
        through = _render(tokenizer, messages[: index + 1], False)
        if not (whole.startswith(through) and through.startswith(before) and len(before) >= done):
            raise ValueError(
                f"the tokenizer's chat template renders message {index} differently when others follow, so its tokens cannot be told apart; "
                "split the conversation into rows that end at an assistant turn, or use prompt and response columns"
            )
        segments += [(whole[done : len(before)], False), (whole[len(before) : len(through)], True)]
        done = len(through)
    return [segment for segment in [*segments, (whole[done:], False)] if segment[0]]


def _render(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
    from jinja2.exceptions import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt))
    except TemplateError as error:
        raise ValueError(f"the tokenizer's chat template refuses the conversation: {error}") from error


# --- from segments to rows --------------------------------------------------------------------------------------------------------


def _tokenise(rows: list[list[Segment]], tokenizer: PreTrainedTokenizerFast, framed: bool, say: Say) -> list[Row]:
    """Join the tokens of each row's segments; ``framed`` rows get the tokenizer's BOS in front and EOS as their last target."""
    eos_token_id = tokenizer.eos_token_id if framed else None
    leading = leading_special_ids(tokenizer) if framed else []
    if framed and eos_token_id is None:
        say("the tokenizer has no EOS token: rows end without one, so the model does not learn where to stop")
    encoded = iter(encode_plain(tokenizer, [text for segments in rows for text, _ in segments]))
    finished = []
    for segments in rows:
        input_ids, labels = list(leading), [IGNORED] * len(leading)
        for _, is_target in segments:
            ids = next(encoded)
            input_ids += ids
            labels += ids if is_target else [IGNORED] * len(ids)
        if eos_token_id is not None and (labels[-1:] != [eos_token_id]):
            input_ids.append(eos_token_id)
            labels.append(eos_token_id)
        finished.append(Row(input_ids, labels))
    return finished


def _has_target(row: Row) -> bool:
    """True where a token after the first is a target: the shift by one leaves no prediction for the first."""
    assert isinstance(row.labels, list)
    return any(label != IGNORED for label in row.labels[1:])


def _finish(rows: list[Row], max_length: int, name: str, say: Say) -> list[Row]:
    """Cut on the right, drop rows without a target, say how many of each."""
    cut = [Row(row.input_ids[:max_length], row.labels[:max_length]) for row in rows if isinstance(row.labels, list)]
    say_cut(say, name, sum(len(row.input_ids) > max_length for row in rows), len(rows), max_length)
    kept = [row for row in cut if _has_target(row)]
    lost = len(rows) - len(kept)
    if not kept:
        raise DataError(
            f"{name}: none of its {len(rows)} rows has a target token within {max_length} tokens; "
            "raise data.max_length, shorten the prompts, or check data.columns"
        )
    if lost:
        by_cut = sum(_has_target(row) for row in rows) - len(kept)
        say(f"{name}: {lost} of {len(rows)} rows were dropped: no target token ({by_cut} lost it beyond data.max_length: {max_length})")
    return kept


def _pack(text: str, tokenizer: PreTrainedTokenizerFast, max_length: int, name: str) -> list[Row]:
    """One long text in blocks of max_length tokens, all of them targets; the last block may be shorter, but not than 2 tokens."""
    ids = leading_special_ids(tokenizer) + encode_plain(tokenizer, [text])[0]
    blocks = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
    rows = [Row(block, list(block)) for block in blocks if len(block) >= 2]
    if not rows:
        raise DataError(f"{name}: {len(ids)} token(s) of text, must be at least 2")
    return rows


def _hold_out(rows: list[Row], fraction: float, seed: int, name: str) -> tuple[list[Row], list[Row]]:
    """Split off the last part of a seeded shuffle (at least one row on each side); both parts stay in file order."""
    if len(rows) < 2:
        raise DataError(f"{name}: {len(rows)} row cannot be split by data.eval_fraction: {fraction}; set it to 0 or give data.eval_path")
    held_out = min(max(1, round(len(rows) * fraction)), len(rows) - 1)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    split = len(rows) - held_out
    return [rows[index] for index in sorted(order[:split])], [rows[index] for index in sorted(order[split:])]
