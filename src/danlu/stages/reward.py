"""The objective of stage reward with the score head that it trains, and the task of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from danlu.core.types import Task
from danlu.objectives.reward import BradleyTerry, Stepwise
from danlu.recipe import Recipe, sections
from danlu.stages.initial_score_head import first_score_head
from danlu.stages.protocols import Better


def reward(recipe: Recipe) -> BradleyTerry | Stepwise:
    """The loss of the recipe's `objective` with the head that it trains."""
    section = _reward_section(recipe.objective)
    if isinstance(section, sections.Stepwise):
        return Stepwise(first_score_head(recipe.model, 2, bias=True, seed=recipe.seed))
    return BradleyTerry(first_score_head(recipe.model, 1, bias=False, seed=recipe.seed), section.centring)


def reward_task(recipe: Recipe) -> Task:
    """The task of an exported reward model: pairs score whole answers, steps are tokens that are classified."""
    stepwise = isinstance(_reward_section(recipe.objective), sections.Stepwise)
    return "token-classification" if stepwise else "sequence-classification"


def reward_metrics(recipe: Recipe) -> dict[str, Better]:
    """Metrics of a reward model's evaluations that are better lower or higher."""
    pairs: dict[str, Better] = {} if reward_task(recipe) == "token-classification" else {"margin": "higher"}
    return {"loss": "lower", "accuracy": "higher", **pairs}


def _reward_section(objective: Sequence[Any] | None) -> sections.BradleyTerry | sections.Stepwise:
    """The recipe's objective; its rules have made sure that it is one, and of this stage."""
    section, *more = objective or [sections.BradleyTerry()]
    assert not more and isinstance(section, sections.BradleyTerry | sections.Stepwise), "the rules refuse others"
    return section
