"""What a verification found, as plain data, and as text for a terminal. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleRenderable
from rich.table import Table

from danlu.parallel.collective_traffic import HEADINGS as TRAFFIC_HEADINGS
from danlu.parallel.collective_traffic import Row


@dataclass(frozen=True)
class Check:
    """One thing that the layout and one process were compared in, at its worst."""

    what: str  # "loss", "gradients", ...
    error: float  # relative
    allowed: float
    where: str = ""  # of the worst: a step, a parameter
    copies_differ: bool = False  # processes that hold the same part of it do not have the same numbers

    @property
    def holds(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.allowed and not self.copies_differ

    @property
    def said(self) -> str:
        """The error; where that alone would do, what is wrong."""
        return (
            "copies differ"
            if self.copies_differ and math.isfinite(self.error) and self.error <= self.allowed
            else shown(self.error)
        )


@dataclass(frozen=True)
class Module:
    """A part of the model: how far its gradients and weights are from those of one process, at their worst."""

    name: str
    parameters: int
    gradients: Check
    weights: Check

    @property
    def holds(self) -> bool:
        return self.gradients.holds and self.weights.holds


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong, in the order in which a step computes."""

    stage: str  # "gradients of step 1"
    parameter: str | None  # the first one that is wrong, in the order of the forward pass
    ratio: str  # of the layout's to one process's, in words
    cause: str  # what usually causes it


@dataclass(frozen=True)
class Verification:
    """A recipe's layout against one process."""

    recipe: str
    layout: str
    processes: int
    about: tuple[str, ...]  # what was compared on what: model, data, precision, changes
    checks: tuple[Check, ...]
    modules: tuple[Module, ...]
    finding: Finding | None
    seconds: float

    @property
    def holds(self) -> bool:
        return self.finding is None


EXACT = 1e-30
"""Allowed where not even rounding may differ; above 0, so that errors can be compared with it."""


def shown(value: float) -> str:
    """A relative error: 3.1e-07."""
    return "not finite" if not math.isfinite(value) else "0" if value <= EXACT else f"{value:.1e}"


def parts(found: Verification) -> Iterator[ConsoleRenderable | str]:
    """What a terminal shows, without the verdict."""
    yield f"{found.recipe}: {found.layout} on {found.processes} processes against one process"
    yield "".join(f"  {line}\n" for line in found.about)
    yield modules_table(found.modules)
    yield ""
    yield checks_table(found.checks)
    yield ""


def lines(found: Verification, *, width: int = 160) -> Iterator[str]:
    """Everything as plain text, tables aligned."""
    for part in parts(found):
        yield from [part] if isinstance(part, str) else rendered(part, width)
    yield from verdict(found)


def verdict(found: Verification) -> Iterator[str]:
    """What it comes to."""
    if found.finding is None:
        worst = max(found.checks, key=lambda check: check.error / check.allowed)
        yield (
            f"the same as one process: {found.layout} computes what one process does, to {shown(worst.error)} "
            f"({worst.what}{_at(worst)}); {found.seconds:.0f} s"
        )
        return
    one = found.finding
    yield f"NOT the same as one process, first in: {one.stage}"
    if one.parameter is not None:
        yield f"  first wrong parameter: {one.parameter}"
    yield f"  ratio: {one.ratio}"
    yield f"  usually: {one.cause}"


def _at(check: Check) -> str:
    return f", {check.where}" if check.where else ""


def modules_table(modules: Sequence[Module]) -> Table:
    """By module: the worst relative error over steps, beside what is allowed."""
    table = _table("module", "parameters", "gradients", "allowed", "weights", "allowed", "")
    for one in modules:
        cells = one.gradients.said, shown(one.gradients.allowed)
        weights = one.weights.said, shown(one.weights.allowed)
        style = None if one.holds else "red"
        table.add_row(one.name, f"{one.parameters:,}", *cells, *weights, "" if one.holds else "WRONG", style=style)
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """What is compared as a whole."""
    table = _table("compared", "worst error", "allowed", "", "at")
    for one in checks:
        mark = "" if one.holds else "WRONG"
        style = None if one.holds else "red"
        table.add_row(one.what, one.said, shown(one.allowed), mark, one.where, style=style)
    return table


def traffic_table(rows: Sequence[Row]) -> Table:
    """What one process sends in a step, counted beside computed."""
    table = _table(*TRAFFIC_HEADINGS, words=(0, 1, 2))
    for row in rows:
        table.add_row(*row.cells(), style=None if row.agrees else "red")
    return table


def _table(*headings: str, words: Sequence[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, heading in enumerate(headings):
        is_word = place == 0 or place in words or heading in ("", "at")
        # On a narrow terminal words are folded; numbers and names are never cut.
        table.add_column(
            heading, justify="left" if is_word else "right", no_wrap=heading not in ("what", "at"), overflow="fold"
        )
    return table


def rendered(what: ConsoleRenderable, width: int) -> list[str]:
    """Plain lines."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(what)
    return [line.rstrip() for line in capture.get().splitlines()]
