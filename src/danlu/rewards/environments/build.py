"""Sections of a recipe as environments, and everything about them that can be known before the first episode."""

from __future__ import annotations

from danlu.recipe.sections import EnvironmentSection, PythonEnvironment
from danlu.rewards.environments.protocol import EnvironmentSource
from danlu.rewards.environments.user_class import UserEnvironment
from danlu.rewards.environments.workers import EnvironmentWorkers


def environment_source(section: EnvironmentSection) -> EnvironmentSource:
    """What makes the environments of a recipe.

    Raises RecipeError for a file that cannot be read or is no Python, or has no such name.
    """
    assert isinstance(section, PythonEnvironment), f"no environment is made of {type(section).__name__}"
    return UserEnvironment.read(section.path, section.arguments)


def environment_workers(section: EnvironmentSection) -> EnvironmentWorkers:
    """The processes that hold the environments of a recipe. Raises what `environment_source` raises."""
    workers = None if section.workers == "auto" else section.workers
    return EnvironmentWorkers(environment_source(section), count=workers, timeout_s=section.timeout_s)
