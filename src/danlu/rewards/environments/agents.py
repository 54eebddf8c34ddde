"""Agents: programs of the user's that query the policy over HTTP and return a reward. No torch here.

A function `solve(row, base_url, api_key, model)` of a file, or a command of the shell. Either has a process of its own
for each answer to a prompt.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from danlu.core.errors import RecipeError
from danlu.environment import Done
from danlu.rewards.calling import as_number, awaited
from danlu.rewards.environments.protocol import EpisodeKey
from danlu.rewards.environments.user_class import UserCode

POLICY = "policy"
"""The name by which agents call the policy's model."""
_LONGEST_SAID = 300
"""The most characters of a command's output that a message repeats."""
_READ_AT_END_BYTES = 1 << 16


@dataclass(frozen=True)
class AgentCall:
    """The arguments of an agent."""

    key: EpisodeKey
    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]]
    """The messages of the row's prompt."""
    seed: int
    """The same for all answers to a prompt."""
    base_url: str
    """The URL of the policy, as OpenAI's clients take it."""
    api_key: str
    """The key that identifies the episode of a request."""
    model: str = POLICY
    """The name of the policy's model."""


@dataclass(frozen=True)
class AgentResult:
    """How an agent ended."""

    reward: float | None = None
    failure: str | None = None
    """The reason why the answer is left out: the agent raised, took too long, or returned no valid reward."""


Solve = Callable[[AgentCall], Any]
"""An agent: returns a number, None or `Done`, or an awaitable of these."""


class AgentSource(Protocol):
    """Makes agents, in the process that it was sent to."""

    @property
    def label(self) -> str: ...  # its name in messages

    def load(self) -> Solve: ...  # Raises RecipeError for what cannot be run.


def play(solve: Solve, call: AgentCall) -> AgentResult:
    """Runs an agent to its end. Raises its errors, and TypeError or ValueError for a result that is no reward."""
    value = solve(call)
    if inspect.isawaitable(value):
        value = asyncio.run(awaited(value))
    return AgentResult(as_reward(value))


def as_reward(value: Any) -> float | None:
    """Converts a number, None, or a `Done` to a reward. Raises TypeError or ValueError for anything else."""
    if isinstance(value, Done):
        value = value.reward
    return None if value is None else as_number(value, "an agent returns a number, None or Done, and gave")


@dataclass(frozen=True)
class AgentFunction(UserCode):
    """An `AgentSource`: FILE.py:NAME, called with those of row, messages, base_url, api_key, model and seed that it has
    parameters for, and with the recipe's arguments."""

    def load(self) -> Solve:
        """Raises RecipeError where the arguments do not fit."""
        solve = self.function.resolve()
        try:
            signature = inspect.signature(solve)
            signature.bind(**self._given(signature, AgentCall((0, 0), {}, (), 0, "", "")))
        except TypeError as error:
            raise RecipeError(
                f"environment: {self.function.name}: {error}; an agent is a function of row, messages, base_url, "
                "api_key, model and seed, or some of them, and of environment.arguments"
            ) from None
        return lambda call: solve(**self._given(signature, call))

    def _given(self, signature: inspect.Signature, call: AgentCall) -> dict[str, Any]:
        offered = {
            "row": dict(call.row),
            "messages": [dict(message) for message in call.messages],
            "base_url": call.base_url,
            "api_key": call.api_key,
            "model": call.model,
            "seed": call.seed,
        }
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
        taken = {name: value for name, value in offered.items() if takes_all or name in signature.parameters}
        return {**taken, **self.arguments}


@dataclass(frozen=True)
class AgentCommand:
    """An `AgentSource`: a command of the shell, in the working directory of the run.

    It finds the policy in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and its task as a JSON object in its input:
    row, messages, seed, arguments, and these three. The last line of its output is its reward, a number or {"reward":
    ..}; without output it has none.
    """

    command: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.command

    def load(self) -> Solve:
        return self._run

    def _run(self, call: AgentCall) -> float | None:
        address = {"base_url": call.base_url, "api_key": call.api_key, "model": call.model}
        given = {
            "row": dict(call.row),
            "messages": list(call.messages),
            "seed": call.seed,
            "arguments": dict(self.arguments),
            **address,
        }
        names = {f"OPENAI_{name.upper()}": value for name, value in address.items()}
        result = subprocess.run(
            self.command,
            shell=True,  # the recipe's own command
            input=json.dumps(given, default=str).encode(),
            capture_output=True,
            env={**os.environ, **names},
        )
        if result.returncode:
            how = f"exit code {result.returncode}" if result.returncode > 0 else f"signal {-result.returncode}"
            raise AgentFailed(f"it ended with {how}{_last_said(result.stderr)}")
        return reward_of_output(result.stdout)


class AgentFailed(Exception):
    """Why a command is left out; its text is the whole reason."""


def reward_of_output(output: bytes) -> float | None:
    """The reward that a command wrote. Raises AgentFailed for a last line that is none."""
    lines = output[-_READ_AT_END_BYTES:].decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), None)
    if last is None:
        return None
    try:
        value = json.loads(last)
        if isinstance(value, dict):
            value = value["reward"]
        return as_reward(value)
    except (ValueError, KeyError, TypeError):
        raise AgentFailed(
            f"the last line of its output is no reward: {last[:_LONGEST_SAID]!r}. It is a number or "
            '{"reward": ..}; what else it says belongs into its error output'
        ) from None


def _last_said(errors: bytes) -> str:
    last = errors[-_READ_AT_END_BYTES:].decode(errors="replace").strip().rpartition("\n")[2].strip()
    return f": {last[:_LONGEST_SAID]}" if last else ""
