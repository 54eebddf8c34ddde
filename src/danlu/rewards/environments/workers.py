"""The caller's side of processes that hold environments: each episode has its process, and each call its time.

An environment that hangs costs its process, which is ended and restarted; the other episodes that it held are repeated
there from their answers. So environments run where a user's rewards run, apart from the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from danlu.core.machine import usable_cores
from danlu.core.worker_process import LONGEST_WAIT_S
from danlu.rewards.call_pool import CallPool, Failed, PoolCall
from danlu.rewards.environments.protocol import EndEpisode, EnvironmentSource, EpisodeCall, EpisodeKey, Reply
from danlu.rewards.environments.worker import START

MOST_AUTOMATIC_WORKERS = 8

Replies = list[tuple[EpisodeKey, Reply]]


class EnvironmentWorkers:
    """Processes that hold the environments of rollouts, started when they are asked. From one thread at a time.

    Environments of one process answer one after the other; an episode begins in the process with the fewest of them.

    Args:
        count: how many; None: one for each core, at most 8.
        timeout_s: of a call: of `reset`, or of a `step`.
    """

    def __init__(self, source: EnvironmentSource, *, count: int | None = None, timeout_s: float = 60.0) -> None:
        self.count = count or min(usable_cores(), MOST_AUTOMATIC_WORKERS)
        loading = f"environment: loading {source.label}"
        self._pool = CallPool(START, source, count=self.count, timeout_s=timeout_s, loading=loading)
        self._places: dict[EpisodeKey, int] = {}  # in which process an episode is

    def start(self) -> None:
        """Starts the first process and waits until it has loaded the source; nothing where one is running.

        Raises RecipeError with its problems, ResourceError where the process ends or takes too long.
        """
        self._pool.start()

    def replies(self, calls: Sequence[EpisodeCall]) -> list[Reply]:
        """Returns the reply to each call. A call that raises, takes too long, or loses its process, has a failure.

        Raises the errors of `start`.
        """
        self._pool.forget_timeouts()
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
        self._pool.ask(PoolCall(call.key, call, place, group="episodes"))

    def receive(self, longest_s: float = LONGEST_WAIT_S) -> Replies:
        """Returns replies to calls, by the keys of their episodes; waits up to `longest_s` seconds for the first, where
        none is there.

        A call that raises, takes too long, or loses its process, has a failure.
        """
        return [
            (call.key, Reply(failure=reply.reason) if isinstance(reply, Failed) else Reply.from_json(reply))
            for call, reply in self._pool.receive(longest_s)
            if isinstance(call.request, EpisodeCall)
        ]

    def end_episode(self, key: EpisodeKey) -> None:
        """Has the environment of an episode closed, which is over."""
        if (place := self._places.pop(key, None)) is not None and self._pool.has_worker(place):
            self._pool.ask(PoolCall(key, EndEpisode(key), place, group="episodes"))
            self._pool.give_work()

    def end_episodes(self) -> None:
        """Closes all environments; a process in which that takes too long is ended."""
        self._places.clear()
        self._pool.end_unready()
        for place in range(self.count):
            if self._pool.has_worker(place):
                self._pool.ask(PoolCall(None, None, place))
        while self._pool.is_busy:
            self._pool.receive()

    def close(self) -> None:
        """Ends all processes, whatever they are doing. Their open calls have no reply."""
        self._pool.close()
        self._places.clear()
