"""The report of a run: its numbers at the beginning and the end, curves, samples, and why rewards failed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from danlu.core.errors import DataError
from danlu.report.plan_comparison import plan_of_record, read_plan
from danlu.report.rollout_samples import RolloutSamples, read_samples
from danlu.report.run_charts import REINFORCEMENT, UNSHOWN, format_value
from danlu.report.run_record import Curve, RunRecord, read_record

COMMON = ("loss", "grad_norm", "tokens_per_second")
"""Metrics of the table of any run; a run of stage rl has those of its charts before them."""
REASONS = 20
"""Reasons of failures that are shown."""


@dataclass(frozen=True)
class Trend:
    """The course of a metric."""

    name: str
    first: float
    """The mean over the first tenth of its values."""
    last: float
    """The mean over the last tenth."""
    lowest: float
    highest: float
    """Both of the values that are finite, and NaN where none is."""

    def values(self) -> dict[str, float]:
        """All but the name."""
        return {"first": self.first, "last": self.last, "lowest": self.lowest, "highest": self.highest}


@dataclass(frozen=True)
class RunReport:
    """All that a report says."""

    record: RunRecord
    state: str
    """The state of the run: running, finished or stopped."""
    samples: RolloutSamples
    comparison: Mapping[str, Mapping[str, Any]] | None = None
    """The plan of the run next to what it took; None where it has no plan that can be read."""

    @property
    def trends(self) -> list[Trend]:
        """The metrics of the table, in its order: those that the run has."""
        return [_trend(name, curve) for name, curve in _table_metrics(self.record)]

    @property
    def notes(self) -> list[str]:
        """Notes on the completeness of the report."""
        notes = []
        if self.record.recipe is None:
            notes.append("recipe.yaml cannot be read by this danlu: parts of rewards are summed without weights")
        if damaged := self.record.damaged_lines + self.samples.damaged_lines:
            notes.append(f"{damaged:,} lines of the run's files cannot be read and are left out")
        return notes

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """The most frequent reasons why rewards were not given, and how many were not."""
        return self.samples.failures.most_common(REASONS)


def report_of(folder: Path, state: str) -> RunReport:
    """Reads a run for its report. Raises ResourceError for a file that cannot be read.

    Args:
        state: running, finished or stopped.
    """
    record = read_record(folder)
    weights = {} if record.recipe is None else record.recipe.reward_weights
    try:
        plan = read_plan(folder)
    except DataError:  # torn, which `danlu plan` says
        plan = None
    comparison = None if plan is None else plan_of_record(plan, record)
    return RunReport(record, state, read_samples(folder, weights), comparison)


def table(report: RunReport) -> list[list[str]]:
    """Headings, and below them a line of cells for each metric."""
    rows = [
        [trend.name, *map(format_value, (trend.first, trend.last, trend.lowest, trend.highest))]
        for trend in report.trends
    ]
    return [["metric", "first tenth", "last tenth", "lowest", "highest"], *rows]


def as_json(report: RunReport) -> dict[str, Any]:
    """The report for scripts: numbers that JSON does not have are texts, as in metrics.jsonl."""
    record, samples = report.record, report.samples
    return _with_texts(
        {
            "run": str(record.folder),
            "state": report.state,
            "stage": None if record.recipe is None else record.recipe.stage,
            "step": record.last_step,
            "metrics": {trend.name: trend.values() for trend in report.trends},
            "events": len(record.events),
            "prompts": samples.prompts,
            "answers": samples.answers,
            "plan": report.comparison,
            "failures": dict(samples.failures.most_common()),
            "rollouts": [asdict(rollout) for rollout in samples.rollouts],
            "notes": report.notes,
        }
    )


def _with_texts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_texts(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_with_texts(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _table_metrics(record: RunRecord) -> Iterator[tuple[str, Curve]]:
    """Yields each metric of the table from steps, then from evaluations; then all others of evaluations."""
    wanted = [name for kind in REINFORCEMENT for name in kind.metrics] if "reward" in record.steps else []
    shown: list[str] = []
    for wanted_name in (*wanted, *COMMON):
        for curves, prefix in ((record.steps, ""), (record.evaluations, "eval_")):
            for name, curve in curves.items():
                if name == wanted_name or (wanted_name.endswith("/") and name.startswith(wanted_name)):
                    shown.append(prefix + name)
                    yield prefix + name, curve
    for name, curve in record.evaluations.items():
        if f"eval_{name}" not in shown and name not in UNSHOWN:
            yield f"eval_{name}", curve


def _trend(name: str, curve: Curve) -> Trend:
    values = [height for _, height in sorted(curve.items())]
    tenth = max(1, len(values) // 10)
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    return Trend(name, _mean(values[:tenth]), _mean(values[-tenth:]), min(finite), max(finite))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if all(map(math.isfinite, values)) else math.nan
