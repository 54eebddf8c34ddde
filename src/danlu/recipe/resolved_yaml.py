"""A recipe written out in full, so that a run folder holds exactly the recipe that was run."""

from __future__ import annotations

import re
from typing import Any

import yaml

from danlu.recipe.sections import Recipe
from danlu.recipe.yaml_reader import Loader


class Dumper(yaml.SafeDumper):
    """Writes texts that would read as something else in quotes, by the same table."""

    yaml_implicit_resolvers = Loader.yaml_implicit_resolvers

    def text(self, value: str) -> yaml.Node:
        # Line ends of other alphabets come back from single quotes as a newline; double quotes write them as escapes.
        """Represents a text; PyYAML quotes it where the resolvers would read another type."""
        style = '"' if _ODD_LINE_END.search(value) else None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


Dumper.add_representer(str, Dumper.text)
_ODD_LINE_END = re.compile("[\x85\u2028\u2029]")


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
