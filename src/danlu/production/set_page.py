"""A data set's report as one HTML page (`report/templates/data.html.j2`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from danlu.core.terminal import printable
from danlu.production.marks import Histogram
from danlu.production.set_report import SetReport
from danlu.report.html_page import HtmlPage

PAGE = HtmlPage("data", "--out")
_WIDTH, _HEIGHT, _PLOT_HEIGHT = 320, 120, 100


@dataclass(frozen=True)
class Drawn:
    """A histogram as rectangles: x, y, width and height of each bin, x of each bound, and the texts below."""

    title: str
    bars: list[tuple[float, float, float, float]]
    lines: list[float]
    low: str
    high: str
    bounds: str
    rows: str


def page(report: SetReport) -> str:
    """Renders the whole page."""
    card = report.card
    rows = sum(file.get("rows", 0) for file in card["files"].values())
    total = sum(card.get("outcomes", {}).values())
    name = printable(report.folder.resolve().name)
    return PAGE.render(
        title=f"danlu data {name}",
        heading=f"Data set {name}",
        facts=f"{rows:,} rows of {total:,} · stage {card['stage']} · danlu {card['danlu']}",
        sources=[[str(each.get(key, "")) for key in ("name", *FATES)] for each in card.get("sources", [])],
        reasons=report.reasons,
        histograms=list(map(drawn, report.histograms)),
        missing=report.missing_sources,
        width=_WIDTH,
        height=_HEIGHT,
        plot_height=_PLOT_HEIGHT,
    )


FATES = ("kept", "changed", "dropped")


def drawn(histogram: Histogram) -> Drawn:
    """The rectangles of a histogram."""
    width, most = _WIDTH / len(histogram.counts), max(1, *histogram.counts)
    bars = [
        (round(n * width, 1), round(_PLOT_HEIGHT * (1 - count / most), 1), round(width - 1, 1),
         round(_PLOT_HEIGHT * count / most, 1))
        for n, count in enumerate(histogram.counts)
    ]  # fmt: skip
    span = histogram.high - histogram.low
    return Drawn(
        f"{histogram.step}: {histogram.mark}",
        bars,
        [round(_WIDTH * (bound - histogram.low) / span, 1) for bound in histogram.bounds],
        f"{histogram.low:.4g}",
        f"{histogram.high:.4g}",
        ", ".join(f"{bound:.4g}" for bound in histogram.bounds),
        f"{histogram.rows:,}",
    )


def report_lines(report: SetReport) -> Iterator[str]:
    """The counts by reason, for the terminal."""
    width = max((len(f"{reason.rows:,}") for reason in report.reasons), default=1)
    for reason in report.reasons:
        verb = "dropped" if reason.outcome == "drop" else "changed"
        yield f"{reason.rows:>{width},}  {verb} by {reason.step}: {reason.reason}"
    counts = report.card.get("outcomes", {})
    yield ", ".join(f"{count:,} {fate}" for fate, count in counts.items())
