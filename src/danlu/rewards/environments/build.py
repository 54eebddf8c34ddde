"""Sections of a recipe as environments, and everything about them that can be known before the first episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from danlu.core.errors import ResourceError
from danlu.recipe.sections import Agent, AgentSection, EnvironmentSection, OpenEnv, PythonEnvironment, Tools, Verifiers
from danlu.rewards.environments.agent_processes import AgentProcesses
from danlu.rewards.environments.agents import AgentCommand, AgentFunction, AgentSource
from danlu.rewards.environments.openenv import OpenEnvServer
from danlu.rewards.environments.protocol import EnvironmentSource
from danlu.rewards.environments.tools import ReadCalls, Toolbox
from danlu.rewards.environments.user_class import UserEnvironment
from danlu.rewards.environments.verifiers_agent import VerifiersEnvironment
from danlu.rewards.environments.workers import EnvironmentWorkers


def environment_source(section: EnvironmentSection) -> EnvironmentSource:
    """Returns the source of a recipe's environments.

    Raises RecipeError for a file that cannot be read or is no Python, or has no such name.
    """
    match section:
        case PythonEnvironment():
            return UserEnvironment.read(section.path, section.arguments)
        case Tools():
            return Toolbox.read(section.tools)
        case OpenEnv():
            return OpenEnvServer(
                section.url, section.action, section.observation, section.reset, timeout_s=section.timeout_s
            )
    raise AssertionError(f"no environment is made of {type(section).__name__}")


def agent_source(section: AgentSection) -> AgentSource:
    """Returns the source of a recipe's agents.

    Raises RecipeError for a file that cannot be read or is no Python, or has no such name.
    """
    match section:
        case Agent(path=str() as path):
            return AgentFunction.read(path, section.arguments)
        case Agent(command=str() as command):
            return AgentCommand(command, section.arguments)
        case Verifiers():
            return VerifiersEnvironment(section.environment, section.arguments, section.column)
    raise AssertionError(f"no agent is made of {type(section).__name__}")


def check_environment(section: EnvironmentSection) -> None:
    """Raises RecipeError for an environment or agents that cannot be made; nothing of the user's is run.

    Raises ResourceError where a package is missing.
    """
    if isinstance(section, AgentSection):
        _require_packages(f"environment.kind {section.kind}", ("starlette", "uvicorn"), "danlu[serve]")
        agent_source(section)
        if isinstance(section, Verifiers):
            _require_packages("environment.kind verifiers", ("verifiers",), "verifiers")
    else:
        if isinstance(section, OpenEnv):
            _require_packages("environment.kind openenv", ("openenv",), "openenv-core")
        environment_source(section)


def check_environment_code(section: EnvironmentSection) -> None:
    """Runs the file of an environment or an agent once, in a process that ends again: a rollout is too late for that.

    Agents of other packages may load much, and have one process for it, so they are not tried.
    Raises RecipeError with the file's error, or for arguments that do not fit; ResourceError where the process ends.
    """
    match section:
        case PythonEnvironment():
            holder: EnvironmentWorkers | AgentProcesses = environment_workers(section)
        case Agent(path=str()):
            holder = agent_processes(section)
        case _:
            return
    try:
        holder.start()
    finally:
        holder.close()


def _require_packages(what: str, names: Sequence[str], installed: str) -> None:
    """Raises ResourceError for the first package that is missing. installed: the requirement that pip is to install."""
    for name in names:
        if find_spec(name) is None:
            raise ResourceError(f"{what} needs the package {name}, which is not installed: pip install '{installed}'")


def agent_processes(section: AgentSection) -> AgentProcesses:
    """Returns the processes of a recipe's agents. Raises the errors of `agent_source`."""
    return AgentProcesses(agent_source(section))


def tool_schemas(section: EnvironmentSection | None) -> tuple[dict[str, Any], ...]:
    """Returns the chat template's schemas of the tools of a recipe's environment, which may have none.

    Raises the errors of `Toolbox.read` and `Toolbox.schemas`.
    """
    return Toolbox.read(section.tools).schemas() if isinstance(section, Tools) else ()


def environment_workers(section: EnvironmentSection, read_calls: ReadCalls | None = None) -> EnvironmentWorkers:
    """Returns the processes that hold a recipe's environments; `read_calls` reads the calls of tools in answers.

    Raises the errors of `environment_source`.
    """
    workers = None if section.workers == "auto" else section.workers
    source = environment_source(section)
    if isinstance(source, Toolbox):
        source = replace(source, read_calls=read_calls)
    return EnvironmentWorkers(source, count=workers, timeout_s=section.timeout_s)
