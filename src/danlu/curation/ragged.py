"""Rows of values of different lengths, end to end in one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LONG = 64  # values a row from which rows are copied one by one


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of values, end to end.

    Attributes:
        values: those of all rows, in order.
        stops: [N] int64, where the values of each row end.
    """

    values: np.ndarray
    stops: np.ndarray

    @staticmethod
    def of(rows: Sequence[np.ndarray | Sequence[int]], dtype: type) -> Ragged:
        """Rows of values as `dtype`."""
        values = np.concatenate([np.asarray(row, dtype) for row in rows]) if rows else np.empty(0, dtype)
        return Ragged(values, np.cumsum([len(row) for row in rows], dtype=np.int64))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.stops, prepend=0)

    @property
    def owners(self) -> np.ndarray:
        """The row of each value."""
        return np.repeat(np.arange(len(self.stops)), self.lengths)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.stops[row - 1] if row else 0 : self.stops[row]]

    def __len__(self) -> int:
        return len(self.stops)

    def take(self, order: np.ndarray) -> Ragged:
        """Rows by their numbers, in that order."""
        lengths = self.lengths[order]
        stops = np.cumsum(lengths, dtype=np.int64)
        if len(stops) and stops[-1] >= _LONG * len(stops):  # without two numbers for each value
            starts, ends = (self.stops - self.lengths)[order].tolist(), self.stops[order].tolist()
            rows = [self.values[start:end] for start, end in zip(starts, ends, strict=True)]
            return Ragged(np.concatenate(rows), stops)
        offsets = self.stops[order] - stops  # of a row's values, from their new place to their old one
        return Ragged(self.values[np.repeat(offsets, lengths) + np.arange(len(offsets) and stops[-1])], stops)

    def select(self, is_kept: np.ndarray) -> Ragged:
        """All rows, each with those of its values that a mask over all values keeps."""
        kept_before = np.concatenate([[0], np.cumsum(is_kept)])
        return Ragged(self.values[is_kept], kept_before[self.stops])


def join(parts: Sequence[Ragged]) -> Ragged:
    """The rows of several, one after the other; at least one."""
    ends = np.cumsum([0, *(len(part.values) for part in parts)])
    stops = [part.stops + end for part, end in zip(parts, ends, strict=False)]
    return Ragged(np.concatenate([part.values for part in parts]), np.concatenate(stops))
