"""A verification as one HTML page (`templates/verification.html.j2`)."""

from __future__ import annotations

from collections.abc import Sequence

from danlu import __version__
from danlu.parallel.collective_traffic import HEADINGS, Row
from danlu.report.html_page import HtmlPage
from danlu.report.verification import Check, Verification, format_error, verdict

PAGE = HtmlPage("verification")


def page(verification: Verification, traffic: Sequence[Row] = ()) -> str:
    """The whole page; `traffic`, the collectives of one step, has a table of its own where it was counted."""

    def error(check: Check) -> tuple[str, str]:
        return check.error_text, format_error(check.allowed)

    return PAGE.render(
        title=f"danlu verify {verification.recipe}",
        heading=f"{verification.recipe}: {verification.layout}",
        version=__version__,
        verification=verification,
        verdict=verdict(verification),
        # Of each table: the cells of its rows, and whether a row is right.
        modules=[
            ((module.name, f"{module.parameters:,}", *error(module.gradients), *error(module.weights)), module.holds)
            for module in verification.modules
        ],
        checks=[((check.what, *error(check), check.where), check.holds) for check in verification.checks],
        traffic_headings=HEADINGS,
        traffic=[(row.cells(), row.agrees) for row in traffic],
    )
