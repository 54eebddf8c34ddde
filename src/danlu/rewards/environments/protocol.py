"""Requests to a process that holds environments, and its replies. No torch here.

A call has the whole history of its episode. So a restarted process continues an episode by repeating it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from danlu.environment import Environment

EpisodeKey = tuple[int, int]
"""The number of the request and of the sample."""


@dataclass(frozen=True)
class TurnText:
    """A message of an environment."""

    text: str
    role: str = "user"
    name: str | None = None


@dataclass(frozen=True)
class Reply:
    """The reply of an environment to an answer, or to the row with which it began."""

    turns: tuple[TurnText, ...] = ()
    reward: float | None = None
    done: bool = False
    failure: str | None = None
    """The reason for no reply: the environment raised, took too long, or returned no valid reply."""
    errors: int = 0
    """Calls of tools that could not be made, or that raised."""

    def as_json(self) -> dict[str, Any]:
        """Returns the reply as an object for a line of JSON."""
        return {**vars(self), "turns": [[turn.text, turn.role, turn.name] for turn in self.turns]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Reply:
        """Reads the reply from the object that `as_json` returned."""
        return cls(**{**value, "turns": tuple(TurnText(*turn) for turn in value["turns"])})


@dataclass(frozen=True)
class EpisodeCall:
    """A request to an episode: its reply to the last answer, or to the row where there is no answer yet."""

    key: EpisodeKey
    row: Mapping[str, Any]
    seed: int
    answers: tuple[str, ...] = ()
    replies: tuple[Reply, ...] = ()
    """The replies to the row and to all answers but the last."""


@dataclass(frozen=True)
class EndEpisode:
    """Has the environment of an episode closed, which is over."""

    key: EpisodeKey


class EnvironmentSource(Protocol):
    """Makes environments, in the process that it was sent to."""

    @property
    def label(self) -> str: ...  # its name in messages

    def load(self) -> Callable[[], Environment]: ...  # Raises RecipeError for what cannot be run.
