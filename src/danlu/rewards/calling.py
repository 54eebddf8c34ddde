"""Calling a reward so that nothing it does costs another answer its number: outcomes, and why there is no number."""

from __future__ import annotations

import math
import sysconfig
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from danlu.core.errors import DanluError
from danlu.rewards.protocol import Explains, JudgedAnswer, Logged, Logs, Reward, StepRewards, Verdict

PACKAGE = str(Path(__file__).resolve().parents[1])
ASYNCIO = str(Path(sysconfig.get_path("stdlib")) / "asyncio")
LONGEST_REASON = 500
"""The most characters of an exception's message; some print whole tensors."""
LARGEST = 3.4028234e38
"""The largest number in float32, in which rewards are trained on and logged."""
GAVE_NONE = "it gave None"
"""The reason for no number where a reward cannot judge an answer, which is no failure."""


@dataclass(frozen=True)
class Outcome:
    """A reward for one answer: a number, or NaN and the reason for it."""

    value: float
    """The reward; the sum of the steps' rewards where there are steps."""
    failure: str | None = None
    steps: StepRewards | None = None
    verdict: Verdict | None = None
    """How it came about, of a reward that says so."""
    logged: Logged | None = None

    @property
    def declined(self) -> bool:
        """Whether the reward gave None: its part is left out of the answer's sum, and the answer is not."""
        return self.failure == GAVE_NONE


def outcome_of(value: float | StepRewards | Verdict | None) -> Outcome:
    """Turns a reward's result into an outcome: None, NaN and values that are infinite in float32 are no numbers."""
    if isinstance(value, Verdict):
        return replace(outcome_of(value.value), verdict=value)
    if value is None:
        return Outcome(math.nan, GAVE_NONE)
    if isinstance(value, StepRewards):
        failures = [outcome_of(each).failure for each in value.values]
        if first := next((failure for failure in failures if failure is not None), None):
            return Outcome(math.nan, f"{first} for a step")
        total = outcome_of(sum(value.values))
        return total if total.failure is not None else Outcome(total.value, steps=value)
    number = float(value)
    if abs(number) <= LARGEST:
        return Outcome(number)
    why = ", more than float32 holds" if math.isfinite(number) else ""
    return Outcome(math.nan, f"it gave {number:g}{why}")


def call_on_each(reward: Reward, answers: Sequence[JudgedAnswer]) -> list[Outcome]:
    """A call for each answer: one that raises costs only its own answer."""
    return [call_on_batch(reward, [answer])[0] for answer in answers]


def call_on_batch(reward: Reward, answers: Sequence[JudgedAnswer]) -> list[Outcome]:
    """One call for all answers: if it raises, none of them has a number."""
    try:
        given = reward.verdicts(answers) if isinstance(reward, Explains) else reward(answers)
        outcomes = [outcome_of(value) for value in given]
        if len(outcomes) != len(answers):
            raise ValueError(f"{len(outcomes)} rewards for {len(answers)} answers")
        if isinstance(reward, Logs):
            logged = reward.take_logged(len(answers))
            outcomes = [replace(outcome, logged=each) for outcome, each in zip(outcomes, logged, strict=True)]
        return outcomes
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # sys.exit in a user's function too
        return [Outcome(math.nan, failure_reason(error))] * len(answers)


def decided_at_once(decide: Callable[[JudgedAnswer], Verdict | None], answer: JudgedAnswer) -> Outcome | None:
    """The outcome of an answer that can be judged without a process of its own; None where it needs one."""
    try:
        verdict = decide(answer)
    except Exception as error:  # it costs its own answer alone
        return Outcome(math.nan, failure_reason(error))
    return None if verdict is None else outcome_of(verdict)


class ThreadedCalls:
    """Calls for each answer from several threads, for rewards that wait for something else: a server, a program.

    The threads are daemons: a program that is interrupted does not wait for them. After `most_failures` one after the
    other no more calls are begun; None: however many fail.
    """

    def __init__(
        self, reward: Reward, answers: Sequence[JudgedAnswer], threads: int, most_failures: int | None = None
    ) -> None:
        self._reward, self._answers = reward, answers
        self._most_failures, self._failures = most_failures, 0
        not_called = Outcome(math.nan, f"it was not called: the {most_failures} calls before failed")
        self._outcomes = [not_called] * len(answers)
        self._waiting = deque(range(len(answers)))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(threads, len(answers)))]
        for thread in self._threads:
            thread.start()

    def outcomes(self) -> list[Outcome]:
        """Those of all answers, in order, when the last has come."""
        for thread in self._threads:
            thread.join()
        return self._outcomes

    def cancel(self) -> None:
        """Begins no further call."""
        self._waiting.clear()

    def _work(self) -> None:
        while True:
            try:
                number = self._waiting.popleft()
            except IndexError:
                return
            (outcome,) = call_on_batch(self._reward, [self._answers[number]])
            self._outcomes[number] = outcome
            self._failures = self._failures + 1 if outcome.failure is not None else 0
            if self._most_failures is not None and self._failures >= self._most_failures:
                self.cancel()


async def awaited(value: Any) -> Any:
    """Returns the result of an awaitable of any kind, for asyncio.run."""
    return await value


def as_number(value: Any, expected: str) -> float:
    """Converts a value to a reward.

    Raises ValueError for a number that float32 does not hold, and TypeError for no number: "`expected` str: 'good'".
    """
    if not (isinstance(value, bool | int | float) or hasattr(value, "__float__")):
        raise TypeError(f"{expected} {type(value).__name__}: {value!r}")
    number = float(value)
    if not (math.isfinite(number) and abs(number) <= LARGEST):
        raise ValueError(f"its reward is {number:g}")
    return number


def failure_reason(error: BaseException) -> str:
    """Returns an exception's message, and the line of the file that is to blame: "ValueError: no digits
    (my_rewards.py:12)".

    The line is the deepest in the first file that is neither danlu's nor asyncio's: where a function calls numpy, and
    that raises, the line with the call.
    """
    if isinstance(error, DanluError):
        return str(error)
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    said = type(error).__name__ + (f": {message[:LONGEST_REASON]}" if message else "")
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((PACKAGE, ASYNCIO))]
    of_file = [frame for frame in outside if frame.filename == outside[0].filename] or list(frames)
    if isinstance(error, SyntaxError) or not of_file:  # which says the line itself
        return said
    return f"{said} ({Path(of_file[-1].filename).name}:{of_file[-1].lineno})"
