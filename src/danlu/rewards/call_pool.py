"""A pool of worker processes that run user code: calls are dealt and timed, and workers that hang or crash restarted.

One thread calls it. Whatever a worker does, the caller goes on when the time is up.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from danlu.core.errors import RecipeError
from danlu.core.worker_process import (
    LOAD_TIMEOUT_S,
    LONGEST_WAIT_S,
    WorkerProcess,
    decoded,
    end_all,
    one_thread,
    wait_for_any,
)

MOST_TIMEOUTS = 8
"""Calls of a group that take too long one after the other; its others are not made any more."""


@dataclass(frozen=True, eq=False)
class PoolCall:
    """A call to make."""

    key: Any
    """The caller's own name for it."""
    request: Any
    """The request that the worker receives."""
    place: int | None = None
    """The number of the worker that makes it; None: any that is free."""
    group: Hashable = None
    """The calls with which it is given up when too many of them take too long; None: it is not."""
    processor_limit_s: float | None = None
    """The limit of its processor time, where this can be seen, else of the clock, so that a busy machine makes nobody
    late. By the clock it has ten times as much at most."""


@dataclass(frozen=True)
class Failed:
    """Takes the place of a reply: the call took too long, lost its worker, or was not made."""

    reason: str
    is_late: bool = False


Result = tuple[PoolCall, Any]
"""A call, and its reply or `Failed`."""


class CallWorker(WorkerProcess):
    """A worker, its present call, and the call's deadline.

    deadline: by the clock `time.monotonic`, of the present call or of loading. call: None where it is free.
    is_ready: whether it has loaded the first request.
    """

    def __init__(self, statement: str, source: Any, timeout_s: float) -> None:
        super().__init__(statement, source, variables=one_thread())
        self._timeout_s = timeout_s
        self.limit_s = max(timeout_s, LOAD_TIMEOUT_S)
        self.deadline = time.monotonic() + self.limit_s
        self.call: PoolCall | None = None
        self.is_ready = False
        self._processor_until: float | None = None
        self._last_deadline = math.inf

    @property
    def is_free(self) -> bool:
        return self.is_ready and self.call is None

    @property
    def is_late(self) -> bool:
        now = time.monotonic()
        if now > self.deadline and self._processor_until is not None and now < self._last_deadline:
            used = self._processor_time_s()
            if used is not None and used < self._processor_until:  # it has waited for a processor
                self.deadline = min(now + self._processor_until - used, self._last_deadline)
        return now > self.deadline

    def make(self, call: PoolCall) -> None:
        """Sends a call to the worker, and starts its time."""
        assert self.is_free, "the worker is busy"
        self.call, self.limit_s, self._processor_until = call, self._timeout_s, None
        now = time.monotonic()
        if call.processor_limit_s is not None:
            used = self._processor_time_s()
            self.limit_s = min(call.processor_limit_s, self._timeout_s)
            self._processor_until = None if used is None else used + self.limit_s
            self._last_deadline = now + min(10 * self.limit_s, self._timeout_s)
        self.deadline = now + self.limit_s
        self.send(call.request)

    def _processor_time_s(self) -> float | None:
        """Returns the processor time that the process has used; None where the system does not report it."""
        try:
            with open(f"/proc/{self.id}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None


class CallPool:
    """Workers that make calls, started when there is work for them and started again when they had to be ended.

    Args:
        statement: the statement that a worker runs.
        source: the first request, which a worker takes with `Caller.load`.
        count: how many workers.
        timeout_s: the limit of each call.
        loading: a description of loading for messages: "rewards: loading my_rewards.py".
    """

    def __init__(self, statement: str, source: Any, *, count: int, timeout_s: float, loading: str) -> None:
        self._statement, self._source = statement, source
        self._timeout_s, self._loading = timeout_s, loading
        self._workers: list[CallWorker | None] = [None] * count
        self._queues: list[deque[PoolCall]] = [deque() for _ in range(count + 1)]  # of each worker, and of all
        self._timeouts = Counter[Hashable]()  # of each group, one after the other
        weakref.finalize(self, end_all, self._workers)

    @property
    def is_busy(self) -> bool:
        """Whether there are calls that `receive` has not returned."""
        return any(self._queues) or any(worker and worker.call for worker in self._workers)

    def has_worker(self, place: int) -> bool:
        """Whether a worker was started in a place and has not been ended."""
        return self._workers[place] is not None

    def start(self) -> Any:
        """Starts the first worker and waits until it has loaded. Returns its report; None where a worker is there.

        Raises RecipeError with the problems that it found, ResourceError where it ends or takes too long.
        """
        if any(self._workers):
            return None
        worker = self._start(0)
        try:
            report = worker.wait_until_loaded(self._loading, worker.limit_s)
        except BaseException:
            self._end(0)
            raise
        worker.is_ready = True
        return report

    def ask(self, call: PoolCall) -> None:
        """Queues a call; its reply comes with `receive`."""
        self._queues[-1 if call.place is None else call.place].append(call)

    def forget_timeouts(self) -> None:
        """Begins a new row of calls that took too long one after the other."""
        self._timeouts.clear()

    def receive(self, longest_s: float = LONGEST_WAIT_S) -> list[Result]:
        """Returns calls with their replies, or with `Failed`; waits up to `longest_s` seconds for the first."""
        self.give_work()
        if busy := [worker for worker in self._workers if worker is not None and not worker.is_free]:
            wait_for_any(busy, min(longest_s, min(worker.deadline for worker in busy) - time.monotonic()))
        results: list[Result] = []
        for place, worker in enumerate(self._workers):
            if worker is not None and not worker.is_free:
                results += self._taken(place, worker)
        self.give_work()
        return results

    def give_work(self) -> None:
        """Gives calls to free workers, and starts workers where there is more work than others are free for."""
        for place, worker in enumerate(self._workers):
            if worker is not None and worker.is_free and worker.is_gone:
                self._end(place)  # it ended between two calls, which none of them is to blame for
                worker = None
            own, shared = self._queues[place], self._queues[-1]
            if worker is None:
                free = sum(1 for other in self._workers if other is not None and not other.call)
                if own or len(shared) > free:
                    self._start(place)
            elif worker.is_free and (queue := own or shared):
                worker.make(queue.popleft())

    def end_unready(self) -> None:
        """Ends the workers that could make no call now: they are loading, or have ended."""
        for place, worker in enumerate(self._workers):
            if worker is not None and (not worker.is_ready or worker.is_gone):
                self._end(place)

    def close(self) -> None:
        """Ends all workers, whatever they are doing. Calls that were asked have no reply."""
        end_all(self._workers)
        for queue in self._queues:
            queue.clear()

    def _start(self, place: int) -> CallWorker:
        worker = self._workers[place] = CallWorker(self._statement, self._source, self._timeout_s)
        return worker

    def _end(self, place: int) -> None:
        worker, self._workers[place] = self._workers[place], None
        if worker is not None:
            worker.end()

    def _taken(self, place: int, worker: CallWorker) -> Iterator[Result]:
        """Takes the reply of a busy worker if it is there, and yields the calls that are over."""
        call, is_gone = worker.call, worker.is_gone
        reply, failure = worker.take(), None
        if reply is None and not is_gone:
            if not worker.is_late:
                return
            failure = Failed(f"no answer within {worker.limit_s:g} s", is_late=True)
        elif (value := decoded(reply)) is None:
            failure = Failed(f"its process {worker.ending()}")
        if failure is None and call is not None:
            worker.call = None
            self._timeouts[call.group] = 0
            yield call, value
        elif failure is None and not value["problems"]:
            worker.is_ready = True
        elif call is None:
            self._end(place)
            lost = [self._queues[place]] if any(self._workers) else self._queues  # others take what all may take
            why = RecipeError(value["problems"]) if failure is None else f"{self._loading}: {failure.reason}"
            yield from _given_up(lost, f"its process could not be started again: {why}")
        elif failure is not None:
            self._end(place)
            yield call, failure
            self._timeouts[call.group] += failure.is_late
            if call.group is not None and self._timeouts[call.group] >= MOST_TIMEOUTS:
                del self._timeouts[call.group]
                reason = f"it was not called: the {MOST_TIMEOUTS} calls before took longer than {self._timeout_s:g} s"
                yield from _given_up(self._queues, reason, call.group)


def _given_up(queues: Sequence[deque[PoolCall]], reason: str, group: Hashable = None) -> Iterator[Result]:
    """Takes calls out of queues, all or those of a group, as failed."""
    for queue in queues:
        for call in [each for each in queue if group in (None, each.group)]:
            queue.remove(call)
            yield call, Failed(reason)
