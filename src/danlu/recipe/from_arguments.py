"""A recipe that a verb (`danlu eval`) makes of its own arguments, with the user's `section.key=value` laid over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from danlu.core.errors import RecipeError
from danlu.core.spelling import did_you_mean
from danlu.recipe import overrides as overriding
from danlu.recipe.sections import Recipe
from danlu.recipe.short_forms import expand
from danlu.recipe.validation import validate
from danlu.recipe.yaml_tree import Node, Origin, Problem


def recipe_from_arguments(
    values: Mapping[str, Any], overrides: Sequence[str], *, verb: str, open_keys: Sequence[str]
) -> Recipe:
    """Builds a recipe from `values` (as YAML would give them) and the overrides.

    Args:
        verb: the verb that makes it, for messages.
        open_keys: dotted keys that an override may set; the verb reads no others, so they are refused.

    Raises RecipeError with one line for each problem. Rules between keys, and files that are missing, are left to the
    verb, which knows its needs.
    """
    tree = expand(node_of(values, Origin(verb)), Recipe)
    problems = [
        Problem("", _refused(key, verb, open_keys), Origin(f"override {text!r}", (1, index, 0)))
        for index, text in enumerate(overrides)
        if (key := text.partition("=")[0].strip()) not in open_keys
    ]
    allowed = [text for text in overrides if text.partition("=")[0].strip() in open_keys]
    overriding.apply(tree, allowed, problems)
    reported = {problem.key for problem in problems}
    recipe, type_problems = validate(expand(tree, Recipe))
    problems += [problem for problem in type_problems if problem.key not in reported]
    if problems or recipe is None:
        raise RecipeError([problem.line(verb) for problem in problems])
    return recipe


def node_of(value: Any, origin: Origin) -> Node:
    """Plain values as a tree, all of one origin."""
    if isinstance(value, Mapping):
        return Node({key: node_of(entry, origin) for key, entry in value.items()}, origin)
    if isinstance(value, list):
        return Node([node_of(entry, origin) for entry in value], origin)
    return Node(value, origin)


def _refused(key: str, verb: str, open_keys: Sequence[str]) -> str:
    """The message for an override of a key that the verb does not read."""
    hint = did_you_mean(key.rpartition(".")[2], {key.rpartition(".")[2]: key for key in open_keys})
    return f"{verb} takes no {key!r}.{hint} It takes {', '.join(open_keys)}"
