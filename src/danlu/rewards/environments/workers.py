"""The caller's side of processes that hold environments: each episode has its process, and each call its time.

An environment that hangs costs its process, which is ended and started anew; the other episodes that it held are
repeated there from their answers. So environments run where a user's rewards run, apart from the trainer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from danlu.errors import RecipeError, ResourceError
from danlu.machine import usable_cores
from danlu.rewards.environments.protocol import EnvironmentSource, EpisodeCall, Reply
from danlu.rewards.environments.worker import START
from danlu.rewards.worker_connection import WorkerConnection, end_all, wait_for_any

MOST_AUTOMATIC_WORKERS = 8
MOST_TIMEOUTS = 8
"""Calls that take too long one after the other; the others of the same turn are not made any more."""


class EnvironmentWorkers:
    """Processes that hold the environments of a rollout, started when they are asked. From one thread at a time.

    Args:
        count: how many; None: one for each core, at most 8.
        timeout_s: of a call: of `reset`, or of a `step`.
    """

    def __init__(self, source: EnvironmentSource, *, count: int | None = None, timeout_s: float = 60.0) -> None:
        self.source, self.timeout_s = source, timeout_s
        self.count = count or min(usable_cores(), MOST_AUTOMATIC_WORKERS)
        self._workers: list[WorkerConnection | None] = [None] * self.count
        self._timeouts = 0  # one after the other
        weakref.finalize(self, end_all, self._workers)

    def start(self) -> None:
        """Starts the first process and waits until it has loaded the source; nothing where one is running.

        Raises RecipeError with its problems, ResourceError where the process ends or takes too long.
        """
        if any(self._workers):
            return
        worker = self._workers[0] = self._new_worker()
        while not worker.is_ready:
            wait_for_any(self._workers)
            try:
                _take_up_loading(worker)
            except BaseException:
                self._end(0)
                raise

    def replies(self, calls: Sequence[EpisodeCall]) -> list[Reply]:
        """What comes of each call. One that raises, takes too long, or whose process ends, has a failure.

        Raises what `start` raises.
        """
        self.start()
        queues: list[deque[int]] = [deque() for _ in range(self.count)]
        for place, call in enumerate(calls):
            queues[sum(call.key) % self.count].append(place)  # the same process in each turn
        replies: dict[int, Reply] = {}
        self._timeouts = 0
        try:
            while len(replies) < len(calls):
                for number in range(self.count):
                    self._give_work(number, queues[number], calls)
                wait_for_any(self._workers)
                for number in range(self.count):
                    replies |= self._taken(number, queues[number])
                if self._timeouts >= MOST_TIMEOUTS:
                    replies |= self._given_up(queues)
        except BaseException:  # Ctrl-C, above all: what is under way would reply too late
            self.close()
            raise
        return [replies[place] for place in range(len(calls))]

    def end_episodes(self) -> None:
        """Closes all environments; a process in which that takes too long is ended."""
        for number, worker in enumerate(self._workers):
            if worker is None:
                continue
            if not worker.is_ready or worker.has_ended:
                self._end(number)
                continue
            worker.call(True, None)
        while any(worker and worker.task for worker in self._workers):
            wait_for_any(self._workers)
            for number, worker in enumerate(self._workers):
                if worker is None or not worker.task:
                    continue
                reply, ending = worker.receive(), worker.ending
                if reply is not None:
                    worker.task = None
                elif ending is not None:
                    self._end(number)

    def close(self) -> None:
        """Ends all processes, whatever they are doing."""
        end_all(self._workers)

    def _new_worker(self) -> WorkerConnection:
        return WorkerConnection(START, self.source, self.timeout_s)

    def _give_work(self, number: int, queue: deque[int], calls: Sequence[EpisodeCall]) -> None:
        worker = self._workers[number]
        if worker is not None and worker.is_ready and worker.task is None and worker.has_ended:
            self._end(number)  # it ended between two calls, which none of them is to blame for
            worker = None
        if not queue:
            return
        if worker is None:
            self._workers[number] = self._new_worker()
        elif worker.is_ready and worker.task is None:
            place = queue.popleft()
            worker.call((place,), calls[place])

    def _taken(self, number: int, queue: deque[int]) -> dict[int, Reply]:
        """What a process has replied, or that it will not, by the number of the call."""
        worker = self._workers[number]
        if worker is None:
            return {}
        if not worker.is_ready:
            try:
                _take_up_loading(worker)
            except (RecipeError, ResourceError) as error:
                self._end(number)
                lost, failure = list(queue), Reply(failure=f"its process could not be started again: {error}")
                queue.clear()
                return dict.fromkeys(lost, failure)
            return {}
        if worker.task is None:
            return {}
        (place,) = worker.task
        reply: Any
        reply, ending = worker.receive(), worker.ending
        if reply is not None:
            worker.task, self._timeouts = None, 0
            return {place: Reply.from_json(reply)}
        if ending is not None:
            self._timeouts += worker.is_late
            self._end(number)
            return {place: Reply(failure=ending)}
        return {}

    def _given_up(self, queues: Sequence[deque[int]]) -> dict[int, Reply]:
        reason = f"it was not called: the {MOST_TIMEOUTS} calls before took longer than {self.timeout_s:g} s"
        left = [place for queue in queues for place in queue]
        for queue in queues:
            queue.clear()
        return dict.fromkeys(left, Reply(failure=reason))

    def _end(self, number: int) -> None:
        worker, self._workers[number] = self._workers[number], None
        if worker is not None:
            worker.end()


def _take_up_loading(worker: WorkerConnection) -> None:
    """Reads what a process says when it has loaded the source, if it does. Raises RecipeError and ResourceError."""
    reply, ending = worker.receive(), worker.ending
    if reply is not None and reply["problems"]:
        raise RecipeError(reply["problems"])
    if reply is not None:
        worker.is_ready = True
    elif ending is not None:
        raise ResourceError(f"environment: loading it: {ending}")
