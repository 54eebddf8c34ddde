"""The model of values of PPO: the recipe's settings and their consequences. No torch."""

from __future__ import annotations

from typing import Literal

from danlu.recipe.sections import AdapterSection, Lora, Recipe, Value

Share = Literal["policy", "base", "none"]
VALUE = "value"
"""PPO's value model: its role, the name of its adapter, and the prefix of its own parameters' names."""


def value_share(recipe: Recipe) -> Share | None:
    """Returns the parts that the model of values shares with the policy; None where the objective has no values."""
    if recipe.policy_gradient is None or not recipe.policy_gradient.needs_value:
        return None
    return value_section(recipe).share


def value_section(recipe: Recipe) -> Value:
    """The section of the model of values, or its defaults."""
    return recipe.value or Value()


def value_adapter(recipe: Recipe) -> AdapterSection | None:
    """The new adapter that the model of values is on the policy's base; None where there is none, or it is read."""
    section = value_section(recipe)
    if value_share(recipe) != "base" or section.model is not None:
        return None
    return section.adapter or Lora()


def value_adapter_folder(recipe: Recipe) -> str | None:
    """The folder of the adapter that the model of values starts as on the policy's base, if it starts from one."""
    return value_section(recipe).model if value_share(recipe) == "base" else None


def value_rate(recipe: Recipe) -> float:
    """Returns the learning rate of the model of values, as a multiple of the policy's."""
    section = value_section(recipe)
    if section.learning_rate is None:
        return section.rate_ratio
    return section.learning_rate / recipe.optimizer.learning_rate
