"""A recipe written out in full, so that a run folder holds exactly what was run."""

from __future__ import annotations

from typing import Any

import yaml

from danlu.recipe.sections import Recipe
from danlu.recipe.yaml_tree import Dumper


def resolved_yaml(recipe: Recipe) -> str:
    """Every key with its value, defaults included. Loading the text gives an equal recipe."""
    plain = _escaped(recipe.model_dump(mode="json"))
    return yaml.dump(plain, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110)


def _escaped(value: Any) -> Any:
    """Texts that hold `${` as they are: a recipe file would read them as environment variables."""
    if isinstance(value, dict):
        return {key: _escaped(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_escaped(entry) for entry in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
