"""From what YAML gives to what a config field holds, strictly: no silent rounding, no booleans for numbers, no numbers for booleans."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import PurePath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin


def convert(value: Any, hint: Any) -> Any:
    """The value as the type that ``hint`` asks for; containers are copied.

    A number may be written as text ("2e-5": YAML's own rules see text there in some spellings) and a whole number as 1e3.

    Raises:
        ValueError: the value does not fit. The caller knows the path and says what is allowed (``type_in_words``).
    """
    hint, optional = _without_none(hint)
    if value is None and optional:
        return None
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _first_that_fits(value, get_args(hint))
    if hint is Any:
        return _copy(value)
    if origin is Literal:
        return _choice(value, get_args(hint))
    if origin is list and isinstance(value, (list, tuple)):
        return [convert(item, get_args(hint)[0]) for item in value]
    if origin is dict and isinstance(value, dict):
        key_hint, value_hint = get_args(hint)
        return {convert(key, key_hint): convert(item, value_hint) for key, item in value.items()}
    converters = {bool: _boolean, int: _whole_number, float: _number, str: _text}
    if hint not in converters:
        raise ValueError
    return converters[hint](value)


def type_in_words(hint: Any) -> str:
    """What ``convert`` accepts for this type, for messages and the config reference."""
    hint, optional = _without_none(hint)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        words = " or ".join(str(get_args(part)[0]) if get_origin(part) is Literal else type_in_words(part) for part in parts)
    elif origin is Literal:
        words = "one of " + ", ".join(str(choice) for choice in parts)
    elif origin is dict:
        words = f"a mapping of {_plural_in_words(parts[0])} to {_plural_in_words(parts[1])}"
    elif origin is list:
        words = "a list" if parts[0] is Any else f"a list of {_plural_in_words(parts[0])}"
    else:
        words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", Any: "any value"}[hint]
    return words + (" or null" if optional else "")


def _plural_in_words(hint: Any) -> str:
    return {str: "text", int: "whole numbers", float: "numbers"}.get(hint, "values")


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    members = [member for member in get_args(hint) if member is not type(None)]
    # A number or a word for "find it out", like `4` or `auto`, is the one union of types besides null.
    return reduce(or_, members), len(members) < len(get_args(hint))


def _first_that_fits(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        with suppress(ValueError):
            return convert(value, hint)
    raise ValueError


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item) for item in value]
    return value


def _choice(value: Any, choices: tuple[Any, ...]) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    raise ValueError


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError from error
    if not math.isfinite(number):
        raise ValueError
    return number


def _whole_number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)  # not by way of a float, which is exact up to 2**53 only
    number = _number(value)
    if not number.is_integer():
        raise ValueError
    return int(number)


def _text(value: Any) -> str:
    """Folders may be called 2024; true and 1.50 would not come back as they were written."""
    if isinstance(value, bool) or not isinstance(value, (str, int, PurePath)):
        raise ValueError
    return str(value)
