"""Writes when this process of a pipeline ran which action in a step; `danlu schedule --run` draws it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from danlu.core.line_log import OptionalLineLog
from danlu.parallel.comm import Group
from danlu.parallel.schedules.action import Kind

if TYPE_CHECKING:
    from danlu.parallel.timeline import TimelineEvent


class TimelineWriter:
    """The timeline of each `every` steps, in the file of this rank.

    A pass begins when its inputs are here, so that waiting is no part of it. On a GPU each pass waits until the device
    has done it, so such a step takes longer than others.
    """

    def __init__(
        self,
        path: Path,
        every: int,
        world: Group,
        device: torch.device,
    ) -> None:
        """path: the file. world: all ranks; their clocks begin together."""
        self._log = OptionalLineLog(path)
        self._every, self._world, self._device = every, world, device
        self._step: int | None = None  # that is being timed
        self._events: list[TimelineEvent] = []
        self._zero = 0.0

    @classmethod
    def in_folder(
        cls, folder: Path, every: int, world: Group, device: torch.device, *, after_step: int
    ) -> TimelineWriter:
        """Makes the writer of a run that continues after a step: the lines of later steps are dropped.

        Raises DataError, with file and line, where there is something else in the file.
        """
        from danlu.parallel.timeline import timeline_events, timeline_name

        writer = cls(folder / timeline_name(world.index), every, world, device)
        steps = [step for step, _ in timeline_events(writer._log.path, world.index)]
        writer._log.truncate(sum(step <= after_step for step in steps))
        return writer

    def begin(self, step: int) -> None:
        """Begins a step; every process calls this."""
        self._step, self._events = None, []
        if step % self._every == 0:
            self._world.sum(torch.zeros(1, device=self._device))  # nobody goes on before all are here
            self._zero = 0.0
            self._step, self._zero = step, self._now()

    @contextmanager
    def timed(self, kind: Kind, chunk: int | None = None, micro: int | None = None) -> Iterator[None]:
        """A context around an action of the process, in a step that is timed."""
        if self._step is None:
            yield
            return
        from danlu.parallel.timeline import TimelineEvent

        start = self._now()
        yield
        self._events.append(TimelineEvent(self._world.index, kind, chunk, micro, start, self._now()))

    def end(self) -> None:
        """Ends a step, with the update as its last event, and writes it."""
        if self._step is None:
            return
        from danlu.parallel.timeline import timeline_line

        for event in self._events:
            self._log.append(timeline_line(event, self._step))
        self._step = None

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - self._zero
