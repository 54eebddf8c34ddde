"""A synthesis in a process of its own, to be killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from danlu.core import http_client
from danlu.production.synthesis.stage import prepare, synthesize
from danlu.recipe.synthesize_recipe import load_synthesize_recipe


def run_recipe(file: Path, overrides: Sequence[str]) -> None:
    """Runs a recipe to its end. Errors end the process with another exit code than 0."""
    http_client.FIRST_PAUSE_S = 0.001
    synthesize(prepare(load_synthesize_recipe(file, overrides)[0]))
