"""The display of a run's progress: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from danlu.core.terminal import printable
from danlu.core.types import StepMetrics
from danlu.training.criterion import LOSS
from danlu.training.units import format_bytes, format_duration

if TYPE_CHECKING:  # it imports torch, which showing the progress of rows does without
    from danlu.training.metrics import Recorder, Value

TOKENS = "tokens"
Lead = Callable[[Mapping[str, float]], str]
"""Formats numbers that a step's line begins with, from its own metrics; they end in a space."""
_LINE_INTERVAL_S = 5.0
_KEPT_INTERVAL_S = 30.0  # between the lines that a bar leaves above it
_REFRESH_INTERVAL_S = 0.2
_ROWS_INTERVAL_S = 5.0
_HORIZON_STEPS = 20  # of the average that the remaining time is reckoned from


def _nothing(metrics: Mapping[str, float]) -> str:
    """The lead of a line that begins with the loss."""
    return ""


def progress_on(
    stream: TextIO,
    *,
    total: int,
    done: int = 0,
    counted: str = TOKENS,
    every_step: bool = False,
    lead: Lead = _nothing,
) -> Recorder:
    """Returns a bar when `stream` is a terminal, else plain lines.

    Args:
        total       steps of the whole run
        done        steps that an earlier process made
        counted     the unit of throughput: tokens, images
        every_step  show a line for each logged step, however soon they follow each other
        lead        formats the numbers that come first, from the metrics of a step, with a space behind them
    """
    kind = BarProgress if stream.isatty() else LineProgress
    return kind(stream, total=total, done=done, counted=counted, every_step=every_step, lead=lead)


class Eta:
    """Estimates the seconds left, from a moving average of the time between steps (evaluations and saves included)."""

    def __init__(self, total: int, done: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._step, self._at = done, clock()
        self._intervals = 0
        self._seconds_per_step = 0.0

    def after(self, step: int) -> float:
        """Seconds left once `step` is done."""
        now = self._clock()
        steps = step - self._step
        if steps > 0:  # a rewind goes back, and says nothing about speed
            self._intervals += 1
            # The first interval is no guide (compilation, first allocations): the second replaces it.
            weight = 1.0 if self._intervals <= 2 else 1 - (1 - 1 / _HORIZON_STEPS) ** steps
            self._seconds_per_step += weight * ((now - self._at) / steps - self._seconds_per_step)
        self._step, self._at = step, now
        return (self._total - step) * self._seconds_per_step


class _StepProgress(ABC):
    """The common part of lines and bar: the numbers of a step, and whether they are due to be shown again."""

    _interval_s: float

    def __init__(
        self,
        stream: TextIO,
        *,
        total: int,
        done: int = 0,
        counted: str = TOKENS,
        every_step: bool = False,
        lead: Lead = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._every_step = every_step
        self._lead = lead
        self._total = total
        self._counted = counted
        self._clock = clock
        self._eta = Eta(total, done, clock)
        self._shown_at = -math.inf

    def _numbers(self, metrics: StepMetrics) -> str:
        """The numbers with the remaining time. Call it once for each step: it measures the time between calls."""
        return f"{numbers(metrics, self._counted, self._lead)} eta {format_duration(self._eta.after(metrics.step))}"

    def _due(self, step: int) -> bool:
        now = self._clock()
        due = now - self._shown_at >= self._interval_s or step == self._total
        self._shown_at = now if due else self._shown_at
        return due

    def evaluation(self, step: int, values: Mapping[str, Value]) -> None:
        self._print(evaluation_line(step, values, self._counted))

    def event(self, step: int, event: str, **values: Value) -> None:
        self._print(event_line(step, event, values))

    @abstractmethod
    def _print(self, text: str) -> None:
        """Shows a text on lines of its own."""


class LineProgress(_StepProgress):
    """One line a step, but not more often than every few seconds unless `every_step`; the first and the last step
    always."""

    _interval_s = _LINE_INTERVAL_S

    def step(self, metrics: StepMetrics) -> None:
        shown = self._numbers(metrics)
        if self._due(metrics.step) or self._every_step:
            self._print(f"step {metrics.step}/{self._total} {shown}")

    def close(self) -> None:
        self._stream.flush()

    def _print(self, text: str) -> None:
        self._stream.write(printable(text) + "\n")
        self._stream.flush()


class BarProgress(_StepProgress):
    """A bar that stays at the bottom of the terminal, with events above it, and now and then a line of the steps.

    Drawn from `step` itself, five times a second at most: a refresh thread would take time from the steps.
    """

    _interval_s = _REFRESH_INTERVAL_S

    def __init__(self, stream: TextIO, *, total: int, done: int = 0, **options: Any) -> None:
        super().__init__(stream, total=total, done=done, **options)
        # Here, not above: a run that writes its output to a file need not load it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total)) + 1)),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=Console(file=stream),
            auto_refresh=False,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total, completed=done, numbers="")
        self._kept_at = self._clock()
        self._bar.start()

    def step(self, metrics: StepMetrics) -> None:
        shown = self._numbers(metrics)
        self._bar.update(self._task, completed=metrics.step, numbers=shown)
        if self._every_step or self._clock() - self._kept_at >= _KEPT_INTERVAL_S:
            self._kept_at = self._clock()
            self._print(f"step {metrics.step}/{self._total} {shown}")
        if self._due(metrics.step):
            self._bar.refresh()

    def close(self) -> None:
        self._bar.refresh()
        self._bar.stop()

    def _print(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False, highlight=False)


def numbers(metrics: StepMetrics, counted: str = TOKENS, lead: Lead = _nothing) -> str:
    """Formats a step: `loss 3.214 grad 0.91 lr 2.0e-04 4,312 tok/s 1.02 GiB`; `lead` formats what comes before."""
    unit = "tok" if counted == TOKENS else counted
    return (
        f"{lead(metrics.extra)}"
        f"loss {metrics.loss:.3f} grad {metrics.grad_norm:.2f} lr {metrics.learning_rate:.1e} "
        f"{metrics.tokens_per_second:,.0f} {unit}/s {format_bytes(metrics.memory_bytes)}"
    )


def evaluation_line(step: int, values: Mapping[str, Value], counted: str = TOKENS) -> str:
    """Formats an evaluation: `step 50 evaluation: loss 3.142, perplexity 23.1, accuracy 31.2%, 1,712 tokens in 0.1
    s`."""
    rest = dict(values)
    shown = [_EVALUATION_FORMATS[name].format(rest.pop(name)) for name in _EVALUATION_FORMATS if name in rest]
    shown += _spell({name: rest.pop(name) for name in [*rest] if name.startswith("loss/")})
    if "tokens" in rest:
        seconds = rest.pop("s", None)
        shown.append(f"{rest.pop('tokens'):,} {counted}" + (f" in {seconds:.1f} s" if seconds is not None else ""))
    return f"step {step} evaluation: {', '.join([*shown, *_spell(rest)])}"


def event_line(step: int, event: str, values: Mapping[str, Value]) -> str:
    """`step 12: fp16 overflow, ...`; a sample shows its text on lines of its own."""
    if event == "sample":
        return f"step {step} sample: {_indented(values['prompt'])}\n  -> {_indented(values['text'])}"
    if event == "early_stop":
        return f"step {step}: early stop: {_without_gain(values)}"
    if event in _EVENT_FORMATS:
        return f"step {step}: {_EVENT_FORMATS[event].format(**values)}"
    return f"step {step} {event}" + (f": {', '.join(_spell(values))}" if values else "")


_EVALUATION_FORMATS = {"loss": "loss {:.3f}", "perplexity": "perplexity {:.4g}", "accuracy": "accuracy {:.1%}"}
_EVENT_FORMATS = {
    "loss_scale": "no fp16 overflow for a while, loss scale {before:,g} -> {after:,g}",
    "no_targets": "no update: nothing in the {tokens:,} tokens of this step is trained, in {rows}",
    "overflow": "fp16 overflow, update skipped, loss scale {before:,g} -> {after:,g}",
    "remark": "{text}",
    "rewind": "back to the checkpoint of step {back_to}; packed sequences skipped so far: {packs_left_out}",
    "spike": "spike: {reason}; watch.policy: {policy}",
}


def _without_gain(values: Mapping[str, Value]) -> str:
    """Describes an early stop; `best_NAME` is the best value of the run's criterion."""
    name, best = next((name, best) for name, best in values.items() if name.startswith("best_"))
    metric = name.removeprefix("best_")
    shown = "" if metric == LOSS.metric else f"{printable(metric)} "
    return f"{values['evaluations']} evaluations in a row were no better than {shown}{best:.4f}"


def _spell(values: Mapping[str, Value]) -> list[str]:
    return [
        f"{printable(name)} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in values.items()
    ]


def _indented(text: Value) -> str:
    """Text of a model in lines below the first that begin where it does."""
    return printable(str(text)).replace("\n", "\n     ")


class RowProgress:
    """Rows done while data is tokenised: one rewritten line on a terminal, a line every few seconds elsewhere.

    Called with the rows done and, where it is known, how many there are. `doing` and `units` name the work and its
    unit, where these are not tokenising and rows.
    """

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        doing: str = "tokenising",
        units: str = "rows",
    ) -> None:
        self._stream = stream
        self._doing, self._units = doing, units
        self._clock = clock
        self._started = self._shown_at = clock()

    def __call__(self, done: int, total: int | None) -> None:
        now = self._clock()
        if now - self._shown_at < (_REFRESH_INTERVAL_S if self._stream.isatty() else _ROWS_INTERVAL_S):
            return
        self._shown_at = now
        of_total = "" if total is None else f" of {total:,}"
        speed = f"{done / (now - self._started):,.0f} {self._units}/s"
        text = f"{self._doing}: {done:,}{of_total} {self._units}, {speed}"
        self._stream.write(f"\r\x1b[K{text}" if self._stream.isatty() else f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Take the line off a terminal."""
        if self._stream.isatty():
            self._stream.write("\r\x1b[K")
            self._stream.flush()
