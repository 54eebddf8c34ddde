"""The typed recipe: one YAML file says what a run is.

`sections` has the types; `load` reads a file with its overrides and reports every problem at once; `resolved_yaml`
writes a recipe in full; `explain`, `schema` and `changes` answer questions about one. Nothing here imports torch.
"""

from __future__ import annotations

from danlu.recipe.comparing import Change, changes
from danlu.recipe.editor import schema
from danlu.recipe.explanation import Explanation, explain
from danlu.recipe.loading import Loaded, load
from danlu.recipe.sections import Recipe
from danlu.recipe.writing import resolved_yaml

__all__ = ["Change", "Explanation", "Loaded", "Recipe", "changes", "explain", "load", "resolved_yaml", "schema"]
