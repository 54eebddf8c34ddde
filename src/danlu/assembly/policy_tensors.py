"""The tensors of the model that a recipe trains, from its config and the headers of weight files. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from danlu.assembly.recipe_adapters import trained_tokens
from danlu.assembly.stored_base import stored_base
from danlu.core.safetensors_format import read_header
from danlu.models.config import ModelConfig
from danlu.optim.state_shapes import FLOAT32_BYTES
from danlu.planning.model_tensors import NO_FILES, UNSTORED, FileAdapter, ModelTensor, ModelTensors, policy_tensors
from danlu.recipe import Recipe, sections


def policy_tensors_of(recipe: Recipe, config: ModelConfig, files: Mapping[str, FileAdapter] = NO_FILES) -> ModelTensors:
    """The tensors of the policy of a recipe, as a run on this base would keep them.

    files: as `policy_tensors` has; where none are given, adapters in files count with the tensors of their weight
    files.
    """
    stored = UNSTORED if recipe.adapter is None else stored_base(recipe.model, config)
    policy = policy_tensors(recipe, config, stored, trained_tokens(recipe.model, recipe.adapter), files)
    if files or recipe.adapter is None or not recipe.model.adapters:
        return policy
    return replace(policy, tensors=(*policy.tensors, *_file_tensors(recipe)))


def _file_tensors(recipe: Recipe) -> Iterator[ModelTensor]:
    """The tensors of adapters below the trained one, and of one that is continued, in float32; tensor ranks have them
    whole."""
    from danlu.adapters.adapter_config import WEIGHTS, resolve_adapter  # here: most recipes have no adapter's folder

    last = len(recipe.model.adapters) - 1
    for number, path in enumerate(recipe.model.adapters):
        trained = number == last and isinstance(recipe.adapter, sections.Continue)
        header = read_header(resolve_adapter(path) / WEIGHTS)
        for index, (name, entry) in enumerate(header.items()):
            layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
            place = "embed_tokens" if layer is None else f"layers.{layer[1]}"
            yield ModelTensor(
                f"{place}.adapter.{number}.{index}",
                tuple(entry.shape),
                FLOAT32_BYTES * math.prod(entry.shape),
                trained,
                of_adapter=trained,
            )
