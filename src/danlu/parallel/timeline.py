"""Timelines of pipeline ranks: events that a simulation makes, or that a run has measured and written.

A run's folder has a file `timeline-RANK.jsonl` for each rank, with one JSON object a line for each action of each step
that was measured::

    {"step": 12, "rank": 0, "kind": "forward", "chunk": 0, "micro": 3, "start_s": 0.0312, "end_s": 0.0405}

`kind`, `chunk` and `micro` are those of the action (`parallel/schedules/action.py`), null where the action has none.
Times are seconds since a moment that all ranks share, such as a barrier before the step. The last line of a step is an
``update``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from danlu.core.errors import DataError
from danlu.core.small_files import check_regular, parse_json
from danlu.parallel.schedules.action import Kind

_NAME = re.compile(r"timeline-(\d+)\.jsonl")
_KEPT_STEPS = 3
"""The number of last steps kept of each file: ranks that were stopped may be a step apart, with one only begun."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One action of one rank, with its times.

    A ``send`` lasts from where its transfer begins until it has arrived; a ``receive`` is the same transfer at the
    other end. Ranks that compute meanwhile are not idle.
    """

    rank: int
    kind: Kind
    chunk: int | None
    micro: int | None
    start_s: float
    """Seconds on one clock for all ranks."""
    end_s: float


def timeline_name(rank: int) -> str:
    """The name of a rank's file in the folder of its run."""
    return f"timeline-{rank}.jsonl"


def timeline_line(event: TimelineEvent, step: int) -> str:
    """An event as a line of a timeline file, without its end."""
    values = {field: getattr(event, field) for field in TimelineEvent.__dataclass_fields__}
    return json.dumps({"step": step, **values})


def read_timeline(folder: Path, step: int | None = None) -> tuple[int, list[TimelineEvent]]:
    """A step of a run's timeline: its number, and the events of all ranks by their start.

    step: None for the last one that every rank has gone through to its end.

    Raises DataError where there is no timeline or no such step, or with file and line where one cannot be read.
    """
    files = {int(match[1]): path for path in folder.glob("timeline-*.jsonl") if (match := _NAME.fullmatch(path.name))}
    if not files:
        raise DataError(
            f"{folder}: there is no {timeline_name(0)} in it. Runs with parallel.pipeline and `log: {{timeline: N}}` "
            "write it for each rank"
        )
    by_rank = {rank: _steps(path, rank, step) for rank, path in sorted(files.items())}
    common = set.intersection(*(set(steps) for steps in by_rank.values()))
    if not common:
        wanted = "step" if step is None else f"step {step}"
        missing = [timeline_name(rank) for rank, steps in by_rank.items() if not steps]
        cause = f"{missing[0]} has none" if missing else "their last ones differ"
        raise DataError(f"{folder}: there is no {wanted} that all {len(files)} ranks have gone through: {cause}")
    last = max(common)
    events = [event for steps in by_rank.values() for event in steps[last]]
    return last, sorted(events, key=lambda event: (event.start_s, event.end_s))


def _steps(path: Path, rank: int, wanted: int | None) -> dict[int, list[TimelineEvent]]:
    """The events of the last steps of a file that came to their end, or of one step."""
    steps: dict[int, list[TimelineEvent]] = {}
    for step, event in timeline_events(path, rank):
        if wanted is not None and step != wanted:
            continue
        steps.setdefault(step, []).append(event)
        if len(steps) > _KEPT_STEPS:
            del steps[min(steps)]
    return {step: events for step, events in steps.items() if events[-1].kind == "update"}


def timeline_events(path: Path, rank: int) -> Iterator[tuple[int, TimelineEvent]]:
    """(step, event) of each line of a rank's file; raises DataError with file and line where one cannot be read."""
    try:
        check_regular(path)
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith("\n"):
                    return  # the run was stopped within it, or is writing it
                yield _event(line, rank, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _event(line: str, rank: int, place: str) -> tuple[int, TimelineEvent]:
    """Parses a line into (step, event); raises DataError that names the fault."""
    try:
        values = parse_json(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: this is no JSON: {error.msg}") from None
    keys = ("step", *TimelineEvent.__dataclass_fields__)
    if not isinstance(values, dict) or set(values) != set(keys):
        raise DataError(f"{place}: an event is an object with {', '.join(keys)}, and nothing else")
    wrong = next(_wrong(values, rank), None)
    if wrong is not None:
        raise DataError(f"{place}: {wrong}")
    step = values.pop("step")
    return step, TimelineEvent(**values)


def _wrong(values: dict[str, Any], rank: int) -> Iterator[str]:
    """Yields the faults in the values of an event."""
    if values["kind"] not in get_args(Kind):
        yield f"kind: {values['kind']!r} is none of {', '.join(get_args(Kind))}"
        return
    optional = {"reduce": ("micro",), "update": ("chunk", "micro")}.get(values["kind"], ())
    for key in ("step", "rank", "chunk", "micro"):
        if not (_is_count(values[key]) or (values[key] is None and key in optional)):
            yield f"{key}: {values[key]!r} is no number from 0 up"
    if values["rank"] != rank:
        yield f"rank: {values['rank']}, in the file of rank {rank}"
    times = values["start_s"], values["end_s"]
    if not all(isinstance(time, int | float) and math.isfinite(time) for time in times) or times[0] > times[1]:
        yield f"start_s and end_s: {times[0]!r} and {times[1]!r} are no two times, one after the other"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
