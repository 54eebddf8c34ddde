"""The fastest layouts of a recipe on a machine, as `danlu plan --search` shows them. No torch."""

from __future__ import annotations

from typing import Any

from danlu.planning.choice import Space
from danlu.planning.lengths import Lengths
from danlu.planning.plan_values import plan_values
from danlu.planning.rollout_lengths import RolloutLengths
from danlu.planning.search import search
from danlu.planning.target import Target
from danlu.recipe import Recipe
from danlu.run.planned_step import planned_workload, target_here


def fastest_layouts(
    recipe: Recipe,
    top: int,
    target: Target | None = None,
    lengths: Lengths | None = None,
    rollout_lengths: RolloutLengths | None = None,
) -> list[dict[str, Any]]:
    """Returns the fastest layouts that fit, the fastest first: `settings` as key=value, and the `plan` of each.

    The recipe's own layout, micro-batch and recomputation are not looked at. Raises RecipeError where no speeds are
    known, and where nothing fits.
    """
    target = target or target_here(recipe)
    workload = planned_workload(recipe, lengths, rollout_lengths)
    return [
        {"settings": each.choice.overrides(), "plan": plan_values(each.plan, workload, target)}
        for each in search(workload, Space.of(workload, target), target, top)
    ]
