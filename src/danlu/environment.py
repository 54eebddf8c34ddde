"""Environments for stage rl, which answer the policy. A file of a user's imports `Turn` and `Done` from here.

from danlu.environment import Done, Turn

class Guess:
    def reset(self, row):
        self.number, self.left = row["number"], 5

    def step(self, answer):
        self.left -= 1
        if answer.strip() == str(self.number):
            return Done(1.0)
        return Turn("another number") if self.left else Done(0.0)
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

TurnRole = Literal["user", "tool"]


@dataclass(frozen=True)
class Turn:
    """The environment's reply to an answer; the policy goes on behind it."""

    text: str
    role: TurnRole = "user"
    """The role of the reply, for the chat template."""
    reward: float | None = None
    """The reward earned so far by the answer. The rewards of an episode are added up."""
    name: str | None = None
    """The name of a tool, for templates that write it."""


@dataclass(frozen=True)
class Done:
    """The episode is over."""

    reward: float | None = None
    """The reward of the last answer.

    None where there is none: without a reward of an earlier turn the episode then has none.
    """


Step = Turn | Sequence[Turn] | Done
"""The result of an answer."""


class Environment(Protocol):
    """One episode: an object is made for each answer to a prompt, and asked in turn. Methods may be `async`.

    `reset` may have a parameter `seed`, a number that all answers to a prompt have in common. A method `close`, where
    there is one, is called at the end.
    """

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begins with the columns of a row. The returned text stands behind the last message of the row's prompt."""

    def step(self, answer: str) -> Step | Awaitable[Step]:
        """Returns the environment's reply to an answer."""
