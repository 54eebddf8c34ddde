"""Rewards that a user writes: `my_rewards.py:short`, a function of an answer and the columns of its row.

`def short(completion, **row) -> float | None` is called with each answer. A function with a parameter `completions` is
called as TRL calls one: with the answers of many rows at once, their prompts, and a list for each column, and with
completion_ids, trainer_state, log_extra and log_metric. A function of one answer has these where it names them.

In the place of a number there may be rewards of steps: a list of numbers, one for each line of the answer that is not
empty, or of pairs (characters of the answer up to the end of the step, reward).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import symtable
import sys
import types
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danlu.core.errors import RecipeError
from danlu.rewards.calling import awaited, failure_reason
from danlu.rewards.protocol import JudgedAnswer, Logged, Logs, StepRewards, TrainerState, lines_of

LOGGED_TYPES = (bool, int, float, str, type(None))
"""The types of values that a function may log; others are logged as their text."""


class FunctionReward(Logs):
    """A reward out of a Python file."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._extra: dict[str, list[Any]] = {}
        self._metrics: dict[str, float] = {}
        self._parameters = inspect.signature(function).parameters
        self._takes_all = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self._parameters.values()
        )

    @property
    def takes_batch(self) -> bool:
        """Whether the function is called with many answers at once."""
        return "completions" in self._parameters

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | StepRewards | None]:
        self._extra, self._metrics = {}, {}
        if not self.takes_batch:
            return [_as_reward(self._call(self._columns_with_asked(answer)), answer) for answer in answers]
        columns = [_columns(answer) for answer in answers]
        names = dict.fromkeys(name for row in columns for name in row)
        lists: dict[str, Any] = {name: [row.get(name) for row in columns] for name in names}
        del lists["prompt"], lists["completion"]
        lists |= {
            "prompts": [answer.prompt for answer in answers],
            "completions": [_as_in_trl(answer) for answer in answers],
            "completion_ids": [list(answer.token_ids) for answer in answers],
            **self._of_trl(answers),
        }
        rewards = list(self._call(lists))
        if len(rewards) != len(answers):
            raise ValueError(f"the function gave {len(rewards)} rewards for {len(answers)} answers")
        return [_as_reward(reward, answer) for reward, answer in zip(rewards, answers, strict=True)]

    def take_logged(self, count: int) -> list[Logged]:
        """Returns what the function has logged, for each answer.

        Raises ValueError for a column with more or fewer values than answers.
        """
        for name, values in self._extra.items():
            if len(values) != count:
                raise ValueError(f"log_extra({name!r}, ..) was given {len(values)} values for {count} answers")
        first, self._metrics = self._metrics, {}
        return [
            Logged({name: values[place] for name, values in self._extra.items()}, first if place == 0 else {})
            for place in range(count)
        ]

    def _of_trl(self, answers: Sequence[JudgedAnswer]) -> dict[str, Any]:
        """The further arguments that TRL gives to a function."""
        state = answers[0].state if answers else TrainerState()
        return {"trainer_state": state, "log_extra": self._log_extra, "log_metric": self._log_metric}

    def _columns_with_asked(self, answer: JudgedAnswer) -> dict[str, Any]:
        """The columns of an answer, and of TRL's arguments those that the function asks for by name."""
        further = {"completion_ids": list(answer.token_ids), **self._of_trl([answer])}
        asked = {name: value for name, value in further.items() if name in self._parameters}
        return {**_columns(answer), **asked}

    def _log_extra(self, column: str, values: Any) -> None:
        """Adds a column of values, one for each answer, to rollouts.jsonl; of a call with one answer also its value."""
        several = list(values) if isinstance(values, list | tuple) else [values]
        shown = [each if isinstance(each, LOGGED_TYPES) else str(each) for each in several]
        self._extra.setdefault(str(column), []).extend(shown)

    def _log_metric(self, name: str, value: Any) -> None:
        """Adds a metric to those of the step."""
        self._metrics[str(name)] = float(value)

    def _call(self, columns: dict[str, Any]) -> Any:
        names = columns if self._takes_all else [name for name in columns if name in self._parameters]
        result = self._function(**{name: columns[name] for name in names})
        return asyncio.run(awaited(result)) if inspect.isawaitable(result) else result


@dataclass(frozen=True)
class UserFunction:
    """A reward FILE.py:NAME as its file was when this was made, so that every process runs the same text.

    The file is run where the reward is first called or loaded, once for all functions of it in a process.
    """

    path: Path
    name: str
    source: str = field(repr=False)
    key: str = "rewards"
    """The key of the recipe, for messages."""

    @classmethod
    def read(cls, reference: str, key: str = "rewards") -> UserFunction:
        """Reads FILE.py:NAME.

        Raises RecipeError for any other reference, or a file that cannot be read.
        """
        file, _, name = reference.rpartition(":")
        path = Path(file).expanduser()
        if not file or path.suffix != ".py":
            raise RecipeError(f"{key}: {reference}: a function is given as FILE.py:NAME")
        if not path.is_file():
            raise RecipeError(f"{key}: {reference}: there is no file {path}")
        try:
            return cls(path.absolute(), name, path.read_text(encoding="utf-8"), key)
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"{key}: {reference}: {path} cannot be read: {error}") from None

    def check_text(self) -> None:
        """Raises RecipeError for a file that is no Python, or by its text binds no such name; it is not run."""
        try:
            names = symtable.symtable(self.source, str(self.path), "exec").get_symbols()
        except (SyntaxError, ValueError) as error:
            raise RecipeError(f"{self.key}: {self.path}: the file raises {failure_reason(error)}") from None
        bound = [each.get_name() for each in names if each.is_assigned() or each.is_imported()]
        by_other_means = "import *" in self.source or "globals()" in self.source
        if self.name not in bound and not by_other_means:
            offered = [each.get_name() for each in names if each.is_namespace() and not each.get_name().startswith("_")]
            raise _no_function(self.key, self.path, self.name, offered)

    def resolve(self) -> Callable[..., Any]:
        """Runs the file and returns the object of that name. Raises RecipeError for a missing one, with those that
        exist.
        """
        names = vars(_module(self.path, self.source, self.key))
        function = names.get(self.name)
        if not callable(function):
            offered = [key for key, value in names.items() if inspect.isfunction(value) and not key.startswith("_")]
            raise _no_function(self.key, self.path, self.name, offered)
        return function  # type: ignore[no-any-return]

    def load(self) -> FunctionReward:
        """Returns the function as a reward. Raises the errors of `resolve`."""
        return FunctionReward(self.resolve())

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | StepRewards | None]:
        return self.load()(answers)


def _no_function(key: str, path: Path, name: str, offered: Sequence[str]) -> RecipeError:
    return RecipeError(f"{key}: {path} has no function {name!r}; it has {', '.join(offered) or 'none'}")


@functools.cache
def _module(path: Path, source: str, key: str) -> types.ModuleType:
    if (folder := str(path.parent)) not in sys.path:
        sys.path.append(folder)  # the file may import those next to it
    module = types.ModuleType(f"danlu_{key}_{path.stem}_{zlib.crc32(str(path).encode()):08x}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickling look it up there
    try:
        exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{key}: {path}: the file raises {failure_reason(error)}") from error
    return module


def _columns(answer: JudgedAnswer) -> dict[str, Any]:
    """Returns the row's columns, and the answer's own values, which replace columns of the same names.

    `turns` are there with an environment, or in the place of a column that has this name.
    """
    own = {"completion": answer.text, "prompt": answer.prompt, "tokens": answer.tokens, "finish": answer.finish}
    if answer.turns or "turns" in answer.row:
        own["turns"] = answer.turns
    return {**answer.row, **own}


def _as_in_trl(answer: JudgedAnswer) -> Any:
    """A text where the prompt is one, else the assistant's message in a list; all messages of an episode."""
    if answer.turns:
        return [dict(turn) for turn in answer.turns]
    return answer.text if isinstance(answer.prompt, str) else [{"role": "assistant", "content": answer.text}]


def _as_reward(value: Any, answer: JudgedAnswer) -> float | StepRewards | None:
    """A number, rewards of steps, or None. Raises TypeError for anything else, ValueError for steps that do not fit."""
    if value is None:
        return None
    if getattr(value, "ndim", 0):  # an array or a tensor
        value = value.tolist()
    if isinstance(value, list | tuple):
        return _as_steps(value, answer.text)
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"a reward is a number or None, and the function gave {type(value).__name__}: {value!r}")


def _as_steps(steps: Sequence[Any], text: str) -> StepRewards:
    if any(isinstance(step, list | tuple) for step in steps):
        if not all(isinstance(step, list | tuple) and len(step) == 2 for step in steps):
            raise TypeError("rewards of steps are numbers, or pairs (characters up to the end of the step, reward)")
        ends, values = [int(end) for end, _ in steps], [float(value) for _, value in steps]
        if ends != sorted(ends) or not all(0 < end <= len(text) for end in ends):
            raise ValueError(f"steps end at {ends}, which has to rise within the {len(text)} characters of the answer")
        return StepRewards(tuple(ends), tuple(values))
    lines = lines_of(text)
    if len(steps) != len(lines):
        raise ValueError(
            f"{len(steps)} rewards for an answer of {len(lines)} steps, which are its lines that are not empty; pairs "
            "(characters up to the end of the step, reward) say where others end"
        )
    return StepRewards(tuple(end for _, end in lines), tuple(float(step) for step in steps))
