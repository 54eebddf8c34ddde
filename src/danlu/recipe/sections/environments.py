"""The environments of stage `rl`, which answer the policy: an environment of the user's, or tools that the policy may
call.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from danlu.recipe.sections.base import PositiveInt, VariantSection
from danlu.recipe.sections.rewards import FUNCTION_PATTERN, Positive, file_of

Port = Annotated[int, Field(ge=0, le=65535)]


class EnvironmentSection(VariantSection):
    """An environment that answers the policy."""

    gives_reward: ClassVar[bool] = True

    @property
    def files(self) -> dict[str, str]:
        """The user's files that it is made of, by the keys of `environment` that name them."""
        return {}

    max_turns: PositiveInt = 8
    """Answers of an episode; one that is not over then is cut off, with the rewards of its turns so far. All turns
    together have the room of data.max_length, prompt included."""
    timeout_s: Positive = 60.0
    """Seconds that the environment may take for a turn; the episode is given up on then, and counted with the failures
    of `reward_limits`."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Processes that hold environments, which answer one after the other in each; auto takes one per core, and at most
    8. With `rollout.staleness` above 0 each rollout process has this number."""


class PythonEnvironment(EnvironmentSection):
    """A class of yours with `reset(row)` and `step(answer) -> Turn | Done(reward)`, or a function that makes its
    objects; an object is made for each answer to a prompt."""

    short = "path"
    short_pattern: ClassVar[str] = FUNCTION_PATTERN

    kind: Literal["python"] = "python"
    path: str = Field(json_schema_extra={"pattern": FUNCTION_PATTERN})
    """The class, as in my_env.py:Maze."""
    arguments: dict[str, Any] = {}
    """The arguments of the class or function."""
    weight: float = 1.0
    """The weight of its reward in the sum with `rewards`."""

    @property
    def files(self) -> dict[str, str]:
        """The file of the class."""
        return {"path": file_of(self.path)}


class Tools(EnvironmentSection):
    """Functions of yours that the policy may call, described to it by the chat template. An answer without a call is
    the last one, and `rewards` judge it.
    """

    gives_reward: ClassVar[bool] = False
    weight: ClassVar[float] = 0.0

    kind: Literal["tools"] = "tools"
    tools: list[str] = Field(json_schema_extra={"items": {"type": "string", "pattern": FUNCTION_PATTERN}})
    """The functions, as in my_tools.py:search. Their names, annotations and docstrings are described to the policy."""

    @property
    def files(self) -> dict[str, str]:
        """The files of the functions."""
        return {f"tools.{index}": path.rpartition(":")[0] for index, path in enumerate(self.tools)}


class OpenEnv(EnvironmentSection):
    """A server of OpenEnv, in a session of its own for each answer to a prompt; it needs the package openenv-core."""

    kind: Literal["openenv"] = "openenv"
    url: str
    """The server, as in http://127.0.0.1:8000. It has to take as many sessions as a rollout has answers."""
    action: dict[str, Any] | None = {"message": "{answer}"}
    """The fields of an action; in their texts `{answer}` stands for the answer. null: an answer is the action, as a
    JSON object."""
    observation: str | None = None
    """The field of an observation that the policy sees, such as result.text; null shows all of it as JSON."""
    reset: dict[str, str] = {}
    """Parameters of the server's reset, and the columns of the row that they are from; seed is there besides."""
    weight: float = 1.0
    """The weight of its reward in the sum with `rewards`."""


class AgentSection(EnvironmentSection):
    """A program that queries the policy over HTTP, as OpenAI's chat completions, and returns a reward."""

    weight: float = 1.0
    """The weight of its reward in the sum with `rewards`."""
    host: str = "127.0.0.1"
    """The address at which the policy answers; agents in containers or on other machines need one that they reach."""
    port: Port = 0
    """The port where the policy answers; 0 takes a free one."""
    timeout_s: Positive = 300.0
    """Seconds that an agent may take from an answer to its next question or its end. It is ended then, and counted
    with the failures of `reward_limits`."""
    workers: PositiveInt | Literal["auto"] = "auto"
    """Agents that run at a time, each a process of its own; auto runs up to 64."""

    @property
    def at_once(self) -> int:
        """Agents that run at a time."""
        return 64 if self.workers == "auto" else self.workers


class Agent(AgentSection):
    """A program of yours that asks the policy over HTTP, with any client of OpenAI's API; it runs once for each answer
    to a prompt."""

    one_of: ClassVar[tuple[str, ...]] = ("path", "command")

    kind: Literal["agent"] = "agent"
    path: str | None = Field(default=None, json_schema_extra={"pattern": FUNCTION_PATTERN})
    """A function, as in my_agent.py:solve. It has those parameters that it needs of row, messages, base_url, api_key,
    model and seed, and returns the reward, or None where `rewards` judge its last answer. It may be async."""
    command: str | None = None
    """A command of the shell, instead of a function. It finds the policy in OPENAI_BASE_URL, OPENAI_API_KEY and
    OPENAI_MODEL, and the row and all else as a JSON object in its input; the last line of its output is the reward.
    """
    arguments: dict[str, Any] = {}
    """Further arguments of the program."""

    @property
    def files(self) -> dict[str, str]:
        """The file of the function, where it is one."""
        return {"path": file_of(self.path)} if self.path else {}


class Verifiers(AgentSection):
    """An environment of the package verifiers (from 0.4 on): its harness asks the policy, and its rewards judge it."""

    kind: Literal["verifiers"] = "verifiers"
    environment: str
    """The id of the taskset; its package is installed."""
    arguments: dict[str, Any] = {}
    """The environment's configuration besides, such as {taskset: {split: train}, agent: {runtime: {type:
    subprocess}}}."""
    column: str = "task"
    """The column of the row with the number of the task in the taskset, from 0 on."""


Environment = Annotated[PythonEnvironment | Tools | OpenEnv | Agent | Verifiers, Field(discriminator="kind")]

ENVIRONMENT = "environment"
"""The name of an environment's reward among others."""
