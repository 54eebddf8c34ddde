"""A process that calls rewards for another: code that may hang, crash or print is kept apart from training. No torch
here.

Requests are the rewards first, then a `Call` at a time. Replies are JSON, so nothing that a reward leaves behind in
this process can become anything but numbers and texts.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from danlu.core.errors import RecipeError
from danlu.core.worker_process import Caller
from danlu.rewards import symbolic
from danlu.rewards.calling import call_on_batch
from danlu.rewards.function import FunctionReward, UserFunction
from danlu.rewards.protocol import JudgedAnswer, Reward
from danlu.rewards.text import Mathematical

START = "from danlu.rewards.worker import serve; serve()"


@dataclass(frozen=True)
class Call:
    """A request to a process: the values of a reward for these answers, in one call."""

    reward: int
    """Its number among those that the process was given."""
    answers: Sequence[JudgedAnswer]
    cpu_limit_s: float
    """The processor time after which the system ends the process, in case nobody is left to end it."""


def serve() -> None:
    """The loop of a process, which ends when its input does."""
    caller = Caller()
    rewards = caller.load(_load, report=_with_batches)
    while True:
        call: Call = caller.receive()
        with _cpu_limit(call.cpu_limit_s):
            outcomes = call_on_batch(rewards[call.reward], call.answers)
        caller.reply([asdict(each) for each in outcomes])


def _load(rewards: Mapping[int, Reward]) -> dict[int, Reward]:
    """The rewards, ready to be called. Raises RecipeError with the problems of all of them."""
    loaded, problems = dict[int, Reward](), list[str]()
    for number, reward in rewards.items():
        try:
            if isinstance(reward, Mathematical):
                symbolic.prepare()
            loaded[number] = reward.load() if isinstance(reward, UserFunction) else reward
        except RecipeError as error:
            problems += error.problems
        except ImportError as error:
            problems.append(f"rewards: kind math needs the package math-verify, which cannot be loaded: {error}")
    if problems:
        raise RecipeError(problems)
    return loaded


def _with_batches(rewards: Mapping[int, Reward]) -> list[int]:
    """The numbers of the rewards that take many answers at once."""
    return [number for number, each in rewards.items() if isinstance(each, FunctionReward) and each.takes_batch]


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Any:
    """The caller ends a process that hangs. If it is gone, and this one stuck inside of C, only the system can."""
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
