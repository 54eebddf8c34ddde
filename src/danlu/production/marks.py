"""Histograms of what steps have measured, with the bounds that they compare with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from danlu.curation.language import Language
from danlu.curation.quality.rules import Rule
from danlu.curation.steps import Step
from danlu.production.work_files import WorkFolder

Bounds = dict[str, list[float]]
"""The bounds of a step by the mark that they are compared with."""
MARKS = "marks-"
"""The beginning of the names of files with marks, behind which the step's name stands."""
_BINS, _SAMPLE = 40, 50_000
_EDGES = (0.5, 99.5)  # percentiles; what lies beyond is counted in the bins at the ends


def bounds_of(step: Step) -> Bounds:
    """The bounds of a step that has rules, by mark; empty for one that compares no numbers."""
    if isinstance(step, Language):
        return {"probability": [step.at_least]}
    rules: Sequence[Rule] = getattr(step, "rules", ())
    bounds: Bounds = {}
    for rule in rules:
        finite = [bound for bound in (rule.least, rule.most) if np.isfinite(bound)]
        bounds[rule.mark] = [*bounds.get(rule.mark, []), *finite]
    return bounds


@dataclass(frozen=True)
class Histogram:
    """The values of a mark.

    Attributes:
        rows: how many rows have it; those to which a rule does not apply have none.
        low, high: the ends of the bins, which are equally wide.
        counts: rows in each bin; values beyond the ends are in the bins there.
        bounds: what the values are compared with.
    """

    step: str
    mark: str
    rows: int
    low: float
    high: float
    counts: tuple[int, ...]
    bounds: tuple[float, ...]


def histograms(work: Path, bounds: Mapping[str, Bounds]) -> Iterator[Histogram]:
    """A histogram of each mark with bounds, of all rows with marks in a work folder.

    bounds: by step, as the card of a data set has them.
    """
    folder = WorkFolder(work)
    for step, of_marks in bounds.items():
        files = _files(work, step)
        for mark, compared in of_marks.items():
            sample = _sample(folder, files, mark)
            if not len(sample):
                continue
            low, high = (float(value) for value in np.percentile(sample, _EDGES))
            low, high = min([low, *compared]), max([high, *compared])
            high = high if high > low else low + 1.0
            counts = np.zeros(_BINS, np.int64)
            for values in _values(folder, files, mark):
                counts += np.histogram(np.clip(values, low, high), _BINS, (low, high))[0]
            yield Histogram(step, mark, int(counts.sum()), low, high, tuple(counts.tolist()), tuple(compared))


def _files(work: Path, step: str) -> list[str]:
    """The latest file of a step's marks of each shard: with other settings there may be several."""
    latest = dict[Path, tuple[float, str]]()
    for file in work.glob(f"*/{MARKS}{step}-{'[0-9a-f]' * 32}"):
        candidate = (file.stat().st_mtime, file.relative_to(work).as_posix())
        latest[file.parent] = max(candidate, latest.get(file.parent, candidate))
    return sorted(name for _, name in latest.values())


def _sample(folder: WorkFolder, files: Sequence[str], mark: str) -> np.ndarray:
    """Some values of a mark, as many of each file."""
    most = max(1, _SAMPLE // max(1, len(files)))
    return np.concatenate([np.empty(0), *(values[:most] for values in _values(folder, files, mark))])


def _values(folder: WorkFolder, files: Sequence[str], mark: str) -> Iterator[np.ndarray]:
    """The values of a mark that are numbers, file by file."""
    for file in files:
        table = folder.read_table(file)
        values = None if table is None else table.get(mark)
        if isinstance(values, np.ndarray):
            yield values[np.isfinite(values)]
