"""A study as one HTML page (`templates/study.html.j2`): its table, its remarks, and the loss curves of its runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from danlu import __version__
from danlu.core.terminal import printable
from danlu.report.html_page import HtmlPage
from danlu.report.run_charts import MAX_LINES, PLOT, Chart, ChartKind, chart_of
from danlu.report.study_results import RunResult, Study
from danlu.report.study_table import remarks, table

PAGE = HtmlPage("study")


def page(study: Study, name: str) -> str:
    """Renders the whole page. name: of the study's folder."""
    headings, *rows = table(study)
    return PAGE.render(
        title=f"danlu study {printable(name)}",
        heading=f"Study {printable(name)}",
        facts=f"{len(study.finished)} of {len(study.results)} runs finished · danlu {__version__}",
        headings=headings,
        rows=rows,
        remarks=list(remarks(study)),
        charts=list(_charts(study.results)),
        plot=PLOT,
    )


def _charts(results: Sequence[RunResult]) -> Iterator[Chart]:
    """Yields the charts of evaluations and of training, with as many runs in each as a chart has colours."""
    titles = ("Evaluation loss", "Training loss")
    for title, losses_of in zip(titles, (lambda run: run.evaluations, lambda run: run.losses), strict=True):
        curves = [(run.name, dict(losses_of(run)), False) for run in results if losses_of(run)]
        for start in range(0, len(curves), MAX_LINES):
            kind = ChartKind(title, (), unit="nats per token")
            if (chart := chart_of(kind, curves[start : start + MAX_LINES])) is not None:
                yield chart
