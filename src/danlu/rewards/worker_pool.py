"""The caller's side of processes that call rewards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from danlu.core.machine import usable_cores
from danlu.rewards.call_pool import CallPool, Failed, PoolCall
from danlu.rewards.calling import Outcome, outcome_of
from danlu.rewards.function import UserFunction
from danlu.rewards.protocol import JudgedAnswer, Logged, Reward, StepRewards, Verdict
from danlu.rewards.text import LONGEST_COMPARISON_S, Mathematical
from danlu.rewards.worker import START, Call


@dataclass(frozen=True)
class Task:
    """A call to make: of which reward, with which answers, by their numbers."""

    reward: int
    numbers: tuple[int, ...]


class RewardWorkers:
    """Processes that call rewards, started when there is work for them and started again when they had to be ended.

    rewards: by the caller's numbers. with_batches: the numbers of those that are called with all answers at once, as
    `start` has found.
    """

    def __init__(self, rewards: Mapping[int, Reward], *, count: int, timeout_s: float) -> None:
        self.rewards, self._count, self._timeout_s = rewards, count, timeout_s
        files = dict.fromkeys(str(each.path) for each in rewards.values() if isinstance(each, UserFunction))
        loading = f"rewards: loading {', '.join(files) or 'them'}"
        self._pool = CallPool(START, rewards, count=count, timeout_s=timeout_s, loading=loading)
        self.with_batches: list[int] = []

    def start(self) -> None:
        """Starts the first process and waits until it has loaded users' functions; nothing where there are none, or
        where one is running.

        Raises RecipeError with the problems of all of them, ResourceError where the process ends or takes too long.
        """
        if any(isinstance(reward, UserFunction) for reward in self.rewards.values()):
            self.with_batches = self._pool.start() or self.with_batches

    def run(self, tasks: Sequence[Task], answers: Sequence[JudgedAnswer]) -> Iterator[tuple[Task, list[Outcome]]]:
        """Yields the outcomes of each task, as they come.

        A call that takes longer than `timeout_s`, or loses its process, has outcomes with the reason. A reward that
        takes batches is called by the same process each time, which may keep its loaded objects.
        """
        self._pool.forget_timeouts()
        for task in tasks:
            self._pool.ask(self._call(task, answers))
        while self._pool.is_busy:
            for call, reply in self._pool.receive():
                yield call.key, self._outcomes(call.key, reply, answers)

    def close(self) -> None:
        """Ends all processes, whatever they are doing."""
        self._pool.close()

    def _call(self, task: Task, answers: Sequence[JudgedAnswer]) -> PoolCall:
        cpu_limit_s = self._timeout_s * usable_cores() + 1.0  # more than a call can use within its time
        request = Call(task.reward, [answers[number] for number in task.numbers], cpu_limit_s)
        place = self.with_batches.index(task.reward) % self._count if task.reward in self.with_batches else None
        if isinstance(self.rewards[task.reward], Mathematical):
            return PoolCall(task, request, place, processor_limit_s=LONGEST_COMPARISON_S)
        return PoolCall(task, request, place, group=task.reward)

    def _outcomes(self, task: Task, reply: Any, answers: Sequence[JudgedAnswer]) -> list[Outcome]:
        if not isinstance(reply, Failed):
            return [_outcome(**each) for each in reply]
        reward = self.rewards[task.reward]
        if reply.is_late and isinstance(reward, Mathematical):
            return [outcome_of(reward.late(answers[number])) for number in task.numbers]
        return [Outcome(math.nan, reply.reason)] * len(task.numbers)


def _outcome(
    value: float,
    failure: str | None,
    steps: dict[str, Any] | None,
    verdict: dict[str, Any] | None,
    logged: dict[str, Any] | None,
) -> Outcome:
    """An outcome out of JSON, which has lists for tuples."""
    own = None if steps is None else StepRewards(tuple(steps["ends"]), tuple(steps["values"]))
    said = None if verdict is None else Verdict(**verdict)
    return Outcome(value, failure, own, said, None if logged is None else Logged(**logged))
