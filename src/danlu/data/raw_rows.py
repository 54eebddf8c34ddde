"""A row as it stands in its file, with the place it came from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from danlu.core.errors import DataError
from danlu.data.column_values import MAX_DEPTH, TOO_DEEP, is_too_deep

if TYPE_CHECKING:
    from danlu.data.column_mapping import ColumnMapping


@dataclass(frozen=True)
class BadRow:
    """A row that could not be read. The message names the place, the reason and a remedy."""

    message: str


@dataclass(frozen=True)
class RawRow:
    """A row as it is in its file.

    A line of JSON stays one until its columns are asked for. A line is cheaper to send to another process than its
    parsed content, and the processes that tokenise do the parsing: one process that reads can then feed many of them.

    Attributes:
        index: its number in the source, from 0, bad rows counted too.
        where: "alpaca.jsonl:17" where there are lines, else "alpaca.parquet row 17" (from 1).
        content: its columns, why there are none, or the line of JSON that holds them.
        mapping: gives columns the names that row formats read; None where the file's own names are read.
    """

    index: int
    where: str
    content: dict[str, Any] | BadRow | bytes
    mapping: ColumnMapping | None = None

    @cached_property
    def given(self) -> dict[str, Any] | BadRow:
        """The columns as the file has them."""
        return json_row(self.content, self.where) if isinstance(self.content, bytes) else self.content

    @cached_property
    def value(self) -> dict[str, Any] | BadRow:
        """The columns under the names that row formats read."""
        if self.mapping is None or isinstance(self.given, BadRow):
            return self.given
        try:
            return self.mapping.apply(self.given, self.where)
        except DataError as error:
            return BadRow(str(error))

    @property
    def columns(self) -> dict[str, Any]:
        """The columns under both names, for templates over them and for rewards."""
        assert isinstance(self.given, dict) and isinstance(self.value, dict), "a bad row has no columns"
        return self.given if self.mapping is None else self.given | self.value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled without the columns, where a line of JSON says them: another process reads them again."""
        return RawRow, (self.index, self.where, self.content, self.mapping)

    @property
    def size(self) -> int:
        """Roughly the characters of text in it."""
        return len(self.content) if isinstance(self.content, bytes) else _characters(self.content)


LocatedContent = tuple[str, dict[str, Any] | BadRow | bytes]  # where and content of a RawRow


def json_row(line: bytes, where: str) -> dict[str, Any] | BadRow:
    """The columns in a line of JSON, or why there are none."""
    try:
        value = json.loads(decode_utf8(line, where))
    except json.JSONDecodeError as error:
        return BadRow(f"{where}:{error.colno}: broken JSON: {error.msg}; each line must be one whole JSON object")
    except RecursionError:
        return BadRow(f"{where}: unreadable JSON: {TOO_DEEP}")
    except ValueError:  # a number of thousands of digits
        return BadRow(f"{where}: unreadable JSON: a number has too many digits")
    except DataError as error:
        return BadRow(str(error))
    if line.count(b"[") + line.count(b"{") > MAX_DEPTH and is_too_deep(value):
        return BadRow(f"{where}: unreadable JSON: {TOO_DEEP}")
    return require_object(value, where)


def require_object(value: Any, where: str) -> dict[str, Any] | BadRow:
    """A parsed JSON value as columns, or why it is no row."""
    if isinstance(value, dict):
        return value
    return BadRow(f"{where}: a row must be an object with named columns, this is of type {type(value).__name__}")


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 1


def decode_utf8(data: bytes, where: str) -> str:
    """Bytes as text. Raises DataError, with `where`, for bytes that are not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8_error(data, error, where) from error


def not_utf8_error(data: bytes, error: UnicodeDecodeError, where: str) -> DataError:
    """Returns the error for bytes that are not UTF-8, with the byte, its place, and a remedy."""
    return DataError(f"{where}: byte 0x{data[error.start]:02x} is not UTF-8 text; save the file as UTF-8")
