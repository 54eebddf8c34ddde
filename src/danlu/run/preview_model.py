"""The model of a recipe from configs and the headers of weight files: config, tensors, parameters counted. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from danlu.assembly.policy_tensors import policy_tensors_of
from danlu.assembly.recipe_adapters import base_config, own_tokenizer, recipe_tokens
from danlu.core.errors import ModelError
from danlu.data.tokenizer_info import TokenizerInfo
from danlu.models.config import ModelConfig
from danlu.models.long_context import with_long_context
from danlu.models.presets import from_scratch
from danlu.recipe import Recipe
from danlu.recipe.roles import task_of
from danlu.recipe.value import value_share
from danlu.stages.role_configs import own_config
from danlu.training.units import parameters_and_trained


def config_of(recipe: Recipe, tokenizer: TokenizerInfo | None) -> ModelConfig | None:
    """The config of the model that is trained; None where it depends on a tokenizer that is not known."""
    if recipe.model.path is not None:
        config = base_config(recipe.model)
    elif tokenizer is not None:
        config = from_scratch(recipe.model, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    else:
        return None
    task = task_of(recipe)
    assert task is not None, "the model of a recipe that classifies images is no decoder"
    config = with_long_context(config, recipe.long_context, recipe.data.max_length)
    return replace(config, task=task)  # one that classifies has no head over a vocabulary


def planned_config(recipe: Recipe) -> ModelConfig:
    """The config of the model that is trained, for which no tokenizer library is loaded.

    Raises ModelError, and DataError for a model from scratch with a tokenizer that cannot be read.
    """
    tokenizer = None
    if recipe.model.path is None:
        from danlu.data.vocabulary import vocabulary_size

        new = [token.id + 1 for token in recipe_tokens(recipe.model, described=False)]
        tokenizer = TokenizerInfo(max(vocabulary_size(own_tokenizer(recipe.model)), *new, 0), None, None, None, ())
    config = config_of(recipe, tokenizer)
    assert config is not None, "the tokenizer's size is known"
    return config


def preview_parameters(recipe: Recipe, tokenizer: TokenizerInfo | None) -> str | None:
    """Counts the parameters of a run, and the trained ones, for `danlu preview`: `44,192 parameters, all trained`.

    None where the model cannot be read, or its vocabulary is not known. Raises RecipeError as a run would.
    """
    try:
        config = config_of(recipe, tokenizer)
        if config is None:
            return None
        policy = policy_tensors_of(recipe, config)
        total = sum(each.elements for each in policy.tensors if each.is_parameter)
        trained = sum(math.prod(shape) for shape in policy.trained.values())
        if value_share(recipe) == "none":
            trained += own_config(recipe, config.vocab_size).parameter_count()
        return parameters_and_trained(total, trained)
    except ModelError:  # the estimate of memory says so
        return None
