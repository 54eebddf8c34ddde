"""The scores of drawn answers that a recipe of stage rl needs before it trains on them, by model. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from danlu.recipe.sections import Grpo, PolicyGradientSection, Ppo, Recipe, terms_of
from danlu.recipe.teachers import teachers_of


@dataclass(frozen=True)
class PolicyScores:
    """The models that score the tokens of a rollout in a pass without gradients."""

    old: bool = False
    """The policy: the log-probabilities that ratios are to."""
    reference: bool = False
    values: bool = False
    """The model of values."""
    teachers: tuple[str, ...] = ()
    """Roles of teachers that are asked of the drawn tokens."""

    def __bool__(self) -> bool:
        return self.old or self.reference or self.values or bool(self.teachers)


def scores_of(recipe: Recipe) -> PolicyScores:
    """The scores that a rollout of a recipe is given before it is trained on."""
    if trains_on_pairs(recipe):
        return PolicyScores()
    section = objective_section(recipe)
    reference = section.kl is not None and section.kl.in_reward and section.kl.coefficient > 0
    values = isinstance(section, Ppo)
    teachers = tuple(teachers_of(recipe)) if recipe.teachers_advise else ()
    old = not has_old_logprobs(recipe) and (not has_one_update(recipe) or reference or values or bool(teachers))
    return PolicyScores(old, reference, values, teachers)


def objective_section(recipe: Recipe) -> PolicyGradientSection:
    """The policy gradient of a recipe of stage rl; where it trains on pairs, GRPO's, for the settings of a rollout."""
    return recipe.policy_gradient or Grpo()


def trains_on_pairs(recipe: Recipe) -> bool:
    """Whether a recipe of stage rl compares the best and the worst answer to each prompt (online DPO)."""
    return bool(terms_of(recipe.objective))


def has_one_update(recipe: Recipe) -> bool:
    """Whether the policy that the ratio is to is the present one in each step: each rollout is trained on in one."""
    return recipe.batch.updates * recipe.batch.passes == 1 and not ratio_is_to_sampled(recipe)


def ratio_is_to_sampled(recipe: Recipe) -> bool:
    """Whether the ratio is to the sampling distribution, as the engine has it: true for asynchronous rollouts without
    `importance`.

    With `importance` it is to the trainer's policy when the rollout is taken up, and the correction bridges the rest
    (decoupled PPO: arXiv:2110.00641; as in AReaL, arXiv:2505.24298).
    """
    return recipe.rollout.staleness > 0 and objective_section(recipe).importance is None


def has_old_logprobs(recipe: Recipe) -> bool:
    """Whether the engine's log-probabilities are those that the ratio is to, so that the trainer need not make its own:
    by being these to the bit, or by choice."""
    is_exact = recipe.numerics == "exact" and recipe.rollout.staleness == 0
    return is_exact or ratio_is_to_sampled(recipe)
