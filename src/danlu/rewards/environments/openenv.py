"""Environments of OpenEnv's servers, over the generic client of the package `openenv-core`.

An episode is a session of a server. Answers become its actions, and its observations become text, as the recipe says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from danlu.environment import Done, Environment, Turn

ANSWER = "{answer}"
"""The placeholder of the answer in the texts of an action."""
_SEEDS = 1 << 31
"""Environments hand their seeds to generators that take 32 bits."""


@dataclass(frozen=True)
class OpenEnvServer:
    """An `EnvironmentSource`: sessions of the server at a URL.

    Args:
        action: the fields of an action; None: an answer is the action, as a JSON object.
        observation: the field that the policy sees, with dots between keys; None: all of them, as JSON.
        reset: parameters of `reset`, and the columns that they are from.
        timeout_s: the limit of a message.
    """

    url: str
    action: Mapping[str, Any] | None
    observation: str | None
    reset: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 60.0

    @property
    def label(self) -> str:
        return self.url

    def load(self) -> Callable[[], Environment]:
        """Returns a function that makes sessions."""
        from openenv.core import GenericEnvClient

        def connect() -> Any:
            # The wrapper's own thread answers pings, while the policy draws and nobody calls.
            return GenericEnvClient(base_url=self.url, message_timeout_s=self.timeout_s).sync()

        return lambda: OpenEnvEpisode(connect(), self)


class OpenEnvEpisode:
    """An `Environment`: a session. client: a `SyncEnvClient`."""

    def __init__(self, client: Any, server: OpenEnvServer) -> None:
        self._client, self._server = client, server
        self.errors = 0
        """1 where the last answer was no action."""

    def reset(self, row: Mapping[str, Any], seed: int = 0) -> str | None:
        """Begins with the columns that the recipe names. Returns the first observation."""
        missing = [column for column in self._server.reset.values() if column not in row]
        if missing:
            raise KeyError(f"environment.reset: the row has no column {missing[0]!r}; it has {', '.join(row)}")
        given = {name: row[column] for name, column in self._server.reset.items()}
        result = self._client.reset(**{"seed": seed % _SEEDS, **given})
        if result.done:
            raise ValueError("the episode is over before its first answer")
        return observation_text(result.observation, self._server.observation) or None

    def step(self, answer: str) -> Turn | Done:
        """Sends an answer as an action, and returns the server's observation."""
        self.errors = 0
        action = action_of(answer, self._server.action)
        if action is None:
            self.errors = 1
            return Turn("error: an action is a JSON object, and nothing else")
        result = self._client.step(action)
        if result.done:
            return Done(result.reward)
        return Turn(observation_text(result.observation, self._server.observation), reward=result.reward)

    def close(self) -> None:
        """Ends the session."""
        self._client.close()


def action_of(answer: str, template: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The action of an answer; None where the answer is to be one and is no JSON object."""
    if template is not None:
        return {name: _filled(value, answer) for name, value in template.items()}
    try:
        action = json.loads(answer)
    except ValueError:
        return None
    return action if isinstance(action, dict) else None


def _filled(value: Any, answer: str) -> Any:
    """A value of a template with the answer in its place."""
    match value:
        case str():
            return value.replace(ANSWER, answer)
        case dict():
            return {name: _filled(each, answer) for name, each in value.items()}
        case list():
            return [_filled(each, answer) for each in value]
    return value


def observation_text(observation: Mapping[str, Any], key: str | None) -> str:
    """Returns the text that the policy sees. Raises KeyError for a key that is not there."""
    value: Any = observation
    for part in () if key is None else key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            offered = ", ".join(value) if isinstance(value, Mapping) else type(value).__name__
            raise KeyError(f"environment.observation: {key!r} is not in what the server observed, which has {offered}")
        value = value[part]
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
