"""Environments of the package `verifiers` as agents: its harnesses ask the policy, and its rewards judge them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

from danlu.core.errors import RecipeError
from danlu.rewards.environments.agents import AgentCall, AgentFailed, Solve

_KEY_VARIABLE = "DANLU_EPISODE_API_KEY"


@dataclass(frozen=True)
class VerifiersEnvironment:
    """An `AgentSource`: episodes of `verifiers` (0.4 and later), each in a process of its own.

    Args:
        taskset: its id.
        arguments: the rest of the environment's configuration.
        column: of the row, with the number of the task in the taskset.
    """

    taskset: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    column: str = "task"

    @property
    def label(self) -> str:
        return self.taskset

    def load(self) -> Solve:
        """Raises RecipeError for an environment that cannot be had."""
        try:
            from verifiers.v1.utils.loaders import load_environment, resolve_env_config
        except ImportError as error:
            raise RecipeError(
                f"environment: verifiers cannot be imported: {error}. Versions from 0.4 on have what is asked: "
                "pip install -U verifiers"
            ) from None
        own = self.arguments.get("taskset", {})
        if not isinstance(own, Mapping):
            raise RecipeError("environment.arguments.taskset: expected a section, such as {split: train}")
        try:
            environment = load_environment(
                resolve_env_config({**self.arguments, "taskset": {**own, "id": self.taskset}})
            )
            tasks = Tasks(environment.taskset)
        except Exception as error:  # plugins raise what they like
            said = " ".join(str(error).split())
            raise RecipeError(f"environment: {self.taskset}: {type(error).__name__}: {said}") from None

        def solve(call: AgentCall) -> Awaitable[float]:
            return self._episode(environment, tasks.at(self._number(call.row)), call)

        return solve

    def _number(self, row: Mapping[str, Any]) -> int:
        value = row.get(self.column)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise AgentFailed(
                f"column {self.column!r} of the row is {value!r}, and it names a task of the taskset by its number, "
                "from 0 on (environment.column)"
            )
        return value

    async def _episode(self, environment: Any, task: Any, call: AgentCall) -> float:
        """Plays a task. Returns the mean reward of its agents that are trained; raises AgentFailed where it failed."""
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        os.environ[_KEY_VARIABLE] = call.api_key  # of this process alone
        client = EvalClientConfig(base_url=call.base_url, api_key_var=_KEY_VARIABLE)
        async with environment.serving():
            episode = await environment.run_episode(task, ModelContext(model=call.model, client=client))
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        errors = [*episode.errors, *(error for trace in traces for error in trace.errors)]
        if errors:
            raise AgentFailed(f"{errors[0].type}: {errors[0].message}")
        if not traces:
            raise AgentFailed("no agent of the episode is trained")
        return sum(float(trace.reward) for trace in traces) / len(traces)


class Tasks:
    """The tasks of a taskset by number: all of them where it ends, else as far as they are asked for."""

    def __init__(self, taskset: Any) -> None:
        self._rest = iter(taskset)
        self._tasks: list[Any] = list(self._rest) if taskset.bounded else []

    def at(self, number: int) -> Any:
        """Raises AgentFailed for a number past the last task."""
        while len(self._tasks) <= number:
            try:
                self._tasks.append(next(self._rest))
            except StopIteration:
                raise AgentFailed(f"the taskset has {len(self._tasks)} tasks, and none of number {number}") from None
        return self._tasks[number]
