"""The curves of a run as charts: which metrics share one, and where its lines lie.

`templates/charts.html.j2` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from danlu.report.run_record import Curve, RunRecord

WIDTH, HEIGHT = 400, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 24
"""Margins of the plot in the chart."""
PLOT = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM}
"""The measures of a chart for its template."""
MAX_POINTS = 400
"""The most points of a line; more of them are drawn as means over several steps."""
MAX_LINES = 8
"""The most lines of a chart; further metrics are in charts of their own."""


@dataclass(frozen=True)
class ChartKind:
    """Metrics that are shown in one chart."""

    title: str
    metrics: Sequence[str]
    """Names of steps' metrics; one that ends in / stands for all that begin with it."""
    evaluated: bool = True
    """Whether the evaluations' values of the same names are shown too."""
    unit: str = ""


REINFORCEMENT = (
    ChartKind("Reward", ("reward",)),
    ChartKind("Parts of the reward", ("reward/",)),
    ChartKind("Standard deviation of rewards", ("reward_std",)),
    ChartKind("KL to the reference", ("kl/", "kl", "kl_in_reward"), unit="nats"),
    ChartKind("KL to the sampling policy", ("approx_kl",), unit="nats"),
    ChartKind("Entropy", ("entropy",), unit="nats per token"),
    ChartKind("Share of tokens that are clipped", ("clip", "clip_low", "clip_high")),
    ChartKind("Ratio to the sampling policy", ("ratio",)),
    ChartKind("Gap between trainer and engine", ("gap", "rollout_gap_mean", "rollout_gap_max"), unit="nats"),
    ChartKind("Length of answers", ("length", "length_max"), unit="tokens"),
    ChartKind("Share of answers cut off or without reward", ("truncated", "unrewarded")),
    ChartKind("Share of prompts without signal", ("no_signal",)),
    ChartKind("Prompts asked in a rollout", ("prompts_asked",)),
    ChartKind("Seconds of a step", ("hand_over_s", "rollout_s", "reward_s", "scoring_s", "update_s"), unit="s"),
)
"""Charts of stage rl, shown where its metrics are there."""

COMMON = (
    ChartKind("Loss", ("loss",)),
    ChartKind("Perplexity", ("perplexity",)),
    ChartKind("Accuracy", ("accuracy",)),
    ChartKind("Gradient norm", ("grad_norm",)),
    ChartKind("Learning rate", ("learning_rate",)),
    ChartKind("Tokens per second", ("tokens_per_second",), evaluated=False),
)

UNSHOWN = frozenset({"elapsed_s", "tokens", "trained_tokens", "memory_bytes", "mfu", "s", "step_s", "time"})
"""Metrics that say little as a curve."""


@dataclass(frozen=True)
class Line:
    """A curve in a chart."""

    name: str
    paths: Sequence[str]
    """The `points` of SVG polylines, apart where a value is not finite."""
    dots: Sequence[tuple[str, str]]
    """Points that have no neighbour to be joined with."""
    last: str
    mean_over: int
    """Steps that a point is the mean of."""
    dashed: bool
    """Whether the line is of evaluations."""


@dataclass(frozen=True)
class Chart:
    """A chart with its lines and axes; coordinates are those of an SVG viewBox of `WIDTH` x `HEIGHT`."""

    title: str
    unit: str
    lines: Sequence[Line]
    x_ticks: Sequence[tuple[str, str]]
    """Ticks as (coordinate, label)."""
    y_ticks: Sequence[tuple[str, str]]
    flat: bool
    """Whether each line has the same value at all of its steps, of which there are several."""


def charts(record: RunRecord) -> list[Chart]:
    """Charts of all metrics of a run: first those of stage rl if it is one, then those of all runs, then others."""
    kinds = [*REINFORCEMENT, *COMMON] if "reward" in record.steps else [*COMMON, *REINFORCEMENT]
    if record.recipe is not None and record.recipe.stage in ("pretrain", "sft"):
        kinds = [replace(kind, unit="nats per token") if kind.metrics == ("loss",) else kind for kind in kinds]
    drawn, shown = [], set(UNSHOWN)
    for kind in (*kinds, *_others(record, kinds)):
        curves = [(name, curve, dashed) for name, curve, dashed in _curves(record, kind) if name not in shown]
        shown |= {name for name, _, _ in curves}
        for start in range(0, len(curves), MAX_LINES):
            if (chart := chart_of(kind, curves[start : start + MAX_LINES])) is not None:
                drawn.append(chart)
    return drawn


def format_value(value: float) -> str:
    """A number for a person: four significant digits, thousands set apart."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _others(record: RunRecord, kinds: Sequence[ChartKind]) -> Iterator[ChartKind]:
    """A chart for each metric that no kind names, those with a common NAME/ in one."""
    names = [*record.steps, *(name for name in record.evaluations if name not in record.steps)]
    known = {name for kind in kinds for name in kind.metrics}
    others = [name for name in names if name not in known and f"{name.partition('/')[0]}/" not in known]
    for title in dict.fromkeys(name.partition("/")[0] + "/" * ("/" in name) for name in others):
        yield ChartKind(title.rstrip("/"), (title,))


def _curves(record: RunRecord, kind: ChartKind) -> Iterator[tuple[str, Curve, bool]]:
    """Yields (name, curve, whether it is of evaluations) for a kind's present metrics."""
    for dashed, curves in ((False, record.steps), (True, record.evaluations if kind.evaluated else {})):
        for metric in kind.metrics:
            for name, curve in curves.items():
                if name == metric or (metric.endswith("/") and name.startswith(metric)):
                    yield f"eval_{name}" if dashed else name, curve, dashed


def chart_of(kind: ChartKind, curves: Sequence[tuple[str, Curve, bool]]) -> Chart | None:
    """The chart of some curves (name, curve, whether it is of evaluations); None where no value of theirs is finite."""
    thinned = [(name, *_means(curve), dashed, curve) for name, curve, dashed in curves]
    heights = [height for _, points, _, _, _ in thinned for _, height in points if math.isfinite(height)]
    if not heights:
        return None
    steps = [step for _, curve, _ in curves for step in curve]
    x_range = (min(steps), max(max(steps), min(steps) + 1))
    values = [list(curve.values()) for _, curve, _ in curves]
    y_ticks = _ticks(min(heights), max(heights))
    y_range = (min(y_ticks[0], min(heights)), max(y_ticks[-1], max(heights)))

    def place(step: float, height: float) -> tuple[str, str]:
        return f"{_x(step, x_range):.1f}", f"{_y(height, y_range):.1f}"

    lines = []
    for name, points, mean_over, dashed, curve in thinned:
        runs = [
            [place(*point) for point in run]
            for finite, run in groupby(points, key=lambda point: math.isfinite(point[1]))
            if finite
        ]
        paths = [" ".join(map(",".join, run)) for run in runs if len(run) > 1]
        dots = [run[0] for run in runs if len(run) == 1]
        lines.append(Line(name, paths, dots, format_value(curve[max(curve)]), mean_over, dashed))
    return Chart(
        kind.title,
        kind.unit,
        lines,
        [(f"{_x(step, x_range):.1f}", label) for step, label in _step_labels(*x_range)],
        [(f"{_y(height, y_range):.1f}", format_value(height)) for height in y_ticks],
        max(map(len, values)) > 1 and all(len(set(of_line)) == 1 for of_line in values),
    )


def _step_labels(first: int, last: int) -> list[tuple[int, str]]:
    """The steps that the axis names, whole ones, with their labels."""
    steps = sorted({first, (first + last) // 2, last})
    return [(step, f"step {step:,}" if step == first else f"{step:,}") for step in steps]


def _means(curve: Curve) -> tuple[list[tuple[float, float]], int]:
    """The points of a curve, by steps, and of how many each is the mean, so that there are at most `MAX_POINTS`."""
    points = sorted(curve.items())
    size = -(-len(points) // MAX_POINTS)
    if size <= 1:
        return [(float(step), height) for step, height in points], 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [tuple(sum(values) / len(group) for values in zip(*group, strict=True)) for group in groups], size  # type: ignore[misc]


def _ticks(low: float, high: float) -> list[float]:
    """Returns about four round numbers that enclose a range."""
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    rough = high / 3 - low / 3  # not (high - low) / 3, which could be infinite
    power = 10.0 ** math.floor(math.log10(rough))
    size = next((power * factor for factor in (1, 2, 5) if power * factor >= rough), power * 10)
    first, last = math.floor(low / size), math.ceil(high / size)
    return [place * size for place in range(first, last + 1)]


def _x(step: float, of: tuple[float, float]) -> float:
    return LEFT + (step - of[0]) / (of[1] - of[0]) * (WIDTH - LEFT - RIGHT)


def _y(height: float, of: tuple[float, float]) -> float:
    share = (height / 2 - of[0] / 2) / (of[1] / 2 - of[0] / 2)  # halves: their difference is finite
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)
