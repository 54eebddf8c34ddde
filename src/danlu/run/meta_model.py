"""The model of a recipe from configs alone: its shapes on torch's meta device, and the bytes that its parts would take.

Nothing is loaded but configs and the headers of weight files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from danlu.adapters.adapter_config import WEIGHTS, resolve_adapter
from danlu.adapters.adapter_set import AdapterSet
from danlu.adapters.lora import LowRank
from danlu.adapters.shapes import BASE_CHANGING_INITS
from danlu.adapters.targets import ROW_GROUPS
from danlu.assembly.base_model import find_base
from danlu.assembly.frozen_base import adapters_of, stored_quantization
from danlu.assembly.memory_estimate import (
    activation_dtype,
)
from danlu.assembly.parameters import TRAINED, own_name, parameters_of
from danlu.assembly.recipe_adapters import base_config, model_folder, trained_tokens
from danlu.core.errors import ModelError
from danlu.core.safetensors_format import read_header
from danlu.data.tokenizing import TokenizerInfo
from danlu.models.config import ModelConfig, is_matrix
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import FOUR_BIT, expected_tensors, own_tensors
from danlu.models.loading import meta_decoder
from danlu.models.long_context import with_long_context
from danlu.models.presets import from_scratch
from danlu.models.sites import sites_of
from danlu.planning.activation_memory import packed_bytes
from danlu.recipe import Recipe, sections
from danlu.recipe.roles import ModelSpec
from danlu.recipe.value import VALUE, value_adapter, value_share
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
        meta = meta_model(recipe, config)
        total, trained = parameters_of(meta.model), sum(parameter.numel() for _, parameter in meta.trained)
        if isinstance(recipe.adapter, sections.Continue):  # its files say more than the recipe
            header = read_header(resolve_adapter(recipe.model.adapters[-1]) / WEIGHTS)
            trained = sum(math.prod(entry.shape) for entry in header.values())
            total += trained
        return parameters_and_trained(total, trained)
    except ModelError:  # the estimate of memory says so
        return None


class MetaModel(NamedTuple):
    """A model without values, and the types in which a run would keep its parts."""

    model: Decoder
    frozen_bytes: dict[str, int]
    """Bytes of frozen matrices, by name: packed, or in the type of activations."""
    adapter_bytes: int
    trained: list[tuple[str, nn.Parameter]]
    replaced_bytes: dict[str, int]
    """Bytes of frozen parameters, by name, that trained copies replace (`modules_to_save`)."""
    own_critic: Decoder | None = None
    """PPO's model of values, where that is a decoder of its own."""


def meta_model(recipe: Recipe, config: ModelConfig) -> MetaModel:
    """The model on the meta device, with the adapter that the recipe trains."""
    model = meta_decoder(config)
    critic = meta_decoder(own_config(recipe, config.vocab_size)) if value_share(recipe) == "none" else None
    of_critic = [] if critic is None else [(own_name(name), each) for name, each in critic.named_parameters()]
    if recipe.adapter is None:
        return MetaModel(model, {}, 0, [*model.named_parameters(), *of_critic], {}, critic)
    adapters = adapters_of(model, seed=recipe.seed, device="meta", encode=lambda text: [0])
    if not isinstance(recipe.adapter, sections.Continue):
        ids = trained_tokens(recipe.model, recipe.adapter)
        adapters.add(TRAINED, recipe.adapter, token_ids=dict.fromkeys(ROW_GROUPS, ids))
        _initialize(adapters, recipe.adapter)
        adapters.finish_loading()
        if (values := value_adapter(recipe)) is not None:
            adapters.activate()
            adapters.add(VALUE, values)
        adapters.train_only(*adapters.added)
    whole = adapters.fully_trained()
    linears = {f"{site.name}.weight" for site in adapters.sites if site.layer is not None} - whole
    section = recipe.quantization
    if (stored := _stored_quantization(recipe)) is not None:
        section, linears = stored, linears & _stored_in_four_bits(recipe, config)
    frozen_bytes = {}
    for name, parameter in adapters.base_parameters().items():
        if name in linears and section is not None:
            frozen_bytes[name] = packed_bytes(parameter.shape, section)
        elif is_matrix(name, parameter.ndim) and name not in whole:
            frozen_bytes[name] = parameter.numel() * activation_dtype(recipe.precision).itemsize
    return MetaModel(
        model,
        frozen_bytes,
        sum(tensor.nbytes for name in adapters.added for tensor in adapters.tensors(name).values()),
        [*((name, each) for name, each in model.named_parameters() if each.requires_grad), *of_critic],
        {copy.name: copy.original.nbytes for added in adapters.added.values() for copy in added.copies},
        critic,
    )


def frozen_parameter_bytes(recipe: Recipe, spec: ModelSpec, config: ModelConfig) -> dict[str, int]:
    """The bytes of each parameter of a frozen model of this config, over all processes; its adapters are left out."""
    model, sizes = meta_decoder(config), {}
    linears = {f"{site.name}.weight" for site in sites_of(config) if site.layer is not None}
    for name, parameter in model.named_parameters():
        if name in linears and spec.quantization is not None:
            sizes[name] = packed_bytes(parameter.shape, spec.quantization)
        elif is_matrix(name, parameter.ndim) and spec.mixing is None:
            sizes[name] = parameter.numel() * activation_dtype(recipe.precision).itemsize
        else:
            sizes[name] = parameter.nbytes
    return sizes


def _stored_quantization(recipe: Recipe) -> sections.QuantizationSection | None:
    """The quantization in which the base's own folder stores its linear layers, if in 4 bits."""
    if recipe.model.path is None:
        return None
    return stored_quantization(find_base(recipe.model.path).folder)


def _stored_in_four_bits(recipe: Recipe, config: ModelConfig) -> set[str]:
    """Names of the parameters that the base's own folder has in 4 bits."""
    assert recipe.model.path is not None, "a folder says how it stores them"
    stored = own_tensors(model_folder(recipe.model), config)
    tensors = (tensor for tensor in expected_tensors(config, stored) if tensor.name in stored)
    return {name for tensor in tensors if stored[tensor.name].dtype == FOUR_BIT for name in tensor.parameters}


def _initialize(adapters: AdapterSet, section: Any) -> None:
    """Initializes an adapter once the base's weights are there, with norms that DoRA measures."""
    for module in (module for added in adapters.added.values() for module in added.modules.values()):
        if not isinstance(module, LowRank):
            continue
        if section.init in BASE_CHANGING_INITS:
            module.set_initial_factors(module.lora_A.detach(), module.lora_B.detach())
        if module.lora_magnitude_vector is not None:
            module.base_row_squares = torch.empty_like(module.lora_magnitude_vector)
