"""Rules about keeping the experts of a mixture evenly loaded. Whether the model has experts is not known here."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.sections import Recipe, Router
from danlu.recipe.yaml_tree import Problem


def experts_can_be_balanced(router: Router, recipe: Recipe) -> Iterator[Problem]:
    """Nothing in the recipe prevents the effect of a key of `router`."""
    if router.balance == "sequence" and not router.sequence:
        message = "0 balances nothing. Give the loss a coefficient, or set balance: none"
        yield Problem("router.sequence", message, reads=("router.balance",))
    if router.balance == "bias" and recipe.adapter is not None:
        message = (
            "bias changes what experts of the base are chosen by, and an adapter's folder has no place for it. "
            "Use sequence, step or none"
        )
        yield Problem("router.balance", message, reads=("adapter",))
    if recipe.parallel.workers == "threads":
        message = (
            "threads run copies of the model at the same time, of which nothing is counted. Use workers: processes"
        )
        yield Problem("router", message, reads=("parallel.workers",))
    if router.capacity is not None and recipe.stage == "rl":
        message = (
            "full experts would drop tokens in training which they took in the rollout, so the policy that is trained "
            "would be another than the one that drew. Leave it out"
        )
        yield Problem("router.capacity", message, reads=("stage",))
    if router.capacity is not None and recipe.numerics == "exact":
        message = (
            "a token's experts would depend on the tokens before it in training, and not in a rollout. Leave it out, "
            "or set numerics: fast"
        )
        yield Problem("router.capacity", message, reads=("numerics",))
