"""The results of a verification, as plain data, and as text for a terminal. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleRenderable, JustifyMethod
from rich.table import Table

from danlu.parallel.collective_traffic import HEADINGS as TRAFFIC_HEADINGS
from danlu.parallel.collective_traffic import Row


@dataclass(frozen=True)
class Check:
    """A quantity that the layout and one process were compared in, where they differ most."""

    what: str  # "loss", "gradients", ...
    error: float  # relative
    allowed: float
    where: str = ""  # the step and parameter with this error
    copies_differ: bool = False  # ranks that hold the same shard of it do not have the same numbers

    @property
    def holds(self) -> bool:
        """Whether the layout computes the same: the error is allowed, and all copies of a shard agree."""
        return math.isfinite(self.error) and self.error <= self.allowed and not self.copies_differ

    @property
    def error_text(self) -> str:
        """The error, or the fault where the error itself is allowed."""
        within = math.isfinite(self.error) and self.error <= self.allowed
        return "copies differ" if self.copies_differ and within else format_error(self.error)

    @property
    def errors(self) -> tuple[str, str]:
        """The error and the allowed one, as text."""
        return self.error_text, format_error(self.allowed)


@dataclass(frozen=True)
class Module:
    """A part of the model: how far its gradients and weights are from those of one process, at their worst."""

    name: str
    parameters: int
    gradients: Check
    weights: Check

    @property
    def holds(self) -> bool:
        """Whether its gradients and its weights are the same."""
        return self.gradients.holds and self.weights.holds

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row of a table: the worst relative errors over steps and the allowed ones."""
        return self.name, f"{self.parameters:,}", *self.gradients.errors, *self.weights.errors


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong, in the order in which a step computes."""

    stage: str  # "gradients of step 1"
    parameter: str | None  # the first one that is wrong, in the order of the forward pass
    ratio: str  # of the layout's numbers to those of one process: "x2 (data ...)"
    cause: str  # what usually causes it


@dataclass(frozen=True)
class Verification:
    """The result of comparing a recipe's layout with one process."""

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
        """Whether nothing is wrong."""
        return self.finding is None


EXACT = 1e-30
"""The error allowed where not even rounding may differ; above 0, so that errors can be divided by it."""


def format_error(value: float) -> str:
    """A relative error as text: `3.1e-07`, `0`, `not finite`."""
    return "not finite" if not math.isfinite(value) else "0" if value <= EXACT else f"{value:.1e}"


def parts(verification: Verification) -> Iterator[ConsoleRenderable | str]:
    """The text and tables that a terminal shows before the verdict."""
    yield f"{verification.recipe}: {verification.layout} on {verification.processes} processes against one process"
    yield "".join(f"  {line}\n" for line in verification.about)
    yield modules_table(verification.modules)
    yield ""
    yield checks_table(verification.checks)
    yield ""


def lines(verification: Verification, *, width: int = 160) -> Iterator[str]:
    """Everything as plain text, tables aligned."""
    for part in parts(verification):
        yield from [part] if isinstance(part, str) else rendered(part, width)
    yield from verdict(verification)


def verdict(verification: Verification) -> Iterator[str]:
    """Yields the closing lines: the largest error, or the first fault and its usual cause."""
    if verification.finding is None:
        worst = max(verification.checks, key=lambda check: check.error / check.allowed)
        where = f", {worst.where}" if worst.where else ""
        yield (
            f"the same as one process: {verification.layout} computes what one process does, to "
            f"{format_error(worst.error)} ({worst.what}{where}); {verification.seconds:.0f} s"
        )
        return
    finding = verification.finding
    yield f"NOT the same as one process, first in: {finding.stage}"
    if finding.parameter is not None:
        yield f"  first wrong parameter: {finding.parameter}"
    yield f"  ratio: {finding.ratio}"
    yield f"  usually: {finding.cause}"


def modules_table(modules: Sequence[Module]) -> Table:
    """The worst relative error over steps and the allowed one, by module."""
    table = _table("module", "parameters", "gradients", "allowed", "weights", "allowed", "")
    for module in modules:
        table.add_row(*module.cells, "" if module.holds else "WRONG", style=None if module.holds else "red")
    return table


def checks_table(checks: Sequence[Check]) -> Table:
    """The compared quantities of the model as a whole: loss, gradient norm, all gradients and weights."""
    table = _table("compared", "worst error", "allowed", "", "at")
    for check in checks:
        cells = check.what, *check.errors, "" if check.holds else "WRONG", check.where
        table.add_row(*cells, style=None if check.holds else "red")
    return table


def traffic_table(rows: Sequence[Row]) -> Table:
    """The traffic of one process in a step by collectives: counted and computed."""
    table = _table(*TRAFFIC_HEADINGS, text_columns=(0, 1, 2))
    for row in rows:
        table.add_row(*row.cells(), style=None if row.agrees else "red")
    return table


def _table(*headings: str, text_columns: Sequence[int] = ()) -> Table:
    """An empty table with these headings; numbers are flush right, the columns numbered in `text_columns` are not."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, heading in enumerate(headings):
        is_text = place == 0 or place in text_columns or heading in ("", "at")
        justify: JustifyMethod = "left" if is_text else "right"
        # On a narrow terminal texts are folded; numbers and names are never cut.
        table.add_column(heading, justify=justify, no_wrap=heading not in ("what", "at"), overflow="fold")
    return table


def rendered(renderable: ConsoleRenderable, width: int) -> list[str]:
    """Renders a table with `rich` for a terminal of `width` columns without colours, line by line."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]
