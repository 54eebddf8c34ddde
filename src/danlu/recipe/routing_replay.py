"""Whether the experts that tokens went to in a rollout are those that they go to where it is trained on. No torch."""

from __future__ import annotations

from danlu.recipe.sections import Recipe


def replays_routes(recipe: Recipe) -> bool:
    """Whether a run of the recipe replays routes, if its policy has experts and its rollouts report them.

    Policy gradients compare the trained policy with the one that drew, so theirs do. Pairs of answers are compared with
    the reference, and replay where the recipe asks for it. Rows of other stages were drawn by nobody.
    """
    if recipe.policy_gradient is not None:
        return recipe.rollout.routing_replay is not False
    return recipe.stage == "rl" and recipe.rollout.routing_replay is True
