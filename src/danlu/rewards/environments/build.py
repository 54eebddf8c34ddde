"""Sections of a recipe as environments, and everything about them that can be known before the first episode."""

from __future__ import annotations

from typing import Any

from danlu.recipe.sections import EnvironmentSection, PythonEnvironment, Tools
from danlu.rewards.environments.protocol import EnvironmentSource
from danlu.rewards.environments.tools import Toolbox
from danlu.rewards.environments.user_class import UserEnvironment
from danlu.rewards.environments.workers import EnvironmentWorkers


def environment_source(section: EnvironmentSection) -> EnvironmentSource:
    """What makes the environments of a recipe.

    Raises RecipeError for a file that cannot be read or is no Python, or has no such name.
    """
    match section:
        case PythonEnvironment():
            return UserEnvironment.read(section.path, section.arguments)
        case Tools():
            return Toolbox.read(section.tools)
    raise AssertionError(f"no environment is made of {type(section).__name__}")


def tool_schemas(section: EnvironmentSection | None) -> tuple[dict[str, Any], ...]:
    """What the chat template is given of the tools of a recipe's environment, which may have none.

    Raises what `Toolbox.read` and `Toolbox.schemas` raise.
    """
    return Toolbox.read(section.tools).schemas() if isinstance(section, Tools) else ()


def environment_workers(section: EnvironmentSection) -> EnvironmentWorkers:
    """The processes that hold the environments of a recipe. Raises what `environment_source` raises."""
    workers = None if section.workers == "auto" else section.workers
    return EnvironmentWorkers(environment_source(section), count=workers, timeout_s=section.timeout_s)
