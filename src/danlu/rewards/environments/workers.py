"""The caller's side of processes that hold environments: each episode has its process, and each call its time.

An environment that hangs costs its process, which is ended and restarted; the other episodes that it held are repeated
there from their answers. So environments run where a user's rewards run, apart from the trainer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.machine import usable_cores
from danlu.rewards.environments.protocol import EndEpisode, EnvironmentSource, EpisodeCall, EpisodeKey, Reply
from danlu.rewards.environments.worker import START
from danlu.rewards.worker_connection import WorkerConnection, end_all, wait_for_any

MOST_AUTOMATIC_WORKERS = 8
MOST_TIMEOUTS = 8
"""Calls that take too long one after the other; those that wait behind them are not made any more."""
_LONGEST_WAIT_S = 0.5

Replies = list[tuple[EpisodeKey, Reply]]


class EnvironmentWorkers:
    """Processes that hold the environments of rollouts, started when they are asked. From one thread at a time.

    Environments of one process answer one after the other; an episode begins in the process with the fewest of them.

    Args:
        count: how many; None: one for each core, at most 8.
        timeout_s: of a call: of `reset`, or of a `step`.
    """

    def __init__(self, source: EnvironmentSource, *, count: int | None = None, timeout_s: float = 60.0) -> None:
        self.source, self.timeout_s = source, timeout_s
        self.count = count or min(usable_cores(), MOST_AUTOMATIC_WORKERS)
        self._workers: list[WorkerConnection | None] = [None] * self.count
        self._queues: list[deque[EpisodeCall | EndEpisode]] = [deque() for _ in range(self.count)]
        self._places: dict[EpisodeKey, int] = {}  # in which process an episode is
        self._timeouts = 0  # one after the other
        weakref.finalize(self, end_all, self._workers)

    def start(self) -> None:
        """Starts the first process and waits until it has loaded the source; nothing where one is running.

        Raises RecipeError with its problems, ResourceError where the process ends or takes too long.
        """
        if any(self._workers):
            return
        worker = self._workers[0] = self._new_worker()
        try:
            worker.wait_until_loaded(self._loading)
        except BaseException:
            self._end(0)
            raise

    def replies(self, calls: Sequence[EpisodeCall]) -> list[Reply]:
        """Returns the reply to each call. A call that raises, takes too long, or loses its process, has a failure.

        Raises the errors of `start`.
        """
        self._timeouts = 0
        replies: dict[EpisodeKey, Reply] = {}
        try:
            for call in calls:
                self.ask(call)
            while len(replies) < len(calls):
                replies |= dict(self.receive())
        except BaseException:  # Ctrl-C, above all: what is under way would reply too late
            self.close()
            raise
        return [replies[call.key] for call in calls]

    def ask(self, call: EpisodeCall) -> None:
        """Queues a call; its reply comes with `receive`. Raises the errors of `start`."""
        self.start()
        if (place := self._places.get(call.key)) is None:
            taken = list(self._places.values())
            place = self._places[call.key] = min(range(self.count), key=taken.count)
        self._queues[place].append(call)

    def receive(self, longest_s: float = _LONGEST_WAIT_S) -> Replies:
        """Returns replies to calls, by the keys of their episodes; waits up to `longest_s` seconds for the first, where
        none is there.

        A call that raises, takes too long, or loses its process, has a failure.
        """
        self._give_work()
        wait_for_any(self._workers, longest_s)
        replies: Replies = []
        for number in range(self.count):
            replies += self._taken(number)
        if self._timeouts >= MOST_TIMEOUTS:
            replies += self._given_up()
        self._give_work()
        return replies

    def end_episode(self, key: EpisodeKey) -> None:
        """Has the environment of an episode closed, which is over."""
        if (place := self._places.pop(key, None)) is not None and self._workers[place] is not None:
            self._queues[place].append(EndEpisode(key))
            self._give_work()

    def end_episodes(self) -> None:
        """Closes all environments; a process in which that takes too long is ended."""
        self._places.clear()
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
        """Ends all processes, whatever they are doing. Their open calls have no reply."""
        end_all(self._workers)
        self._places.clear()
        for queue in self._queues:
            queue.clear()

    @property
    def _loading(self) -> str:
        return f"environment: loading {self.source.label}"

    def _new_worker(self) -> WorkerConnection:
        return WorkerConnection(START, self.source, self.timeout_s)

    def _give_work(self) -> None:
        for number, queue in enumerate(self._queues):
            worker = self._workers[number]
            if worker is not None and worker.is_ready and worker.task is None and worker.has_ended:
                self._end(number)  # it ended between two calls, which none of them is to blame for
                worker = None
            if not queue:
                continue
            if worker is None:
                self._workers[number] = self._new_worker()
            elif worker.is_ready and worker.task is None:
                task = queue.popleft()
                worker.call(task, task)

    def _taken(self, number: int) -> Replies:
        """Returns the replies of a process, or failures where it will not reply."""
        worker, queue = self._workers[number], self._queues[number]
        if worker is None:
            return []
        if not worker.is_ready:
            try:
                worker.take_up_loading(self._loading)
            except (RecipeError, ResourceError) as error:
                self._end(number)
                return _failed(queue, f"its process could not be started again: {error}")
            return []
        task = worker.task
        if task is None:
            return []
        reply, ending = worker.receive(), worker.ending
        if reply is not None:
            worker.task, self._timeouts = None, 0
            return [(task.key, Reply.from_json(reply))] if isinstance(task, EpisodeCall) else []
        if ending is not None:
            self._timeouts += worker.is_late
            self._end(number)
            return _failed([task], ending)
        return []

    def _given_up(self) -> Replies:
        reason = f"it was not called: the {MOST_TIMEOUTS} calls before took longer than {self.timeout_s:g} s"
        self._timeouts = 0
        return [reply for queue in self._queues for reply in _failed(queue, reason)]

    def _end(self, number: int) -> None:
        worker, self._workers[number] = self._workers[number], None
        if worker is not None:
            worker.end()


def _failed(tasks: deque[EpisodeCall | EndEpisode] | list[EpisodeCall | EndEpisode], reason: str) -> Replies:
    """The failure of all calls among these, of which none is left."""
    replies = [(task.key, Reply(failure=reason)) for task in tasks if isinstance(task, EpisodeCall)]
    tasks.clear()
    return replies
