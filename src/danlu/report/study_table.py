"""A study as a table: aligned for a terminal, as Markdown, and as CSV with a line for each run."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from danlu.recipe.parameter_grid import short_keys
from danlu.report.study_results import RunSummary, SeedGroup, Study, standard_deviation

UNITS = {
    "bytes": (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40)),
    "time": (("s", 1), ("min", 60), ("h", 3600)),
}
ENOUGH = {"bytes": 1, "time": 5}  # how many of a unit the smallest value of a column has to be for it to be used


@dataclass(frozen=True)
class Column:
    """A column of the table: its value from a summary, and its unit (the same for all its cells)."""

    heading: str
    value: Callable[[RunSummary], float | None]
    unit: str = ""  # "bytes", "time", "%", or none
    decimals: int | None = None  # None: as many as show three digits of the smallest value
    shows_deviation: bool = True  # over seeds; counts and sizes are the same for all of them


COUNT = (
    Column("trained", lambda run: run.trained_parameters, decimals=0, shows_deviation=False),
    Column("share", lambda run: 100 * run.trained_share, unit="%", shows_deviation=False),
)
COST = (
    Column("time", lambda run: run.seconds, unit="time"),
    Column("tokens/s", lambda run: run.tokens_per_second),
    Column("peak memory", lambda run: run.peak_memory_bytes, unit="bytes"),
)
EVALUATION = (
    Column("eval loss, last", lambda run: run.evaluation_last, decimals=4),
    Column("eval loss, best", lambda run: run.evaluation_best, decimals=4),
)
TRAINING = (Column("train loss, last", lambda run: run.loss, decimals=4),)
RESULT = (Column("result", lambda run: run.result_bytes, unit="bytes", shows_deviation=False),)


def table(study: Study) -> list[list[str]]:
    """Headings, and below them a line of cells for each combination that has a finished run.

    Several seeds are one line: mean ± standard deviation over them (of a sample), and how many they are.
    """
    columns = (*COUNT, *COST, *(EVALUATION if study.evaluated else TRAINING), *RESULT)
    cells = [_cells(column, study.groups) for column in columns]
    headings, lines = [*short_keys(study.varied)], [list(group.values.values()) for group in study.groups]
    if any(len(group.results) > 1 for group in study.groups):
        headings.append("seeds")
        lines = [[*line, str(len(group.results))] for line, group in zip(lines, study.groups, strict=True)]
    headings += [heading for heading, _ in cells]
    return [headings, *([*line, *(below[row] for _, below in cells)] for row, line in enumerate(lines))]


def _cells(column: Column, groups: Sequence[SeedGroup]) -> tuple[str, list[str]]:
    """The heading, with its unit, and the text of each group's cell."""
    rows = [[value for run in group.summaries if (value := column.value(run)) is not None] for group in groups]
    means = [fmean(values) if values else math.nan for values in rows]
    unit, size = _unit(column.unit, means)
    decimals = _decimals(means, size) if column.decimals is None else column.decimals

    def text(value: float) -> str:
        return f"{value / size:,.{decimals}f}"

    texts = []
    for values, mean in zip(rows, means, strict=True):
        deviation = f" ± {text(standard_deviation(values))}" if column.shows_deviation and len(values) > 1 else ""
        texts.append(f"{text(mean)}{deviation}" if values else "–")
    return f"{column.heading}, {unit}" if unit else column.heading, texts


def _unit(kind: str, values: Sequence[float]) -> tuple[str, int]:
    """The largest unit that the smallest value has enough of, and its size in the smallest unit."""
    unit, size = UNITS.get(kind, ((kind, 1),))[0]
    smallest = min((value for value in values if value > 0), default=0)
    for larger, count in UNITS.get(kind, ())[1:]:
        if smallest >= ENOUGH[kind] * count:
            unit, size = larger, count
    return unit, size


def _decimals(values: Sequence[float], size: int) -> int:
    """The number of decimals that show three digits of the smallest value, at most four."""
    smallest = min((value / size for value in values if value > 0), default=1)
    return min(4, max(0, 2 - math.floor(math.log10(smallest))))


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns flush right under their headings, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return "".join(f"{row.rstrip()}\n" for row in rows)


def remarks(study: Study) -> Iterator[str]:
    """Yields facts that the table does not show: the lowest loss, the meaning of ±, the missing runs."""
    if study.evaluated and study.varied and len(study.groups) > 1:
        best = min(study.groups, key=_best)
        named = ", ".join(f"{key} {value}" for key, value in best.values.items())
        yield f"lowest evaluation loss: {named} ({_best(best):.4f})"
    if any(len(group.results) > 1 for group in study.groups):
        yield "± is the standard deviation over seeds"
    for result in study.unfinished:
        yield f"not finished: {result.name}, " + (f"stopped after step {result.step}" if result.step else "not begun")


def _best(group: SeedGroup) -> float:
    """The mean over seeds of a group's best evaluation loss; infinite where one is not a number."""
    losses = [run.evaluation_best for run in group.summaries if run.evaluation_best is not None]
    return fmean(losses) if not any(map(math.isnan, losses)) else math.inf


def markdown(study: Study, title: str, pictures: Sequence[str]) -> str:
    """Makes the page study.md: the table, the remarks, the pictures (names of files next to it)."""
    headings, *lines = (["\\|".join(cell.split("|")) for cell in line] for line in table(study))
    rows = [headings, ["--:"] * len(headings), *lines]
    parts = [
        f"# {title}",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "\n".join(f"- {remark}" for remark in remarks(study)),
        *(f"![{name}]({name})" for name in pictures),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_csv(study: Study) -> str:
    """study.csv: a line for each run, numbers as they were measured; empty where there is none."""
    names = [field.name for field in fields(RunSummary)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *study.keys, "finished", "step", *names])
    for result in study.results:
        numbers = [getattr(result.summary, name, "") for name in names]  # empty until the run is finished
        finished = "true" if result.summary is not None else "false"
        writer.writerow([result.name, *result.values.values(), finished, result.step, *numbers])
    return text.getvalue()
