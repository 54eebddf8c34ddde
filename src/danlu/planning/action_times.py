"""Times of a pipeline's actions: the papers' units, a file's, or a run's means. Imports no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from danlu.core.errors import RecipeError
from danlu.core.small_files import read_small_text
from danlu.core.spelling import did_you_mean
from danlu.parallel.schedules import Action
from danlu.parallel.timeline import TimelineEvent
from danlu.recipe.yaml_reader import MAX_BYTES, parse
from danlu.recipe.yaml_tree import Node, Problem

Seconds = float | tuple[float, ...]
"""The same for every chunk, or one for each chunk of the model."""


@dataclass(frozen=True)
class ActionTimes:
    """Seconds that each kind of action takes.

    The defaults are those of the papers' formulas: forward, input and weight gradient alike, the rest nothing.
    """

    forward: Seconds = 1.0
    input: Seconds = 1.0
    weight: Seconds = 1.0
    backward: Seconds | None = None
    """The time of a whole backward pass; None: input and weight gradient together."""
    send: Seconds = 0.0
    """The time of a message, until it has arrived; by the chunk that sends."""
    reduce: Seconds = 0.0
    update: float = 0.0

    def of(self, action: Action) -> float:
        """Seconds that an action takes; of a receive none: the time is that of its send."""
        if action.kind == "receive":
            return 0.0
        if action.kind == "backward" and self.backward is None:
            return _of_chunk(self.input, action) + _of_chunk(self.weight, action)
        return _of_chunk(getattr(self, action.kind), action)


def _of_chunk(seconds: Seconds, action: Action) -> float:
    if isinstance(seconds, tuple):
        assert action.chunk is not None
        return seconds[action.chunk]
    return seconds


def mean_times(events: Iterable[TimelineEvent], num_chunks: int) -> ActionTimes:
    """The times of a measured step: for each kind and chunk the mean over micro-batches and ranks.

    Of messages the shortest of each chunk: the others may have waited for their receive.
    """
    durations: dict[tuple[str, int | None], list[float]] = defaultdict(list)
    for event in events:
        durations[event.kind, event.chunk].append(event.end_s - event.start_s)

    def by_chunk(kind: str) -> tuple[float, ...]:
        values = [durations.get((kind, chunk), [0.0]) for chunk in range(num_chunks)]
        return tuple(min(times) if kind == "send" else sum(times) / len(times) for times in values)

    updates = durations.get(("update", None), [0.0])
    kinds = {kind for kind, _ in durations}
    return ActionTimes(
        forward=by_chunk("forward"),
        input=by_chunk("input"),
        weight=by_chunk("weight"),
        backward=by_chunk("backward") if "backward" in kinds else None,
        send=by_chunk("send"),
        reduce=by_chunk("reduce"),
        update=sum(updates) / len(updates),
    )


def read_times(file: Path, num_chunks: int) -> ActionTimes:
    """Times of a YAML or JSON file: a mapping of kinds of actions to seconds, or to a list with one for each chunk.

    Raises RecipeError with file and line for all that is wrong in it.
    """
    try:
        text = read_small_text(file, MAX_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--times {file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    problems: list[Problem] = []
    tree = parse(text, str(file), problems)
    times = {} if tree is None else _checked(tree, num_chunks, problems)
    if problems:
        raise RecipeError([problem.line(str(file)) for problem in problems])
    return ActionTimes(**times)  # type: ignore[arg-type]


def _checked(tree: Node, num_chunks: int, problems: list[Problem]) -> dict[str, Seconds]:
    kinds = [field.name for field in fields(ActionTimes)]
    if not isinstance(tree.value, dict):
        problems.append(Problem("", f"no mapping of kinds ({', '.join(kinds)}) to seconds", tree.origin))
        return {}
    times = {}
    for kind, node in tree.value.items():
        if kind not in kinds:
            origin = node.key_origin or node.origin
            problems.append(Problem(kind, f"no kind of action with a time.{did_you_mean(kind, kinds)}", origin))
            continue
        each = node.value if isinstance(node.value, list) else [node]
        if isinstance(node.value, list) and (kind == "update" or len(each) != num_chunks):
            wanted = "one number" if kind == "update" else f"one number, or one for each of the {num_chunks} chunks"
            problems.append(Problem(kind, f"{len(each)} numbers, but it takes {wanted}", node.origin))
        problems += [
            Problem(kind, f"{entry.plain!r} is no number of seconds, from 0 up", entry.origin)
            for entry in each
            if isinstance(entry.value, bool)
            or not isinstance(entry.value, int | float)
            or not (math.isfinite(entry.value) and entry.value >= 0)
        ]
        times[kind] = tuple(entry.plain for entry in each) if isinstance(node.value, list) else node.plain
    return times
