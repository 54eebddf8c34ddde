"""The typed recipe: one YAML file that defines a run.

`sections` has the types; `load` reads a file with its overrides and reports every problem at once,
`load_recipe_or_chain` also one with the recipes of several stages; `resolved_yaml` writes a recipe in full; `changes`,
`explanation.explain` and `json_schema.schema` answer questions about one. Nothing here imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from danlu.recipe.loading import Loaded, load, load_resolved
from danlu.recipe.resolved_yaml import resolved_yaml
from danlu.recipe.sections import Recipe

if TYPE_CHECKING:
    from danlu.recipe.chain import Chain, ChainStage, QuantizeStage, load_recipe_or_chain
    from danlu.recipe.diff import Change, changes

__all__ = [
    "Chain",
    "ChainStage",
    "Change",
    "Loaded",
    "QuantizeStage",
    "Recipe",
    "changes",
    "load",
    "load_recipe_or_chain",
    "load_resolved",
    "resolved_yaml",
]

_LAZY = {
    "Chain": "danlu.recipe.chain",
    "ChainStage": "danlu.recipe.chain",
    "QuantizeStage": "danlu.recipe.chain",
    "Change": "danlu.recipe.diff",
    "changes": "danlu.recipe.diff",
    "load_recipe_or_chain": "danlu.recipe.chain",
}
"""The module of each name that is imported when it is first used: one recipe alone needs neither."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'danlu.recipe' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
