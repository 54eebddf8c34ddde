"""Rows of columnar files and data sets: the values of their nested columns, without nulls that columns only fill in.

A column has one type for all rows, so Parquet and Arrow fill the objects of a row with null for every key that an
object of another row has. Such nulls are no values: the key was not there. JSON in a column of type `arrow.json`
(`Json` of the datasets library) is parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from danlu.data.column_values import TOO_DEEP, is_too_deep
from danlu.data.raw_rows import BadRow, LocatedContent

Read = Callable[[Any], Any]
"""Turns a value as pyarrow gives it into the value of a row; never called with None."""


def numbered_rows(name: str, batches: Iterable[Any]) -> Iterator[LocatedContent]:
    """The rows of pyarrow record batches or tables, which have numbers (from 1) but no lines."""
    number = 0
    for batch in batches:
        reads = {field.name: read for field in batch.schema if (read := _read_of(field.type)) is not None}
        for row in batch.to_pylist():
            number += 1
            yield f"{name} row {number}", _read_row(row, reads, f"{name} row {number}") if reads else row


def _read_row(row: dict[str, Any], reads: dict[str, Read], where: str) -> dict[str, Any] | BadRow:
    for column, read in reads.items():
        if row[column] is not None:
            try:
                row[column] = read(row[column])
            except (ValueError, RecursionError) as error:
                return BadRow(f"{where}: unreadable JSON in column '{column}': {error}")
    return row


def _read_of(arrow_type: Any) -> Read | None:
    """How values of a type are read; None where they are as pyarrow gives them."""
    from pyarrow import types

    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return _json_value
    if types.is_struct(arrow_type):
        return _struct_reader({field.name: _read_of(field.type) for field in arrow_type})
    if types.is_map(arrow_type):
        return _map_reader(_read_of(arrow_type.item_type))
    if any(is_kind(arrow_type) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        return _list_reader(_read_of(arrow_type.value_type))
    return None


def _struct_reader(reads: dict[str, Read | None]) -> Read:
    def read(value: dict[str, Any]) -> dict[str, Any]:
        return {
            key: inner if (read_inner := reads[key]) is None else read_inner(inner)
            for key, inner in value.items()
            if inner is not None
        }

    return read


def _list_reader(read_item: Read | None) -> Read | None:
    if read_item is None:
        return None
    return lambda value: [None if item is None else read_item(item) for item in value]


def _map_reader(read_item: Read | None) -> Read:
    """Maps have the keys of their own row: a null is a value of theirs."""

    def read(value: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return {key: inner if inner is None or read_item is None else read_item(inner) for key, inner in value}

    return read


def _json_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value
