"""The caller's side of processes that call rewards: calls are dealt, timed, and processes that hang or crash replaced.

One thread does it all, over pipes that never block: whatever a process does, the caller goes on when the time is up.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.machine import usable_cores
from danlu.rewards.calling import Outcome, outcome_of
from danlu.rewards.function import UserFunction
from danlu.rewards.protocol import JudgedAnswer, Reward, StepRewards, Verdict
from danlu.rewards.text import LONGEST_COMPARISON_S, Mathematical
from danlu.rewards.worker import START, Call
from danlu.rewards.worker_connection import WorkerConnection, end_all, wait_for_any

MOST_TIMEOUTS = 8
"""Calls of a reward that take too long one after the other; its others of the same answers are not made any more."""


@dataclass(frozen=True)
class Task:
    """A call to make: of which reward, with which answers, by their numbers."""

    reward: int
    numbers: tuple[int, ...]

    def failed(self, reason: str) -> tuple[Task, list[Outcome]]:
        """The task with an outcome for each of its answers that says why there is no number."""
        return self, [Outcome(math.nan, reason)] * len(self.numbers)


def _outcome(
    value: float | None,
    failure: str | None,
    steps: tuple[list[int], list[float]] | None,
    verdict: Mapping[str, Any] | None,
) -> Outcome:
    """An outcome out of a line of JSON."""
    own = None if steps is None else StepRewards(tuple(steps[0]), tuple(steps[1]))
    explained = None if verdict is None else Verdict(**verdict)
    return Outcome(math.nan if value is None else value, failure, own, explained)


class RewardWorkers:
    """Processes that call rewards, started when there is work for them and started again when they had to be ended."""

    def __init__(self, rewards: Sequence[Reward], *, count: int, timeout_s: float) -> None:
        self._rewards = list(rewards)
        self._timeout_s = timeout_s
        self._workers: list[WorkerConnection | None] = [None] * count
        self._takes_batch: list[bool] | None = None
        weakref.finalize(self, end_all, self._workers)

    def start(self) -> None:
        """Starts the first process and waits until it has loaded all rewards; nothing where one is running.

        Raises RecipeError with the problems of all of them, ResourceError where the process ends or takes too long.
        """
        if any(self._workers):
            return
        if not any(isinstance(reward, UserFunction) for reward in self._rewards):
            self._takes_batch = [False] * len(self._rewards)  # a process starts when there is work for it
            return
        worker = self._workers[0] = WorkerConnection(START, self._rewards, self._timeout_s)
        try:
            self._takes_batch = worker.wait_until_loaded(self._loading)["takes_batch"]
        except BaseException:
            self._end(0)
            raise

    def takes_batch(self, reward: int) -> bool:
        """Whether a reward is to be called with all answers at once."""
        assert self._takes_batch is not None, "the workers were not started"
        return self._takes_batch[reward]

    def run(self, tasks: Sequence[Task], answers: Sequence[JudgedAnswer]) -> Iterator[tuple[Task, list[Outcome]]]:
        """Yields the outcomes of each task, as they come.

        A call that takes longer than `timeout_s`, or loses its process, has outcomes with the reason. A reward that
        takes batches is called by the same process each time, which may keep its loaded objects.
        """
        count = len(self._workers)
        queues: list[deque[Task]] = [deque() for _ in range(count + 1)]  # of each process, and of all
        for task in tasks:
            queues[task.reward % count if self.takes_batch(task.reward) else count].append(task)
        timeouts = Counter[int]()
        while any(queues) or any(worker and worker.task for worker in self._workers):
            for number in range(count):
                self._give_work(number, queues, answers)
            wait_for_any(self._workers)
            for number in range(count):
                yield from self._results(number, queues, timeouts, answers)

    def close(self) -> None:
        """Ends all processes, whatever they are doing."""
        end_all(self._workers)

    def _give_work(self, number: int, queues: list[deque[Task]], answers: Sequence[JudgedAnswer]) -> None:
        """Starts a process if there is more work than others are free for, and gives it a task if it is free."""
        worker = self._workers[number]
        if worker is not None and worker.is_ready and not worker.task and worker.has_ended:
            self._end(number)  # it ended between two calls, which none of them is to blame for
            worker = None
        queue = queues[number] or queues[-1]
        if not queue:
            return
        if worker is None:
            free = sum(1 for other in self._workers if other is not None and not other.task)
            if queues[number] or len(queues[-1]) > free:
                self._workers[number] = WorkerConnection(START, self._rewards, self._timeout_s)
        elif worker.is_ready and not worker.task:
            task = queue.popleft()
            cpu_limit_s = self._timeout_s * usable_cores() + 1.0  # more than a call can use within its time
            reward = self._rewards[task.reward]
            limit_s = LONGEST_COMPARISON_S if isinstance(reward, Mathematical) else None
            worker.call(task, Call(task.reward, [answers[index] for index in task.numbers], cpu_limit_s), limit_s)

    def _results(
        self, number: int, queues: list[deque[Task]], timeouts: Counter[int], answers: Sequence[JudgedAnswer]
    ) -> Iterator[tuple[Task, list[Outcome]]]:
        """Yields the replies of a process, or failures where it will not reply."""
        worker = self._workers[number]
        if worker is None:
            return
        if not worker.is_ready:
            try:
                worker.take_up_loading(self._loading)
            except (RecipeError, ResourceError) as error:
                self._end(number)
                lost = [queues[number]] if any(self._workers) else queues  # others take what all may take
                yield from _given_up(lost, f"its process could not be started again: {error}")
            return
        task = worker.task
        if task is None:
            return
        reply, ending = worker.receive(), worker.ending
        if reply is not None:
            worker.task = None
            timeouts[task.reward] = 0
            yield task, [_outcome(*each) for each in reply]
        elif ending is not None and worker.is_late and isinstance(reward := self._rewards[task.reward], Mathematical):
            self._end(number)
            yield task, [outcome_of(reward.late(answers[answer])) for answer in task.numbers]
        elif ending is not None:
            timeouts[task.reward] += worker.is_late
            self._end(number)
            yield task.failed(ending)
            if timeouts[task.reward] >= MOST_TIMEOUTS:
                reason = f"it was not called: the {MOST_TIMEOUTS} calls before took longer than {self._timeout_s:g} s"
                yield from _given_up(queues, reason, task.reward)

    @property
    def _loading(self) -> str:
        files = dict.fromkeys(str(each.path) for each in self._rewards if isinstance(each, UserFunction))
        return f"rewards: loading {', '.join(files) or 'them'}"

    def _end(self, number: int) -> None:
        worker, self._workers[number] = self._workers[number], None
        if worker is not None:
            worker.end()


def _given_up(
    queues: Sequence[deque[Task]], reason: str, reward: int | None = None
) -> Iterator[tuple[Task, list[Outcome]]]:
    """Takes the tasks out of queues, all or those of a reward, with outcomes that say why."""
    for queue in queues:
        tasks = [task for task in queue if reward in (None, task.reward)]
        for task in tasks:
            queue.remove(task)
            yield task.failed(reason)
