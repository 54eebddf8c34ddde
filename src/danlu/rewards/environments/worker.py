"""A process that holds environments for another: code that may hang, crash or print is kept apart from training.

Requests are the source of the environments first, then an `EpisodeCall` at a time, an `EndEpisode`, or None at the end
of all episodes. Replies are JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from danlu.core.worker_process import Caller
from danlu.environment import Done, Environment, Turn
from danlu.rewards.calling import as_number, awaited, failure_reason
from danlu.rewards.environments.protocol import EndEpisode, EpisodeCall, EpisodeKey, Reply, TurnText

START = "from danlu.rewards.environments.worker import serve; serve()"


def serve() -> None:
    """The loop of a process, which ends when its input does."""
    caller = Caller()
    episodes = Episodes(caller.load(lambda source: source.load()))
    while True:
        call: EpisodeCall | EndEpisode | None = caller.receive()
        reply: dict[str, Any] = {}
        match call:
            case EpisodeCall():
                reply = episodes.reply(call).as_json()
            case EndEpisode(key):
                episodes.end(key)
            case None:
                episodes.close()
        caller.reply(reply)


@dataclass
class _Episode:
    environment: Environment
    replies: list[Reply] = field(default_factory=list)


class Episodes:
    """The episodes of a process. make: an environment."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._episodes: dict[EpisodeKey, _Episode] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def reply(self, call: EpisodeCall) -> Reply:
        """The reply to the last answer of a call. An episode that is not here is begun, and repeated up to it."""
        try:
            episode = self._episodes.get(call.key)
            if episode is None or tuple(episode.replies) != call.replies:
                episode = self._begin(call)
            if call.answers:
                self._step(episode, call.answers[-1])
            return episode.replies[-1]
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # sys.exit in a user's class too
            self._episodes.pop(call.key, None)
            return Reply(failure=failure_reason(error))

    def end(self, key: EpisodeKey) -> None:
        """Ends an episode, if it is here."""
        episode = self._episodes.pop(key, None)
        close = None if episode is None else getattr(episode.environment, "close", None)
        if callable(close):
            try:
                self._result(close())
            except Exception as error:
                sys.stderr.write(f"closing an environment: {failure_reason(error)}\n")

    def close(self) -> None:
        """Ends all episodes."""
        for key in list(self._episodes):
            self.end(key)

    def _begin(self, call: EpisodeCall) -> _Episode:
        episode = self._episodes[call.key] = _Episode(self._make())
        reset = episode.environment.reset
        seed = {"seed": call.seed} if "seed" in inspect.signature(reset).parameters else {}
        first = self._result(reset(dict(call.row), **seed))
        if first is not None and not isinstance(first, str):
            raise TypeError(f"reset returns a text or None, and gave {type(first).__name__}: {first!r}")
        episode.replies.append(Reply((TurnText(first),) if first else ()))
        for answer in call.answers[:-1]:
            self._step(episode, answer)
        if call.answers and tuple(episode.replies) != call.replies:
            raise RuntimeError(
                "its process had to be ended for another episode, or the run went on from a checkpoint, and "
                "repeated it says something else: an environment follows from its row, its seed and the answers"
            )
        return episode

    def _step(self, episode: _Episode, answer: str) -> None:
        result = self._result(episode.environment.step(answer))
        errors = getattr(episode.environment, "errors", 0)
        episode.replies.append(as_reply(result, errors if isinstance(errors, int) else 0))

    def _result(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(awaited(value))


def as_reply(result: Any, errors: int = 0) -> Reply:
    """Converts the result of `step` to a reply. Raises TypeError or ValueError for anything else."""
    if isinstance(result, Done):
        return Reply(reward=_number(result.reward), done=True, errors=errors)
    turns: Sequence[Any] = [result] if isinstance(result, Turn) else result
    if not isinstance(turns, list | tuple) or not turns or not all(isinstance(turn, Turn) for turn in turns):
        raise TypeError(f"step returns a Turn, several of them or Done, and gave {type(result).__name__}: {result!r}")
    rewards = [number for turn in turns if (number := _number(turn.reward)) is not None]
    for turn in turns:
        if not isinstance(turn.text, str) or turn.role not in ("user", "tool"):
            raise TypeError(f"a Turn has a text and the role user or tool: {turn!r}")
    texts = tuple(TurnText(turn.text, turn.role, turn.name) for turn in turns)
    return Reply(texts, sum(rewards) if rewards else None, errors=errors)


def _number(reward: Any) -> float | None:
    return None if reward is None else as_number(reward, "a reward is a number or None, and not")
