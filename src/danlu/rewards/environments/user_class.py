"""Environments that a user writes: `my_env.py:Maze`, a class, or a function that makes an environment."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from danlu.core.errors import RecipeError
from danlu.environment import Environment
from danlu.rewards.function import UserFunction
from danlu.rewards.protocol import JudgedAnswer


@dataclass(frozen=True)
class UserCode:
    """FILE.py:NAME of the recipe's `environment`, a class or a function, and its arguments."""

    function: UserFunction
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str, arguments: Mapping[str, Any]) -> Self:
        """Raises RecipeError for a file that cannot be read or is no Python, or has no such name; it is not run."""
        function = UserFunction.read(path, "environment")
        function.check_text()
        return cls(function, dict(arguments))

    @property
    def label(self) -> str:
        """Its name."""
        return self.function.name


@dataclass(frozen=True)
class UserEnvironment(UserCode):
    """An `EnvironmentSource`: it calls FILE.py:NAME with the arguments."""

    def load(self) -> Callable[[], Environment]:
        """Returns a function that makes environments. Raises RecipeError where the arguments do not fit."""
        make = self.function.resolve()
        try:
            inspect.signature(make).bind(**self.arguments)
        except TypeError as error:
            raise RecipeError(f"environment.arguments: {self.function.name}: {error}") from None
        except ValueError:  # a callable of C, which says nothing about itself
            pass
        return functools.partial(_new_environment, make, self.arguments)


def _new_environment(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Environment:
    environment = make(**arguments)
    for method in ("reset", "step"):
        if not callable(getattr(environment, method, None)):
            raise TypeError(
                f"an environment has the methods reset and step; {type(environment).__name__} has no {method}"
            )
    return environment  # type: ignore[no-any-return]


class EnvironmentReward:
    """A `Reward`: the environment's reward for an episode."""

    def __call__(self, answers: Sequence[JudgedAnswer]) -> list[float | None]:
        return [answer.environment_reward for answer in answers]
