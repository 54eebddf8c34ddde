"""The objective of stage reward, the score head that it or a critic begins with, and the task of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from danlu.assembly.recipe_adapters import named_stack
from danlu.assembly.score_head import score_head_of
from danlu.core.errors import RecipeError
from danlu.core.types import Task
from danlu.models.hf_folder import read_config, resolve_folder
from danlu.models.presets import from_scratch
from danlu.models.score_head import initializer_range, new_score_head
from danlu.objectives.reward import BradleyTerry, Stepwise
from danlu.recipe import Recipe, sections
from danlu.recipe.roles import task_of
from danlu.recipe.sections import Model
from danlu.stages.protocols import Better


def reward(recipe: Recipe) -> BradleyTerry | Stepwise:
    """The loss of the recipe's `objective` with the head that it trains."""
    section = _reward_section(recipe.objective)
    if isinstance(section, sections.Stepwise):
        return Stepwise(first_score_head(recipe.model, 2, bias=True, seed=recipe.seed))
    return BradleyTerry(first_score_head(recipe.model, 1, bias=False, seed=recipe.seed), section.centring)


def reward_task(recipe: Recipe) -> Task:
    """The task of an exported reward model: pairs score whole answers, steps are tokens that are classified."""
    task = task_of(recipe)
    assert task is not None, "a reward model is a decoder"
    return task


def reward_metrics(recipe: Recipe) -> dict[str, Better]:
    """Metrics of a reward model's evaluations that are better lower or higher."""
    pairs: dict[str, Better] = {} if reward_task(recipe) == "token-classification" else {"margin": "higher"}
    return {"loss": "lower", "accuracy": "higher", **pairs}


def _reward_section(objective: Sequence[Any] | None) -> sections.BradleyTerry | sections.Stepwise:
    """The recipe's objective; its rules have made sure that it is one, and of this stage."""
    section, *more = objective or [sections.BradleyTerry()]
    assert not more and isinstance(section, sections.BradleyTerry | sections.Stepwise), "the rules refuse others"
    return section


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
