"""Tables of columns: several as one, sorted, each row once, and looked up by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from danlu.curation.ragged import Ragged, join

Table = Mapping[str, np.ndarray | Ragged]
"""Columns by name, all with as many rows: arrays with rows along the first axis, or rows of different lengths."""


def column(table: Table, name: str) -> np.ndarray:
    """A column that is an array."""
    values = table[name]
    assert isinstance(values, np.ndarray), f"{name} is ragged"
    return values


def ragged_column(table: Table, name: str) -> Ragged:
    """A column of rows of different lengths."""
    values = table[name]
    assert isinstance(values, Ragged), f"{name} is an array"
    return values


def take(table: Table, order: np.ndarray) -> dict[str, np.ndarray | Ragged]:
    """Rows of a table by their numbers, in that order."""
    return {name: each.take(order) if isinstance(each, Ragged) else each[order] for name, each in table.items()}


def merge_tables(tables: Sequence[Table], by: Sequence[str]) -> dict[str, np.ndarray | Ragged]:
    """The rows of several tables (at least one) with the same columns, sorted, and each once.

    Args:
        by: the columns that tell rows apart, the first of them first: arrays of one dimension.
    """
    joined: dict[str, np.ndarray | Ragged] = {}
    for name, first in tables[0].items():
        if isinstance(first, Ragged):
            joined[name] = join([ragged_column(table, name) for table in tables])
        else:
            joined[name] = np.concatenate([column(table, name) for table in tables])
    keys = [column(joined, name) for name in by]
    order = np.lexsort(keys[::-1])
    return take(joined, order[_is_new([key[order] for key in keys])])


def is_first(table: Table, by: Sequence[str]) -> np.ndarray:
    """A mask of the rows of a sorted table that differ from the row before in some of the columns `by`."""
    return _is_new([column(table, name) for name in by])


def _is_new(keys: Sequence[np.ndarray]) -> np.ndarray:
    is_new = np.zeros(len(keys[0]), bool)
    is_new[:1] = True
    for key in keys:
        is_new[1:] |= key[1:] != key[:-1]
    return is_new


def rows_at(places: np.ndarray, wanted: Sequence[int] | np.ndarray) -> np.ndarray:
    """The number of the row with each wanted place in sorted `places`, -1 where none has it."""
    wanted = np.asarray(wanted, np.int64)
    at = np.searchsorted(places, wanted)
    is_there = at < len(places)
    is_there[is_there] = places[at[is_there]] == wanted[is_there]
    return np.where(is_there, at, -1)
