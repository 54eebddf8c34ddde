"""Values in the columns of a row: checked, and decoded where a file holds lists and objects as JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from danlu.core.errors import DataError

MAX_DEPTH = 100
TOO_DEEP = f"brackets are nested too deeply, more than {MAX_DEPTH} lists or objects one in the other"


def is_too_deep(value: Any) -> bool:
    """Whether more than `MOST_DEPTH` lists and objects lie one in the other: too deep to be sent or rendered."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def decode_list(value: Any) -> Any:
    """The list that a string holds as JSON, as csv cells do; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError):
            return value  # a text that merely starts with a bracket; whoever needs a list says so
        return value if is_too_deep(decoded) else decoded
    return value


def decode_messages(value: Any) -> Any:
    """Messages that a csv cell holds as JSON. Other text stays as it is, even if it is JSON: it may be a prompt."""
    decoded = decode_list(value)
    is_messages = isinstance(decoded, list) and decoded and all(isinstance(item, Mapping) for item in decoded)
    return decoded if is_messages or not isinstance(value, str) else value


def decode_json(value: Any, what: str, where: str) -> Any:
    """Parses a string as JSON; returns any other value as it is. `what` names it in messages.

    Raises:
        DataError: the string is no JSON, or is nested more than `MAX_DEPTH` deep.
    """
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: {what} must be JSON: {error.msg} at character {error.pos} of {value[:80]!r}"
        ) from error
    except RecursionError:
        raise DataError(f"{where}: {what} cannot be read: {TOO_DEEP}") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(f"{where}: {what} must be JSON: {value[:80]!r} holds a number of too many digits") from error
    if is_too_deep(parsed):
        raise DataError(f"{where}: {what} cannot be read: {TOO_DEEP}")
    return parsed


def require_string(value: Any, column: str, where: str) -> str:
    """The value, a string. Raises DataError for anything else."""
    if not isinstance(value, str):
        raise DataError(f"{where}: '{column}' must be a string, not {type_name(value)}")
    return value


def require_integers(value: Any, column: str, where: str) -> np.ndarray:
    """A list of integers, or the JSON text of one: [n] int32. Raises DataError for anything else."""
    try:
        array = np.asarray(decode_list(value))
    except ValueError:  # lists of different lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise DataError(f"{where}: '{column}' must be a list of integers")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise DataError(f"{where}: '{column}' has {array[np.abs(array).argmax()]}, which is no token id")
    return array.astype(np.int32)


def abbreviate(value: Any) -> str:
    """A value as Python writes it, cut where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


def type_name(value: Any) -> str:
    """The type of a value with its article, for messages; "nothing" for None."""
    name = type(value).__name__
    return "nothing" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
