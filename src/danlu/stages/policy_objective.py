"""The objective of stage rl over the policy's own answers, the advantages that it reads, and the other models."""

from __future__ import annotations

from collections.abc import Mapping

from danlu.core.types import Objective, Role
from danlu.objectives.policy import PolicyEvaluation, PolicyGradient, PolicyGradientSettings
from danlu.objectives.policy_losses import AdaptiveKl, GammaWeight, ImportanceBounds
from danlu.objectives.preference import Preference, StepPreference
from danlu.objectives.value import PpoObjective
from danlu.recipe import Recipe
from danlu.recipe.policy_scores import has_one_update, objective_section, trains_on_pairs
from danlu.recipe.roles import REFERENCE
from danlu.recipe.sections import Ppo
from danlu.recipe.teachers import teacher_shares
from danlu.recipe.value import VALUE, value_share
from danlu.rl.answer_pairs import PairEstimator
from danlu.rl.estimators import Estimator, GaeEstimator, GroupEstimator, KlPenalty, RewardShaping, TeacherAdvantages
from danlu.stages.distillation import teacher_divergence, teacher_models
from danlu.stages.preference import preference, reference_models
from danlu.stages.protocols import Better, RoleSpec
from danlu.stages.value_model import first_value_head


def policy_objective(recipe: Recipe) -> PolicyGradient | PpoObjective | Preference | StepPreference:
    """The policy gradient over the drawn answers, or the preference terms over pairs of them."""
    return preference(recipe) if trains_on_pairs(recipe) else policy_gradient(recipe)


def policy_gradient(recipe: Recipe) -> PolicyGradient | PpoObjective:
    """The policy gradient of the recipe's objective, over the answers of its rollouts; with a critic's loss in PPO."""
    section = objective_section(recipe)
    kl = section.kl if section.kl is not None and not section.kl.in_reward else None
    low, high = section.clip_bounds
    good, bad = (GammaWeight(k, rate) for k, rate in zip(section.vespo_shapes, section.vespo_rates, strict=True))
    settings = PolicyGradientSettings(
        loss=section.loss,
        ratio=section.ratio,
        clip_low=low,
        clip_high=high,
        dual_clip=section.dual_clip,
        sapo_temperatures=section.sapo_temperatures,
        vespo_weights=(good, bad),
        normalise=section.normalise,
        constant_tokens=recipe.rollout.max_new_tokens,
        kl=0.0 if kl is None else kl.coefficient,
        kl_estimator="k3" if kl is None else kl.kl_estimator,
        kl_with_ratio=kl is not None and kl.ratio,
        entropy=section.entropy,
        importance=None if section.importance is None else ImportanceBounds(**section.importance.model_dump()),
        off_policy=section.off_policy,
        temperature=recipe.rollout.temperature,
        single_update=has_one_update(recipe),
    )
    # A KL in the reward is known when the rollout is made; the reference is not asked again in each update. Nor are
    # teachers that are asked of the drawn tokens.
    term = None if recipe.teachers_advise else recipe.divergence
    policy = PolicyGradient(
        settings,
        kl is not None and REFERENCE in reference_models(recipe),
        None if term is None else teacher_divergence(recipe),
        1.0 if term is None else term.weight,
    )
    if not isinstance(section, Ppo):
        return policy
    return PpoObjective(
        first_value_head(recipe),
        policy,
        value_clip=section.value_clip,
        value_weight=section.value_weight,
        critic="policy" if value_share(recipe) == "policy" else VALUE,
    )


def models_beside_policy(recipe: Recipe) -> Mapping[Role, RoleSpec]:
    """The reference and the teachers of a recipe of stage rl, where it has any."""
    return {**reference_models(recipe), **teacher_models(recipe)}


def held_out_rewards(recipe: Recipe, objective: Objective) -> PolicyEvaluation:
    """Held-out prompts are judged by the rewards of the policy's greedy answers."""
    return PolicyEvaluation()


def policy_metrics(recipe: Recipe) -> dict[str, Better]:
    """Metrics of a policy's evaluations that are better lower or higher."""
    parts: dict[str, Better] = {f"reward/{name}": "higher" for name in recipe.reward_weights}
    return {"loss": "lower", "reward": "higher", **parts}


def estimator_of(recipe: Recipe) -> Estimator:
    """The estimator of the tokens' advantages."""
    if trains_on_pairs(recipe):
        return PairEstimator()
    estimator = _estimator_of_rewards(recipe)
    if not recipe.teachers_advise or recipe.divergence is None:
        return estimator
    return TeacherAdvantages(estimator, teacher_shares(recipe), recipe.divergence.weight)


def _estimator_of_rewards(recipe: Recipe) -> Estimator:
    section = objective_section(recipe)
    overlong = section.overlong
    shaping = RewardShaping(
        None if overlong is None else overlong.margin,
        1.0 if overlong is None else overlong.weight,
        recipe.rollout.max_new_tokens,
        section.mask_truncated,
    )
    kl = None
    if section.kl is not None and section.kl.in_reward and section.kl.coefficient > 0:
        target = section.kl.target
        coefficient = AdaptiveKl(section.kl.coefficient, target or 1.0, section.kl.horizon)
        kl = KlPenalty(coefficient, target is not None, section.kl.kl_estimator)
    if isinstance(section, Ppo):
        return GaeEstimator(section.discount, section.gae, section.whiten, section.bootstrap_truncated, shaping, kl)
    return GroupEstimator(
        section.baseline, section.scale, section.rewards_apart, shaping, kl, section.process_supervision
    )
