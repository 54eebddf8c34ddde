"""Rules as a column of marks with its bounds: the first one that a row breaks drops it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from danlu.curation.rows import Row
from danlu.curation.steps import KEEP, Marks, Verdict
from danlu.curation.tables import column


@dataclass(frozen=True)
class Rule:
    """The bounds of a mark; a mark that is NaN breaks none: the rule does not apply to the row.

    Attributes:
        mark: the column's name.
        reason: the rule's name in verdicts.
        least: rows with a smaller value are dropped.
        most: rows with a larger value are dropped.
    """

    mark: str
    reason: str
    least: float = -math.inf
    most: float = math.inf


def marks_of(names: Sequence[str], rows: Sequence[Row], measured: Callable[[str], tuple[float, ...]]) -> Marks:
    """Columns of the numbers that a function measures of each row's text, in the order of their names."""
    values = np.array([measured(row.text) for row in rows], np.float64).reshape(len(rows), len(names))
    return dict(zip(names, values.T, strict=True))


def judge(rules: Sequence[Rule], marks: Marks, count: int) -> list[Verdict]:
    """A verdict for each of `count` rows: dropped for the first rule in order that it breaks, with value and bound."""
    verdicts = [KEEP] * count
    for rule in reversed(rules):  # an earlier rule overwrites the verdict of a later one
        values = column(marks, rule.mark)
        for bound, is_broken in ((rule.least, values < rule.least), (rule.most, values > rule.most)):
            for row in np.flatnonzero(is_broken).tolist():
                verdicts[row] = Verdict("drop", rule.reason, value=float(values[row]), threshold=bound)
    return verdicts


def share(part: float, whole: float) -> float:
    """A share of a whole; NaN of nothing."""
    return part / whole if whole else math.nan
