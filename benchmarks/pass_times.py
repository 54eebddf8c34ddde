"""When a process computes in a step: spans of its forward, backward, input and weight passes, as a timeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from danlu.core.weight_gradients import DeferredWeightGradients
from danlu.parallel.ranks import Ranks
from danlu.parallel.schedules import Action
from danlu.parallel.timeline import TimelineEvent
from danlu.planning.pipeline_simulation import COMPUTE
from danlu.training.learner import MicroStep


class PassTimes:
    """Start and end of each pass of this process, in their order, on a clock that all processes of a machine share."""

    def __init__(self) -> None:
        """Weight passes are timed from here on; a learner's other passes by a `TimedLearner`."""
        self._spans: list[tuple[float, float]] = []
        accumulate = DeferredWeightGradients.accumulate

        def timed(deferred: DeferredWeightGradients) -> None:
            with self.span():
                accumulate(deferred)

        DeferredWeightGradients.accumulate = timed  # type: ignore[assignment, method-assign]

    @contextmanager
    def span(self) -> Iterator[None]:
        """Around a pass."""
        start = time.monotonic()
        yield
        self._spans.append((start, time.monotonic()))

    def of_steps(
        self, ranks: Ranks, actions: Sequence[Action], step: Callable[[int], None], rounds: int
    ) -> list[list[TimelineEvent]]:
        """The events of all ranks in so many steps, each from 0 s on; one step before them warms up.

        Every process calls this. actions: what it does in a step. step: takes one, of the number that it is given.
        """
        steps = []
        for number in range(1, rounds + 2):
            self._spans.clear()
            dist.barrier()
            step(number)
            by_rank: list[list[TimelineEvent]] = ranks.world.all_gather_objects(self._events(ranks.rank, actions))
            start = min(event.start_s for events in by_rank for event in events)
            steps.append(
                [
                    TimelineEvent(
                        each.rank, each.kind, each.chunk, each.micro, each.start_s - start, each.end_s - start
                    )
                    for events in by_rank
                    for each in events
                ]
            )
        return steps[1:]

    def _events(self, rank: int, actions: Sequence[Action]) -> list[TimelineEvent]:
        computed = [action for action in actions if action.kind in COMPUTE]
        events = [
            TimelineEvent(rank, action.kind, action.chunk, action.micro, *span)
            for action, span in zip(computed, self._spans, strict=True)
        ]
        end_s = events[-1].end_s
        return [*events, TimelineEvent(rank, "update", None, None, end_s, end_s)]  # with which a timeline's step ends


class TimedLearner:
    """A learner whose passes are timed, without what they wait for before; all else is the learner's own."""

    def __init__(self, learner: Any, times: PassTimes) -> None:
        self._learner, self._times = learner, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    @contextmanager
    def at(self, micro_step: MicroStep[Any]) -> Iterator[None]:
        with self._learner.at(micro_step), self._times.span():
            yield
