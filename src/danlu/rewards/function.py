"""Rewards that a user writes: `my_rewards.py:short`, a function of an answer and the columns of its row.

`def short(completion, **row) -> float | None` is called with each answer. A function with a parameter `completions` is
called as TRL calls one: with the answers of many rows at once, their prompts, and a list for each column.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from danlu.errors import RecipeError
from danlu.rewards.protocol import JudgedAnswer


class FunctionReward:
    """A reward out of a Python file."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._parameters = inspect.signature(function).parameters
        self._takes_all = any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self._parameters.values()
        )

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | None]:
        if "completions" not in self._parameters:
            return [_as_reward(self._function(**self._arguments(_columns(answer)))) for answer in answers]
        columns = [_columns(answer) for answer in answers]
        names = dict.fromkeys(name for row in columns for name in row)
        lists = {name: [row.get(name) for row in columns] for name in names}
        lists = {"prompts": lists.pop("prompt"), "completions": lists.pop("completion"), **lists}
        rewards = list(self._function(**self._arguments(lists)))
        if len(rewards) != len(answers):
            raise ValueError(f"the function gave {len(rewards)} rewards for {len(answers)} answers")
        return [_as_reward(reward) for reward in rewards]

    def _arguments(self, columns: dict[str, Any]) -> dict[str, Any]:
        return columns if self._takes_all else {name: columns[name] for name in columns if name in self._parameters}


def load_function(reference: str) -> FunctionReward:
    """The reward behind FILE.py:NAME. Raises RecipeError for a file or a name that is not there, saying what is."""
    file, _, name = reference.rpartition(":")
    path = Path(file).expanduser()
    if not file or path.suffix != ".py":
        raise RecipeError(f"rewards: {reference}: a function is given as FILE.py:NAME")
    if not path.is_file():
        raise RecipeError(f"rewards: {reference}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"danlu_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look it up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RecipeError(f"rewards: {path}: the file raises {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        offered = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise RecipeError(f"rewards: {path} has no function {name!r}; it has {', '.join(offered) or 'none'}")
    return FunctionReward(function)


def _columns(answer: JudgedAnswer) -> dict[str, Any]:
    """The row's columns, and over them what is known of the answer."""
    own = {"completion": answer.text, "prompt": answer.prompt, "tokens": answer.tokens, "finish": answer.finish}
    return {**answer.row, **own}


def _as_reward(value: Any) -> float | None:
    """A number, or None; NaN is no reward either. Raises TypeError for anything else."""
    if value is None:
        return None
    if isinstance(value, bool | int | float) or hasattr(value, "__float__"):
        number = float(value)
        return None if math.isnan(number) else number
    raise TypeError(f"a reward is a number or None, and the function gave {type(value).__name__}: {value!r}")
