"""Rewards of many answers at once, where one that fails does not stop the others.

The place of a call follows from the reward's kind. Comparing texts and numbers cannot hang, and is done at once. A
user's function, a user's regular expression and the comparison of formulas can, and are called in worker processes. A
judge and tests of programs wait for somebody else within limits of their own, in threads. A reward model is called with
everything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from danlu.core.errors import DataError
from danlu.core.machine import usable_cores
from danlu.rewards.calling import Outcome, ThreadedCalls, call_on_batch, call_on_each, decided_at_once
from danlu.rewards.code import Code
from danlu.rewards.function import UserFunction
from danlu.rewards.judge import Judge, prompt_text
from danlu.rewards.protocol import JudgedAnswer, Logged, Reward, StepRewards, Verdict
from danlu.rewards.text import Exact, Length, Mathematical, Numeric, Pattern
from danlu.rewards.worker_pool import RewardWorkers, Task

MOST_AUTOMATIC_WORKERS = 8
MOST_JUDGE_FAILURES = 16


@dataclass(frozen=True)
class RewardPart:
    """A reward, its name in logs, and its weight in the sum."""

    name: str
    reward: Reward
    weight: float = 1.0


@dataclass(frozen=True)
class RewardFailure:
    """A reward that has no number for an answer, and the reason."""

    reward: str
    """The name of the part."""
    answer: int
    """Its number among those that were scored."""
    reason: str
    declined: bool = False
    """Whether the reward gave None, which leaves out its part of the sum and not the answer."""

    def __str__(self) -> str:
        return f"reward {self.reward}, answer {self.answer}: {self.reason}"


@dataclass(frozen=True)
class RewardTable:
    """The values of each reward for each answer, before weights."""

    values: np.ndarray
    """[M answers, R rewards] float64, NaN where a reward was not given."""
    failures: list[RewardFailure]
    """One for each NaN, by reward and answer."""
    steps: dict[tuple[int, int], StepRewards] = field(default_factory=dict)
    """The rewards of steps by (answer, reward); the number is their sum."""
    verdicts: dict[tuple[int, int], Verdict] = field(default_factory=dict)
    """The verdicts by (answer, reward), for rewards that explain their numbers."""

    logged: dict[tuple[int, int], Logged] = field(default_factory=dict)
    """The values that users' functions log, by (answer, reward)."""

    @property
    def metrics(self) -> dict[tuple[int, str], float]:
        """The metrics that users' functions log, by (reward, name), each the mean over their calls."""
        values: dict[tuple[int, str], list[float]] = {}
        for (_, reward), logged in self.logged.items():
            for name, value in logged.metrics.items():
                values.setdefault((reward, name), []).append(value)
        return {key: sum(several) / len(several) for key, several in values.items()}

    @property
    def late(self) -> np.ndarray:
        """[R] int: the answers that each reward took too long to compare, and gave 0."""
        counts: np.ndarray = np.zeros(self.values.shape[1], dtype=int)
        for (_, reward), verdict in self.verdicts.items():
            counts[reward] += verdict.is_late
        return counts

    @property
    def unjudged(self) -> np.ndarray:
        """[M] bool: the answers that have no sum: some reward failed, or none has a number."""
        missing: np.ndarray = np.isnan(self.values).all(axis=1)
        missing[[failure.answer for failure in self.failures if not failure.declined]] = True
        return missing


class RewardRunner:
    """Calls rewards. Use as a context manager, or `close` it: it has processes. From one thread at a time.

    Args:
        timeout_s: of a call in a worker process: with one answer, or of a function that takes `completions` with all.
        workers: how many processes; None: one for each core, at most 8. They start when there is work for them.
    """

    def __init__(self, parts: Sequence[RewardPart], *, timeout_s: float = 60.0, workers: int | None = None) -> None:
        self.parts, self.timeout_s = tuple(parts), timeout_s
        self.workers = workers or min(usable_cores(), MOST_AUTOMATIC_WORKERS)
        # A user's function, a regular expression and formulas may hang: they can take exponential time.
        rewards = {
            number: part.reward
            for number, part in enumerate(parts)
            if isinstance(part.reward, UserFunction | Pattern | Mathematical)
        }
        self._workers = RewardWorkers(rewards, count=self.workers, timeout_s=timeout_s)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts a worker process where one is needed, which `score` does too.

        Raises RecipeError with the faults of users' functions: a file that raises, a name that is not there.
        """
        self._workers.start()

    def score(self, answers: Sequence[JudgedAnswer]) -> RewardTable:
        """Computes every reward of every answer.

        A reward that raises, takes too long, returns None, NaN or an infinity, or loses its process, is NaN for the
        answers of that call, with the reason for each. All other numbers are the same as without it.

        Raises DataError for a row with a test that the empty program passes, when it is first drawn.
        """
        with self._lock, self._ending_on_error():
            self.start()
            self._check_tests(answers)
            threaded = self._begin_threads(answers)
            try:
                outcomes = self._score_here(answers, threaded) | self._score_in_workers(answers)
                outcomes |= {number: calls.outcomes() for number, calls in threaded.items()}
            finally:
                for calls in threaded.values():
                    calls.cancel()
        return self._table(outcomes, len(answers))

    def close(self) -> None:
        """Ends the worker processes; a later `score` starts them again."""
        self._workers.close()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        """Ends the processes when something stops the scoring: Ctrl-C, above all. Their replies would come too late."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _check_tests(self, answers: Sequence[JudgedAnswer]) -> None:
        """Raises DataError for the first row that tests nothing."""
        codes = [(part.name, part.reward) for part in self.parts if isinstance(part.reward, Code)]
        for name, reward in codes:
            for answer in (each for each in answers if reward.column in each.row):  # else it fails for itself
                try:
                    reward.check_row(answer.row, runs=True)
                except DataError as error:
                    raise DataError(f"reward {name}, prompt {prompt_text(answer.prompt)!r:.80}: {error}") from None

    def _begin_threads(self, answers: Sequence[JudgedAnswer]) -> dict[int, ThreadedCalls]:
        """The calls that wait for others, by the number of the part, begun."""
        return {
            number: ThreadedCalls(part.reward, answers, threads, _most_failures(part.reward))
            for number, part in enumerate(self.parts)
            if (threads := _threads_of(part.reward))
        }

    def _score_here(
        self, answers: Sequence[JudgedAnswer], threaded: dict[int, ThreadedCalls]
    ) -> dict[int, list[Outcome]]:
        """Returns the outcomes of rewards called in this thread, by the number of the part."""
        outcomes = {}
        for number, part in enumerate(self.parts):
            if number not in threaded and number not in self._workers.rewards:
                call = call_on_each if isinstance(part.reward, Exact | Numeric | Length) else call_on_batch
                outcomes[number] = call(part.reward, answers)
        return outcomes

    def _score_in_workers(self, answers: Sequence[JudgedAnswer]) -> dict[int, list[Outcome]]:
        """Returns the outcomes of rewards called in worker processes, by the number of the part."""
        tasks: list[Task] = []
        outcomes = {number: [Outcome(np.nan)] * len(answers) for number in self._workers.rewards}
        for number, reward in self._workers.rewards.items():
            if number in self._workers.with_batches:  # first: the longest
                tasks.insert(0, Task(number, tuple(range(len(answers)))))
                continue
            for place, answer in enumerate(answers):
                decided = decided_at_once(reward.decide, answer) if isinstance(reward, Mathematical) else None
                if decided is None:
                    tasks.append(Task(number, (place,)))
                else:
                    outcomes[number][place] = decided
        for task, of_task in self._workers.run(tasks, answers) if answers else ():
            for place, outcome in zip(task.numbers, of_task, strict=True):
                outcomes[task.reward][place] = outcome
        return outcomes

    def _table(self, outcomes: dict[int, list[Outcome]], count: int) -> RewardTable:
        table = RewardTable(np.full((count, len(self.parts)), np.nan), [])
        for number, part in enumerate(self.parts):
            for answer, outcome in enumerate(outcomes[number]):
                table.values[answer, number] = outcome.value
                if outcome.failure is not None:
                    table.failures.append(RewardFailure(part.name, answer, outcome.failure, outcome.declined))
                if outcome.steps is not None:
                    table.steps[answer, number] = outcome.steps
                if outcome.verdict is not None:
                    table.verdicts[answer, number] = outcome.verdict
                if outcome.logged is not None and (outcome.logged.extra or outcome.logged.metrics):
                    table.logged[answer, number] = outcome.logged
        return table


def _threads_of(reward: Reward) -> int:
    """How many of its calls are made at a time where they wait for others; 0 for rewards that compute."""
    match reward:
        case Code():
            return reward.processes
        case Judge():
            return reward.connections
        case _:
            return 0


def _most_failures(reward: Reward) -> int | None:
    """Returns the number of consecutive failures after which a reward is not called any more: its server is gone, or no
    judge.
    """
    return MOST_JUDGE_FAILURES + reward.connections if isinstance(reward, Judge) else None
