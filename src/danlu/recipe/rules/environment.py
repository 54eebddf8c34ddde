"""Rules about environments and tools of stage `rl`."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.rules.refusals import path_problem
from danlu.recipe.sections import Agent, AgentSection, EnvironmentSection, OpenEnv, PythonEnvironment, Recipe, Tools
from danlu.recipe.sections.environments import ENVIRONMENT
from danlu.recipe.yaml_tree import Problem


def environment_is_consistent(section: EnvironmentSection, recipe: Recipe) -> Iterator[Problem]:
    """An environment names things that can be found, and leaves settings of single answers alone."""
    if isinstance(section, PythonEnvironment) and (problem := path_problem(section.path, "class", "my_env.py:Maze")):
        yield Problem("environment.path", problem)
    if isinstance(section, Tools):
        yield from _tool_problems(section)
    if isinstance(section, OpenEnv):
        yield from _server_problems(section)
    if isinstance(section, AgentSection):
        yield from _agent_problems(section, recipe.rollout.staleness)
    if recipe.policy_gradient is not None and recipe.policy_gradient.overlong is not None:
        message = "shapes by the length of a single answer, and an episode has several. Leave it out"
        yield Problem("objective.0.overlong", message, reads=(ENVIRONMENT,))
    if recipe.policy_gradient is None and recipe.objective:
        message = "pairs are of answers in one turn. Leave the environment out, or take a policy gradient such as grpo"
        yield Problem(ENVIRONMENT, message, reads=("objective",))
    for index, reward in enumerate(recipe.rewards or ()):
        if section.gives_reward and reward.label == ENVIRONMENT:
            message = "called environment, as the environment's own reward is. Give it another name"
            yield Problem(f"rewards.{index}.name", message, reads=(ENVIRONMENT,))


def _server_problems(section: OpenEnv) -> Iterator[Problem]:
    if not section.url.startswith(("http://", "https://", "ws://", "wss://")):
        yield Problem("environment.url", f"{section.url!r} is no URL. Write it as in http://127.0.0.1:8000")
    if section.action is not None and "{answer}" not in str(section.action):
        message = "{answer} is in no field, so that every answer would be the same action. Write it where answers go"
        yield Problem("environment.action", message)


def _agent_problems(section: AgentSection, staleness: int) -> Iterator[Problem]:
    if staleness > 0:
        message = f"{staleness}: agents ask the policy of the trainer, which answers all of them together. Use 0"
        yield Problem("rollout.staleness", message, reads=(ENVIRONMENT,))
    if section.host in ("0.0.0.0", "::", ""):
        message = (
            f"{section.host!r} is no address that agents can be told. Give one of this machine that they reach, such "
            "as 127.0.0.1 for programs on it"
        )
        yield Problem("environment.host", message)
    if not isinstance(section, Agent):
        return
    if (section.path is None) == (section.command is None):
        state = "both path and command are given" if section.path else "what runs is missing"
        message = f"{state}: give either path, as in my_agent.py:solve, or command, as in python my_agent.py"
        yield Problem(ENVIRONMENT, message, reads=("environment.path", "environment.command"))
    elif section.path is not None:
        if (problem := path_problem(section.path, "function", "my_agent.py:solve")) is not None:
            yield Problem("environment.path", problem)
    elif section.command is not None and not section.command.strip():
        yield Problem("environment.command", "empty: write what runs an agent, as in python my_agent.py")


def _tool_problems(section: Tools) -> Iterator[Problem]:
    if not section.tools:
        yield Problem("environment.tools", "the list is empty. Name a function, as in my_tools.py:search")
    seen: dict[str, int] = {}
    for index, path in enumerate(section.tools):
        name = path.rpartition(":")[2]
        if (problem := path_problem(path, "function", "my_tools.py:search")) is not None:
            yield Problem(f"environment.tools.{index}", problem)
        elif name in seen:
            message = f"called {name} as environment.tools.{seen[name]} is: the policy calls tools by name. Rename one"
            yield Problem(f"environment.tools.{index}", message)
        seen.setdefault(name, index)
