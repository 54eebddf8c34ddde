"""A verification as one HTML page (`templates/verification.html.j2`)."""

from __future__ import annotations

from collections.abc import Sequence

from danlu import __version__
from danlu.parallel.collective_traffic import HEADINGS, Row
from danlu.report.html_page import HtmlPage
from danlu.report.verification import Verification, verdict

PAGE = HtmlPage("verification")


def page(verification: Verification, traffic: Sequence[Row] = ()) -> str:
    """The whole page; `traffic`, the collectives of one step, has a table of its own where it was counted."""
    return PAGE.render(
        title=f"danlu verify {verification.recipe}",
        heading=f"{verification.recipe}: {verification.layout}",
        version=__version__,
        verification=verification,
        verdict=verdict(verification),
        # Of each table: the cells of its rows, and whether a row is right.
        modules=[(module.cells, module.holds) for module in verification.modules],
        checks=[((check.what, *check.errors, check.where), check.holds) for check in verification.checks],
        traffic_headings=HEADINGS,
        traffic=[(row.cells(), row.agrees) for row in traffic],
    )
