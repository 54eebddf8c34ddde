"""What a recipe of stage rl makes of its keys: the settings of its objective."""

from __future__ import annotations

from typing import Any

import pytest

from danlu.objectives.policy_losses import GammaWeight
from danlu.recipe.policy_scores import has_old_logprobs
from danlu.recipe.sections import BatchSize, Data, Grpo, Importance, Model, Recipe, Rollout, Source
from danlu.stages.policy_objective import policy_gradient

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


@pytest.mark.parametrize(
    ("staleness", "importance", "updates", "numerics", "has_old", "is_present"),
    [
        (0, False, 1, "fast", False, True),
        (0, False, 2, "fast", False, False),
        (0, False, 2, "exact", True, False),
        (2, False, 1, "fast", True, False),  # to what drew: the engine has said it
        (2, False, 1, "exact", True, False),
        (2, True, 1, "fast", False, True),  # to the policy of the time, and the correction bridges the rest
        (2, True, 2, "exact", False, False),  # which exact numerics do not make the one that drew
    ],
)
def test_which_policy_the_ratio_is_to(
    staleness: int, importance: bool, updates: int, numerics: Any, has_old: bool, is_present: bool
) -> None:
    recipe = Recipe(
        stage="rl",
        model=Model(path="base"),
        data=Data(train=[Source(path="rows.json")]),
        objective=[Grpo(importance=Importance() if importance else None)],
        rollout=Rollout(staleness=staleness),
        batch=BatchSize(prompts=4, updates=updates),
        numerics=numerics,
        output="runs/x",
    )
    assert has_old_logprobs(recipe) == has_old
    assert policy_gradient(recipe).settings.single_update == is_present  # type: ignore[union-attr]
