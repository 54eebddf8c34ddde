"""What answers the policy back in stage `rl`: an environment of the user's, or tools that the policy may call."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, VariantSection
from danlu.recipe.sections.rewards import FUNCTION_PATTERN, Positive


class EnvironmentSection(VariantSection):
    """What answers the policy back."""

    gives_reward: ClassVar[bool] = True

    max_turns: PositiveInt = 8
    """Answers of an episode; one that is not over then is cut off, with the rewards of its turns so far. All turns
    together have the room of data.max_length, prompt included."""
    timeout_s: Positive = 60.0
    """Seconds that the environment may take for a turn; the episode is given up on then, and counted with the failures
    of `reward_limits`."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes that hold environments; auto takes one per core, and at most 8."""


class PythonEnvironment(EnvironmentSection):
    """A class of yours with `reset(row)` and `step(answer) -> Turn | Done(reward)`, or a function that makes its
    objects; an object is made for each answer to a prompt."""

    short = "path"
    short_pattern: ClassVar[str] = FUNCTION_PATTERN

    kind: Literal["python"] = "python"
    path: str = Field(json_schema_extra={"pattern": FUNCTION_PATTERN})
    """The class, as in my_env.py:Maze."""
    arguments: dict[str, Any] = {}
    """What it is called with."""
    weight: float = 1.0
    """What its reward is multiplied by in the sum with `rewards`."""

    @property
    def file(self) -> str:
        """The path without the name."""
        return self.path.rpartition(":")[0] or self.path


class Tools(EnvironmentSection):
    """Functions of yours that the policy may call, told to it by the chat template. An answer without a call is the
    last one, and `rewards` judge it."""

    gives_reward: ClassVar[bool] = False
    weight: ClassVar[float] = 0.0

    kind: Literal["tools"] = "tools"
    tools: list[str] = Field(json_schema_extra={"items": {"type": "string", "pattern": FUNCTION_PATTERN}})
    """The functions, as in my_tools.py:search. Their names, annotations and docstrings are what the policy is told."""


Environment = Annotated[PythonEnvironment | Tools, Field(discriminator="kind")]

ENVIRONMENT = "environment"
"""What the reward of an environment is called beside others."""
