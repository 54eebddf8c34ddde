"""The report of a run as one HTML page (`templates/report.html.j2`)."""

from __future__ import annotations

from danlu import __version__
from danlu.core.terminal import printable
from danlu.report.html_page import HtmlPage
from danlu.report.plan_comparison import comparison_rows
from danlu.report.rollout_samples import shortened
from danlu.report.run_charts import PLOT, charts, format_value
from danlu.report.run_report import RunReport, table

PAGE = HtmlPage("report", flag="--out")
MAX_EVENTS = 100


def page(report: RunReport) -> str:
    """Renders the whole page of a report."""
    record = report.record
    name = printable(record.folder.resolve().name)
    headings, *rows = table(report)
    return PAGE.render(
        title=f"danlu report of {name}",
        heading=f"Report of {name}",
        facts=_facts(report),
        notes=report.notes,
        headings=headings,
        rows=rows,
        comparison=[] if report.comparison is None else comparison_rows(report.comparison),
        charts=charts(record),
        plot=PLOT,
        samples=report.samples,
        reasons=report.reasons,
        failed=report.samples.failures.total(),
        events=[_event(event) for event in record.events[:MAX_EVENTS]],
        more_events=max(0, len(record.events) - MAX_EVENTS),
        format_value=format_value,
    )


def _facts(report: RunReport) -> str:
    """Formats a run's facts: `stage rl · finished · step 200 · 1,600 prompts, 12,800 answers · danlu 0.9`."""
    record, samples = report.record, report.samples
    facts = [] if record.recipe is None else [f"stage {record.recipe.stage}"]
    facts += [report.state, f"step {record.last_step:,}"]
    if samples.prompts:
        facts.append(f"{samples.prompts:,} prompts, {samples.answers:,} answers")
    return " · ".join([*facts, f"danlu {__version__}"])


def _event(event: object) -> tuple[str, str, str]:
    """Returns (step, event, its values) as texts of bounded length."""
    assert isinstance(event, dict), "read as an object"
    values = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("step", "event"))
    return f"{event['step']:,}", shortened(str(event["event"]), 100), shortened(values, 300)
