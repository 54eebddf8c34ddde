"""What a recipe of stage rl makes of its keys: the settings of its objective."""

from __future__ import annotations

from typing import Any

import pytest

from danlu.objectives.policy_losses import GammaWeight
from danlu.recipe.sections import Data, Grpo, Model, Recipe, Source
from danlu.stages import policy_gradient

OTHERS = {"sapo_temperatures": (0.5, 2.0), "vespo_shapes": (1.0, 4.0), "vespo_rates": (5.0, 6.0)}


@pytest.mark.parametrize(
    ("keys", "sapo", "vespo"),
    [
        ({}, (1.0, 1.05), (GammaWeight(2.0, 3.0), GammaWeight(3.0, 2.0))),
        (OTHERS, (0.5, 2.0), (GammaWeight(1.0, 5.0), GammaWeight(4.0, 6.0))),
    ],
)
def test_weights_of_sapo_and_vespo_are_those_of_the_recipe(keys: Any, sapo: Any, vespo: Any) -> None:
    data = Data(train=[Source(path="rows.json")])
    recipe = Recipe(stage="rl", model=Model(path="base"), data=data, objective=[Grpo(**keys)], output="runs/x")
    settings = policy_gradient(recipe).settings  # type: ignore[union-attr]
    assert settings.sapo_temperatures == sapo and settings.vespo_weights == vespo
