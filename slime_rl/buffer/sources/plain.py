"""Values of data files as plain ones, which the buffer can keep: dates, times and decimals become text.

parquet and YAML have types that JSON has no word for. A row with anything else is a bad row when it is read, and no
error when its group has been generated.
"""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from typing import Any

import numpy as np

# Deeper values do not survive the writers of JSON; an alias of YAML to itself has no end at all.
_MAX_DEPTH = 100
_SIMPLE = {bool, float, bytes}
_MAX_BITS = 14_000  # Python writes no number of more than 4300 digits


def plain(value: Any, where: str) -> Any:
    """`value` with None, bool, int, float, str, bytes, list, tuple and dict alone.

    Dates and times become ISO 8601 text, a duration its seconds, decimals and UUIDs their text.

    Raises:
        ValueError: another type, half a surrogate pair, too long a number or too deep a value; begins with `where`.
    """
    return value if _is_plain(value, 0) else _converted(value, where, 0)


def _is_plain(value: Any, depth: int) -> bool:
    """Whether nothing has to be changed or told, as for nearly all rows; quick, as it keeps no account of the place."""
    kind = type(value)
    if kind is str:
        return value.isascii() or _is_text(value)
    if value is None or kind in _SIMPLE:
        return True
    if depth >= _MAX_DEPTH:
        return False
    if kind is list or kind is tuple:
        return all(_is_plain(item, depth + 1) for item in value)
    if kind is dict:
        return all(_is_plain(k, depth + 1) and _is_plain(item, depth + 1) for k, item in value.items())
    return kind is int and value.bit_length() <= _MAX_BITS


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _converted(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        _check_characters(value, where)
        return value
    if value is None or kind in _SIMPLE:
        return value
    if kind is int:
        if value.bit_length() > _MAX_BITS:
            raise ValueError(f"{where}: a number of more than {_MAX_BITS} bits cannot be kept")
        return value
    if depth >= _MAX_DEPTH:
        raise ValueError(f"{where[:200]}: is nested more than {_MAX_DEPTH} levels deep")
    if kind is list:
        return [_converted(item, where, depth + 1) for item in value]
    if kind is dict:
        keys = [_converted(key, where, depth + 1) for key in value]
        if len(set(keys)) < len(keys):
            raise ValueError(f"{where}: two of its keys are the same text: {sorted(map(str, keys))}")
        items = (_converted(item, f"{where}: {key!r:.80}", depth + 1) for key, item in value.items())
        return dict(zip(keys, items, strict=True))
    if kind is tuple:
        return tuple(_converted(item, where, depth + 1) for item in value)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, (decimal.Decimal, uuid.UUID)):
        return str(value)
    if isinstance(value, np.generic):
        return _converted(value.item(), where, depth + 1)
    raise ValueError(f"{where}: is a {kind.__name__}, which cannot be kept; use text, numbers, lists and dictionaries")


def from_json_text(text: str, where: str) -> Any:
    """What JSON text stands for, as plain values. Raises ValueError that begins with `where`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is text but not JSON: {error}") from error
    return plain(value, where)


def _check_characters(text: str, where: str) -> None:
    """Half of a surrogate pair, as the escape \\ud800 alone, is no text: no tokenizer takes it, no log can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"character {error.start} is half of a surrogate pair, {text[error.start]!a}"
        raise ValueError(f"{where}: must be text, but {half}") from error
