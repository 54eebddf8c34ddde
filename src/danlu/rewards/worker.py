"""A process that calls rewards for another: code that may hang, crash or print is kept apart from training. No torch
here.

Requests are pickles: the rewards first, then a `Call` at a time. Replies are lines of JSON, so nothing that a reward
leaves behind in this process can become anything but numbers and texts.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from danlu.core.errors import RecipeError
from danlu.core.worker_process import end_with_the_caller, take_over_pipes
from danlu.rewards import symbolic
from danlu.rewards.calling import Outcome, call_on_batch
from danlu.rewards.function import UserFunction
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is interrupted is the caller, who ends this one
    requests, replies = take_over_pipes()
    end_with_the_caller(requests, _end_group)
    rewards = _load(pickle.load(requests), replies)  # noqa: S301  # from the process that started this one
    while True:
        try:
            call: Call = pickle.load(requests)  # noqa: S301
        except EOFError:
            _end_group()
        with _cpu_limit(call.cpu_limit_s):
            outcomes = call_on_batch(rewards[call.reward], call.answers)
        _reply(replies, [_as_json(each) for each in outcomes])


def _as_json(outcome: Outcome) -> list[Any]:
    steps, verdict = outcome.steps, outcome.verdict
    return [
        outcome.value,
        outcome.failure,
        None if steps is None else [steps.ends, steps.values],
        None if verdict is None else asdict(verdict),
    ]


def _load(rewards: Sequence[Reward], replies: BinaryIO) -> list[Reward]:
    """The rewards, ready to be called. Replies with the problems, and with which of them take batches."""
    loaded, problems, takes_batch = list[Reward](), list[str](), list[bool]()
    for reward in rewards:
        try:
            if isinstance(reward, UserFunction):
                function = reward.load()
                takes_batch.append(function.takes_batch)
                loaded.append(function)
            else:
                if isinstance(reward, Mathematical):
                    symbolic.prepare()
                takes_batch.append(False)
                loaded.append(reward)
        except RecipeError as error:
            problems += error.problems
        except ImportError as error:
            problems.append(f"rewards: kind math needs the package math-verify, which cannot be loaded: {error}")
    _reply(replies, {"problems": problems, "takes_batch": takes_batch})
    return loaded


def _reply(replies: BinaryIO, value: Any) -> None:
    try:
        replies.write(json.dumps(value).encode() + b"\n")
        replies.flush()
    except BrokenPipeError:
        _end_group()


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


def _end_group() -> None:
    """Ends this process, and any process that a reward has started in it: it leads a group of its own."""
    os.killpg(0, signal.SIGKILL)
