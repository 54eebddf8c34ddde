"""The score head that a model begins with: the one of the folder that it starts from, or a new one."""

from __future__ import annotations

from torch import nn

from danlu.assembly.recipe_adapters import named_stack
from danlu.assembly.score_head import score_head_of
from danlu.core.errors import RecipeError
from danlu.models.hf_folder import read_config, resolve_folder
from danlu.models.presets import from_scratch
from danlu.models.score_head import initializer_range, new_score_head
from danlu.recipe.sections import Model


def first_score_head(
    model: Model, labels: int, *, bias: bool, seed: int, key: str = "model.path", named: str | None = None
) -> nn.Linear:
    """Returns a head [labels, D]: that of the last of `model.adapters` or of `model.path` that has one, else one drawn
    by the seed.

    key, named: the recipe key that names the model, and the name, for messages.
    Raises ModelError for folders that cannot be read, RecipeError for a head of another shape.
    """
    if model.path is None:
        return new_score_head(from_scratch(model, 1).hidden_size, labels, bias=bias, seed=seed)
    folder = resolve_folder(model.path)
    width = read_config(folder).hidden_size
    head = score_head_of(folder, named_stack(model.adapters))
    if head is None:
        return new_score_head(width, labels, bias=bias, seed=seed, std=initializer_range(folder))
    wanted = ((labels, width), bias)
    if (tuple(head.weight.shape), head.bias is not None) != wanted:
        stored = f"{list(head.weight.shape)} {'with' if head.bias is not None else 'without'} a bias"
        raise RecipeError(
            f"{key}: the score head of {named or model.path} is {stored}, and this objective's is [{labels}, {width}] "
            f"{'with' if bias else 'without'} one. Start from a reward model of the same kind, or from a language model"
        )
    return head
