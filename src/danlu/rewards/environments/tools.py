"""Functions that the policy may call: reading calls from its answers, and their results.

The run gives a function that reads the calls of an answer (`danlu.data.tool_calls.ReadCalls`), in the form of the
policy's family. An answer without a call ends the episode. No torch here.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from danlu.core.errors import RecipeError, ResourceError
from danlu.core.types import MalformedCall, ToolCall
from danlu.core.worker_process import LOAD_TIMEOUT_S, Caller, WorkerProcess
from danlu.environment import Done, Environment, Step, Turn
from danlu.rewards.calling import failure_reason
from danlu.rewards.function import UserFunction

START = "from danlu.rewards.environments.tools import describe; describe()"


ReadCalls = Callable[[str], tuple[str, Sequence[ToolCall | MalformedCall]]]
"""A function from an answer to its text without calls, and its calls in their order."""


class ToolEpisode:
    """An `Environment` that makes the calls of answers, one after the other, and is over with an answer without one.

    The policy gets a tool's result as text, or as JSON, and likewise the reason why a call could not be made.
    """

    def __init__(self, tools: Mapping[str, Callable[..., Any]], read_calls: ReadCalls | None) -> None:
        self._tools = tools
        self._read_calls = read_calls
        self.errors = 0
        """The number of calls in the last answer that could not be made, or with a tool that raised."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Nothing is said before the first answer."""

    async def step(self, answer: str) -> Step:
        """The results of an answer's calls."""
        self.errors = 0
        assert self._read_calls is not None, "a run says how its policy writes calls"
        turns = [await self._result(call) for call in self._read_calls(answer)[1]]
        return turns or Done()

    async def _result(self, call: ToolCall | MalformedCall) -> Turn:
        if isinstance(call, MalformedCall):
            return self._error(call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            return self._error(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}", call.name)
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError as error:
            return self._error(f"{call.name}: {error}", call.name)
        try:
            value = tool(**call.arguments)
            value = await value if inspect.isawaitable(value) else value
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except Exception as error:
            return self._error(failure_reason(error), call.name)
        return Turn(text, "tool", name=call.name)

    def _error(self, problem: str, name: str | None = None) -> Turn:
        self.errors += 1
        return Turn(f"error: {problem}", "tool", name=name)


@dataclass(frozen=True)
class Toolbox:
    """An `EnvironmentSource`: functions FILE.py:NAME of the user's, which the policy calls by their names."""

    functions: tuple[UserFunction, ...]
    read_calls: ReadCalls | None = field(default=None, compare=False)
    """How answers are read; None where none will be."""

    @classmethod
    def read(cls, paths: Sequence[str]) -> Toolbox:
        """Raises RecipeError for files that cannot be read or are no Python, or have no such name; none is run."""
        functions = tuple(UserFunction.read(path, f"environment.tools.{number}") for number, path in enumerate(paths))
        for function in functions:
            function.check_text()
        return cls(functions)

    @property
    def label(self) -> str:
        """The names of the functions."""
        return ", ".join(function.name for function in self.functions)

    def load(self) -> Callable[[], Environment]:
        """Returns a function that makes episodes. Raises RecipeError for a file that raises."""
        tools = {function.name: function.resolve() for function in self.functions}
        return functools.partial(ToolEpisode, tools, self.read_calls)

    def schemas(self) -> tuple[dict[str, Any], ...]:
        """Returns the tools for a chat template: JSON schemas in OpenAI's form, which transformers reads from names,
        annotations and docstrings. The files are run in a process of their own.

        Raises RecipeError for functions without annotations or a docstring, ResourceError where the process fails.
        """
        return _schemas(self)


@functools.cache
def _schemas(toolbox: Toolbox) -> tuple[dict[str, Any], ...]:
    worker = WorkerProcess(START, toolbox.functions, keeps_stderr=True)
    try:
        if (reply := worker.receive(LOAD_TIMEOUT_S)) is None:
            last = worker.stderr().rpartition("\n")[2]
            how = f"ended with exit code {worker.exit_code()}"
            raise ResourceError(f"environment.tools: describing them {how}: {last}")
        return tuple(worker.report_of(reply, "environment.tools"))
    except TimeoutError:
        raise ResourceError(f"environment.tools: running the files took longer than {LOAD_TIMEOUT_S:g} s") from None
    finally:
        worker.end()


def describe() -> None:
    """Replies with the schemas of the functions that it receives, or the errors in them; runs in a process of its
    own."""
    Caller().load(_describe, report=lambda schemas: schemas)


def _describe(functions: Sequence[UserFunction]) -> list[Any]:
    from transformers.utils import get_json_schema

    schemas: list[Any] = []
    problems: list[str] = []
    for function in functions:
        try:
            schemas.append(get_json_schema(function.resolve()))
        except RecipeError as error:
            problems += error.problems
        except Exception as error:  # transformers has several, of no common kind
            problems.append(
                f"{function.key}: {function.path}:{function.name}: {' '.join(str(error).split())} (the policy learns "
                "what a tool is from its annotations and its docstring, with a line for each argument under Args:)"
            )
    if problems:
        raise RecipeError(problems)
    return schemas
