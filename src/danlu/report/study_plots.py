"""The pictures of a study: loss against the varied keys, cost against them, and the curves of all runs.

Figures are made and drawn without pyplot: no window, no state that is left behind. This is the only file that loads
matplotlib.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import get_font_names
from matplotlib.ticker import MaxNLocator, NullLocator

from danlu.recipe.parameter_grid import short_keys
from danlu.report.study_results import RunSummary, SeedGroup, Study, parse_numbers, standard_deviation

FORMATS = ("png", "svg")
FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "Noto Sans SC", "WenQuanYi Micro Hei")  # those that are installed
WIDE_RANGE = 8  # largest value by smallest, from which an axis of numbers is logarithmic
SMOOTHING = 20  # a curve of training losses is a running mean over a twentieth of the run
MIB = 2**20


@dataclass(frozen=True)
class Series:
    """The groups that one line joins: alike but for the key of the x axis."""

    label: str
    x: list[float]
    groups: list[SeedGroup]


@dataclass(frozen=True)
class XAxis:
    """The x axis of a study: one key and its values."""

    key: str
    texts: list[str]
    positions: list[float]  # on the axis, of each text
    logarithmic: bool
    series: list[Series]


def figures(study: Study) -> dict[str, Figure]:
    """The figures by name: `evaluation_loss` and `cost` where a key varies, `loss_curves` always.

    Only finished runs are drawn.
    """
    with _settings():
        drawn = {}
        x_axis = _x_axis(study)
        if x_axis is not None:
            drawn["evaluation_loss" if study.evaluated else "training_loss"] = _losses(study, x_axis)
            drawn["cost"] = _cost(x_axis)
        drawn["loss_curves"] = _curves(study)
        return drawn


def draw(study: Study, folder: Path) -> list[Path]:
    """Writes every figure as PNG and SVG into the folder; the same study gives the same files."""
    written = []
    for name, figure in figures(study).items():
        for kind in FORMATS:
            path = folder / f"{name}.{kind}"
            with _settings(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph .* missing")  # a sign that no installed font has
                figure.savefig(path, dpi=150, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def _settings() -> AbstractContextManager[None]:
    """matplotlib's settings while a figure is made or drawn."""
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    installed = set(get_font_names())
    return matplotlib.rc_context(
        {
            "font.family": [font for font in FONTS if font in installed],
            "text.parse_math": False,  # a value may have a dollar sign
            "svg.hashsalt": "danlu",
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )


# -- against what varies ----------------------------------------------------------------------------------------------


def _x_axis(study: Study) -> XAxis | None:
    """The first key that varies as the x axis, and a line for each combination of the others; None if none varies."""
    if not study.varied or not study.groups:
        return None
    key, *series_keys = study.varied
    texts = list(dict.fromkeys(group.values[key] for group in study.groups))
    parsed = parse_numbers(texts)
    positions = [float(index) for index in range(len(texts))] if parsed is None else parsed
    logarithmic = parsed is not None and min(parsed) > 0 and max(parsed) >= WIDE_RANGE * min(parsed)
    position_of = dict(zip(texts, positions, strict=True))
    groups_of: dict[str, list[SeedGroup]] = {}  # by label
    for group in study.groups:
        groups_of.setdefault(_label(group, series_keys), []).append(group)
    series = [
        Series(label, [position_of[group.values[key]] for group in groups], groups)
        for label, groups in groups_of.items()
    ]
    return XAxis(key, texts, positions, logarithmic, series)


def _label(group: SeedGroup, keys: Sequence[str]) -> str:
    """Formats a group's values: `rank 4, learning_rate 1e-4`."""
    return ", ".join(f"{short} {group.values[key]}" for short, key in zip(short_keys(keys), keys, strict=True))


def _losses(study: Study, x_axis: XAxis) -> Figure:
    """Draws evaluation loss against the varied keys, last and best; training loss where no run was evaluated."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    if study.evaluated:
        axes.set_ylabel("evaluation loss (nats per token)")
        runs = [run for group in study.groups for run in group.summaries]
        if any(run.evaluation_best != run.evaluation_last for run in runs):
            _lines(axes, x_axis, lambda run: run.evaluation_best, about="best", style="--o")
        _lines(axes, x_axis, lambda run: run.evaluation_last, about="last", style="-o")
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(fontsize="small", handlelength=3)
    else:
        _lines(axes, x_axis, lambda run: run.loss, about="", style="-o")
        axes.set_ylabel("training loss of the last step (nats per token)")
    return figure


def _cost(x_axis: XAxis) -> Figure:
    """Draws speed and peak memory against the varied keys."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    _lines(speed, x_axis, lambda run: run.tokens_per_second, about="", style="-o")
    speed.set_ylabel("tokens/s (median of the steps)")
    _lines(memory, x_axis, lambda run: run.peak_memory_bytes / MIB, about="", style="-o")
    memory.set_ylabel("peak memory (MiB)")
    for axes in (speed, memory):
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])  # from 0: a difference of a percent should look like one
    return figure


def _lines(axes: Axes, x_axis: XAxis, value: Callable[[RunSummary], float | None], *, about: str, style: str) -> None:
    """A line for each series, with the standard deviation over seeds as bars."""
    for series, colour in zip(x_axis.series, _colours(len(x_axis.series)), strict=True):
        points = [  # (x, the values of all seeds there)
            (x, values)
            for x, group in zip(series.x, series.groups, strict=True)
            if (values := [height for run in group.summaries if (height := value(run)) is not None])
        ]
        places, heights = [x for x, _ in points], [fmean(values) for _, values in points]
        label = " ".join(word for word in (series.label, about) if word)
        axes.plot(places, heights, style, color=colour, label=label, markersize=4)
        if any(len(values) > 1 for _, values in points):
            deviations = [standard_deviation(values) for _, values in points]
            axes.errorbar(places, heights, yerr=deviations, fmt="none", ecolor=colour)
    axes.set_xlabel(x_axis.key)
    if x_axis.logarithmic:
        axes.set_xscale("log")
    axes.set_xticks(x_axis.positions, labels=x_axis.texts)
    axes.xaxis.set_minor_locator(NullLocator())
    if len(x_axis.series) > 1:
        axes.legend(fontsize="small")


# -- over steps -------------------------------------------------------------------------------------------------------


def _curves(study: Study) -> Figure:
    """Training loss, a running mean, and evaluation loss where there is one; a line for each run, a colour for each
    combination."""
    evaluated = any(result.evaluations for result in study.finished)
    figure = Figure(figsize=(10 if evaluated else 6, 4), layout="constrained")
    training, *rest = figure.subplots(1, 2 if evaluated else 1, squeeze=False)[0]
    for group, colour in zip(study.groups, _colours(len(study.groups)), strict=True):
        for result in group.results:
            label = _label(group, study.varied) if result is group.results[0] else None
            training.plot(*_smooth(result.losses), color=colour, label=label, linewidth=1.2)
            for axes in rest:
                axes.plot(*_unzip(result.evaluations), "-o", color=colour, label=label, markersize=3, linewidth=1.2)
    training.set_ylabel("training loss (nats per token, running mean)")
    for axes in rest:
        axes.set_ylabel("evaluation loss (nats per token)")
    for axes in (training, *rest):
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if study.varied:
        (rest or [training])[-1].legend(fontsize="small")
    return figure


def _smooth(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Each height as the mean of itself and those before it, over a twentieth of the curve."""
    window = max(1, len(points) // SMOOTHING)
    steps, heights = _unzip(points)
    return steps, [fmean(heights[max(0, end - window) : end]) for end in range(1, len(heights) + 1)]


def _unzip(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """The coordinates of a curve as matplotlib takes them."""
    return [step for step, _ in points], [height for _, height in points]


def _colours(count: int) -> list[tuple[float, float, float, float]]:
    """`count` colours from dark to light, for values that rise."""
    return [colormaps["viridis"](0.85 * place / max(1, count - 1)) for place in range(count)]
