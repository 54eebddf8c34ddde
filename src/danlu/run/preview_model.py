"""The model of a recipe from configs and the headers of weight files: config, tensors, and parameters counted."""

from __future__ import annotations

import math
from dataclasses import replace

from danlu.adapters.adapter_config import WEIGHTS, resolve_adapter
from danlu.assembly.base_model import find_base
from danlu.assembly.frozen_base import stored_quantization
from danlu.assembly.recipe_adapters import base_config, model_folder, trained_tokens
from danlu.core.errors import ModelError
from danlu.core.safetensors_format import read_header
from danlu.data.tokenizing import TokenizerInfo
from danlu.models.config import ModelConfig
from danlu.models.hf_folder import FOUR_BIT, expected_tensors, own_tensors
from danlu.models.long_context import with_long_context
from danlu.models.presets import from_scratch
from danlu.planning.model_tensors import UNSTORED, ModelTensors, StoredBase, policy_tensors
from danlu.recipe import Recipe, sections
from danlu.recipe.value import value_share
from danlu.stages.table import STAGES
from danlu.stages.value_model import own_config
from danlu.training.units import parameters_and_trained


def config_of(recipe: Recipe, tokenizer: TokenizerInfo | None) -> ModelConfig | None:
    """The config of the model that is trained; None where it depends on a tokenizer that is not known."""
    if recipe.model.path is not None:
        config = base_config(recipe.model)
    elif tokenizer is not None:
        config = from_scratch(recipe.model, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id)
    else:
        return None
    config = with_long_context(config, recipe.long_context, recipe.data.max_length)
    return replace(config, task=STAGES[recipe.stage].task(recipe))  # one that classifies has no head over a vocabulary


def preview_parameters(recipe: Recipe, tokenizer: TokenizerInfo | None) -> str | None:
    """Counts the parameters of a run, and the trained ones, for `danlu preview`: `44,192 parameters, all trained`.

    None where the model cannot be read, or its vocabulary is not known. Raises RecipeError as a run would.
    """
    try:
        config = config_of(recipe, tokenizer)
        if config is None:
            return None
        policy = tensors_of(recipe, config)
        total = sum(each.elements for each in policy.tensors if each.is_parameter)
        trained = sum(math.prod(shape) for shape in policy.trained.values())
        if value_share(recipe) == "none":
            trained += own_config(recipe, config.vocab_size).parameter_count()
        if isinstance(recipe.adapter, sections.Continue):  # its files say more than the recipe
            header = read_header(resolve_adapter(recipe.model.adapters[-1]) / WEIGHTS)
            trained = sum(math.prod(entry.shape) for entry in header.values())
            total += trained
        return parameters_and_trained(total, trained)
    except ModelError:  # the estimate of memory says so
        return None


def tensors_of(recipe: Recipe, config: ModelConfig) -> ModelTensors:
    """The tensors of the policy of a recipe, as a run on this base would keep them."""
    return policy_tensors(recipe, config, _stored(recipe, config), trained_tokens(recipe.model, recipe.adapter))


def _stored(recipe: Recipe, config: ModelConfig) -> StoredBase:
    """The quantization in which the base's own folder stores its linear layers, if in 4 bits, and which of them."""
    if recipe.adapter is None or recipe.model.path is None:
        return UNSTORED
    section = stored_quantization(find_base(recipe.model.path).folder)
    if section is None:
        return UNSTORED
    stored = own_tensors(model_folder(recipe.model), config)
    tensors = (tensor for tensor in expected_tensors(config, stored) if tensor.name in stored)
    return StoredBase(
        section, {name for tensor in tensors if stored[tensor.name].dtype == FOUR_BIT for name in tensor.parameters}
    )
