"""A verification as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from danlu import __version__
from danlu.parallel.sent import HEADINGS, Row
from danlu.report.html_page import HtmlPage
from danlu.report.verification import Check, Verification, shown, verdict

PAGE = HtmlPage("verification")


def page(found: Verification, traffic: Sequence[Row] = ()) -> str:
    """The whole page; `traffic` has a table of its own where it was counted."""
    body = [
        f"<p>{found.processes} processes against one process, danlu {escape(__version__)}</p>",
        "<ul>",
        *(f"<li>{escape(line)}</li>" for line in found.about),
        "</ul>",
        f'<div class="{"right" if found.holds else "wrong"}">',
        *(f"<p>{escape(line)}</p>" for line in verdict(found)),
        "</div>",
        *_modules(found),
        *_checks(found.checks),
        *_traffic(traffic),
    ]
    return PAGE.written(f"danlu verify {found.recipe}", f"{found.recipe}: {found.layout}", body, STYLE)


def _modules(found: Verification) -> Iterator[str]:
    yield "<h2>By module, the worst relative error over steps</h2>"
    yield from _table(
        ("module", "parameters", "gradients", "allowed", "weights", "allowed"),
        [
            (
                (one.name, f"{one.parameters:,}", *_error(one.gradients), *_error(one.weights)),
                one.holds,
            )
            for one in found.modules
        ],
    )


def _checks(checks: Sequence[Check]) -> Iterator[str]:
    yield "<h2>All that was compared</h2>"
    yield from _table(
        ("compared", "worst error", "allowed", "at"),
        [((one.what, *_error(one), one.where), one.holds) for one in checks],
    )


def _traffic(rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield "<h2>What one process sends in a step</h2>"
        yield from _table(HEADINGS, [(row.cells(), row.agrees) for row in rows])


def _error(check: Check) -> tuple[str, str]:
    return check.said, shown(check.allowed)


def _table(headings: Sequence[str], rows: Sequence[tuple[Sequence[str], bool]]) -> Iterator[str]:
    yield "<table>"
    yield f"<tr>{''.join(f'<th>{escape(one)}</th>' for one in headings)}</tr>"
    for cells, holds in rows:
        mark = "" if holds else ' class="wrong"'
        yield f"<tr{mark}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
    yield "</table>"


STYLE = """
div.right, div.wrong { border: 2px solid var(--one); border-radius: 6px; padding: 0 1rem }
div.wrong { border-color: var(--wrong) }
table { font-variant-numeric: tabular-nums }
th { border-bottom: 1px solid var(--line) }
tr.wrong { color: var(--wrong); font-weight: 600 }
"""
