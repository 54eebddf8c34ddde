"""The tensors of the model that a recipe trains, from its config and the headers of weight files. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from danlu.assembly.recipe_adapters import trained_tokens
from danlu.assembly.stored_base import stored_base
from danlu.models.config import ModelConfig
from danlu.planning.model_tensors import NO_FILES, UNSTORED, FileAdapter, ModelTensors, policy_tensors
from danlu.recipe import Recipe


def policy_tensors_of(recipe: Recipe, config: ModelConfig, files: Mapping[str, FileAdapter] = NO_FILES) -> ModelTensors:
    """The tensors of the policy of a recipe, as a run on this base would keep them. files: as `policy_tensors` has."""
    stored = UNSTORED if recipe.adapter is None else stored_base(recipe.model, config)
    return policy_tensors(recipe, config, stored, trained_tokens(recipe.model, recipe.adapter), files)
