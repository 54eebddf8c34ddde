"""One row for each stage of training: the table to add a new one to."""

from __future__ import annotations

from collections.abc import Mapping

from danlu.assembly.parameter_roles import VALUE
from danlu.core.types import Objective, Role, Task
from danlu.data.sources import reported_sources
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.objectives.policy import PolicyEvaluation, PolicyGradient, PolicyGradientSettings
from danlu.objectives.policy_losses import GammaWeight, ImportanceBounds
from danlu.objectives.preference import Preference, preference_objective
from danlu.objectives.reward import BradleyTerry, Stepwise
from danlu.objectives.step_preference import StepPreference
from danlu.objectives.value import PpoObjective
from danlu.recipe import Recipe, sections
from danlu.recipe.sections import HiddenStates, LossOptions, terms_of
from danlu.recipe.value import value_rate, value_share
from danlu.stages.builder import DecoderBuilder
from danlu.stages.classifier import ClassifierBuilder
from danlu.stages.critic import first_value_head, trained_roles
from danlu.stages.distillation import (
    DistillationBuilder,
    distillation,
    held_out_distillation,
    teacher_columns,
    teacher_divergence,
    teacher_models,
)
from danlu.stages.image_reader import ImageReader
from danlu.stages.initial_score_head import first_score_head
from danlu.stages.prompt_reader import PromptReader, RolloutBuilder
from danlu.stages.protocols import Better, RoleSpec, Stage, policy_alone
from danlu.stages.reader import PackReader
from danlu.stages.reference import REFERENCE, reference_columns, reference_models
from danlu.stages.reinforcement import has_one_update, objective_section, trains_on_pairs
from danlu.stages.rollout_remarks import RolloutRemarks
from danlu.stages.tree_reader import TreeReader


def likelihood(recipe: Recipe) -> CrossEntropy:
    """The cross-entropy with the extras of the recipe's `loss`, beside which the plain likelihood is reported then."""
    loss = recipe.loss
    return CrossEntropy(loss.label_smoothing, loss.z_loss, reports_nll=loss != LossOptions())


def plain_likelihood(recipe: Recipe, objective: Objective) -> CrossEntropy:
    """The cross-entropy of held-out rows: label smoothing and z-loss take no part."""
    return CrossEntropy(reports_nll=True)


def likelihood_metrics(recipe: Recipe) -> dict[str, Better]:
    """What evaluations by the likelihood report: the loss of each source too, where there are several."""
    by_source: dict[str, Better] = {f"loss/{name}": "lower" for name in reported_sources(recipe.data)}
    return {"loss": "lower", "perplexity": "lower", "accuracy": "higher", **by_source}


def distillation_metrics(recipe: Recipe) -> dict[str, Better]:
    """What evaluations of distillation report beside the likelihood of the rows."""
    hidden = any(isinstance(term, HiddenStates) for term in recipe.objective or ())
    terms: dict[str, Better] = {"divergence": "lower", **({"hidden": "lower"} if hidden else {})}
    return {**likelihood_metrics(recipe), **terms}


def preference(recipe: Recipe) -> Preference | StepPreference:
    """The weighted sum of the recipe's terms over pairs of answers, or over answers judged alone."""
    return preference_objective(terms_of(recipe.objective), REFERENCE in reference_models(recipe))


def preference_metrics(recipe: Recipe) -> dict[str, Better]:
    """What evaluations of pairs, or of judged answers, report."""
    return {"loss": "lower", **Preference(tuple(terms_of(recipe.objective)), True).better}


def reward(recipe: Recipe) -> BradleyTerry | Stepwise:
    """The loss of the recipe's `objective` with the head that it trains."""
    section = _reward_section(recipe)
    if isinstance(section, sections.Stepwise):
        return Stepwise(first_score_head(recipe.model, 2, bias=True, seed=recipe.seed))
    return BradleyTerry(first_score_head(recipe.model, 1, bias=False, seed=recipe.seed), section.centring)


def reward_task(recipe: Recipe) -> Task:
    """What a reward model is exported as: pairs score whole answers, steps are tokens that are classified."""
    stepwise = isinstance(_reward_section(recipe), sections.Stepwise)
    return "token-classification" if stepwise else "sequence-classification"


def reward_metrics(recipe: Recipe) -> dict[str, Better]:
    """What evaluations of a reward model report that has a better side."""
    pairs: dict[str, Better] = {} if reward_task(recipe) == "token-classification" else {"margin": "higher"}
    return {"loss": "lower", "accuracy": "higher", **pairs}


def objective_rate(recipe: Recipe) -> float:
    """What the learning rate of a score head, or of maps of hidden states, is multiplied by."""
    if value_share(recipe) is not None:
        return value_rate(recipe)
    trained = (sections.BradleyTerry, sections.Stepwise, HiddenStates)
    return next((term.rate_ratio for term in recipe.objective or () if isinstance(term, trained)), 1.0)


def _reward_section(recipe: Recipe) -> sections.BradleyTerry | sections.Stepwise:
    """The recipe's objective; its rules have made sure that it is one, and of this stage."""
    section, *more = recipe.objective or [sections.BradleyTerry()]
    assert not more and isinstance(section, sections.BradleyTerry | sections.Stepwise), "the rules refuse others"
    return section


def policy_objective(recipe: Recipe) -> PolicyGradient | PpoObjective | Preference | StepPreference:
    """The policy gradient over what rollouts drew, or the terms over pairs of their answers."""
    return preference(recipe) if trains_on_pairs(recipe) else policy_gradient(recipe)


def policy_gradient(recipe: Recipe) -> PolicyGradient | PpoObjective:
    """The policy gradient of the recipe's objective, over what its rollouts drew; with a critic's loss in PPO."""
    section = objective_section(recipe)
    kl = section.kl if section.kl is not None and not section.kl.in_reward else None
    low, high = section.clip_bounds
    settings = PolicyGradientSettings(
        loss=section.loss,
        ratio=section.ratio,
        clip_low=low,
        clip_high=high,
        dual_clip=section.dual_clip,
        sapo_temperatures=section.sapo_temperatures,
        vespo_weights=_vespo_weights(section),
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
    if not isinstance(section, sections.Ppo):
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


def _vespo_weights(section: sections.PolicyGradientSection) -> tuple[GammaWeight, GammaWeight]:
    """Of good answers, and of the others."""
    good, bad = (GammaWeight(k, rate) for k, rate in zip(section.vespo_shapes, section.vespo_rates, strict=True))
    return good, bad


def held_out_rewards(recipe: Recipe, objective: Objective) -> PolicyEvaluation:
    """Held-out prompts are judged by the rewards of the policy's greedy answers."""
    return PolicyEvaluation()


def policy_metrics(recipe: Recipe) -> dict[str, Better]:
    """What evaluations of a policy report that has a better side."""
    parts: dict[str, Better] = {f"reward/{name}": "higher" for name in recipe.reward_weights}
    return {"loss": "lower", "reward": "higher", **parts}


STAGES: dict[str, Stage] = {
    "classify": Stage(
        ImageReader, ClassifierBuilder, likelihood, policy_alone, plain_likelihood, metrics=likelihood_metrics
    ),
    "distill": Stage(
        PackReader,
        DistillationBuilder,
        distillation,
        teacher_models,
        held_out_distillation,
        columns=teacher_columns,
        objective_rate=objective_rate,
        metrics=distillation_metrics,
    ),
    "preference": Stage(
        TreeReader,
        DecoderBuilder,
        preference,
        reference_models,
        columns=reference_columns,
        metrics=preference_metrics,
    ),
    "pretrain": Stage(
        PackReader, DecoderBuilder, likelihood, policy_alone, plain_likelihood, metrics=likelihood_metrics
    ),
    "reward": Stage(
        TreeReader,
        DecoderBuilder,
        reward,
        policy_alone,
        task=reward_task,
        objective_rate=objective_rate,
        metrics=reward_metrics,
    ),
    "rl": Stage(
        PromptReader,
        RolloutBuilder,
        policy_objective,
        models_beside_policy,
        held_out_rewards,
        objective_rate=objective_rate,
        metrics=policy_metrics,
        remarks=RolloutRemarks,
        trained_roles=trained_roles,
    ),
    "sft": Stage(PackReader, DecoderBuilder, likelihood, policy_alone, plain_likelihood, metrics=likelihood_metrics),
}
"""By the name in a recipe's `stage`; sorted. The two stages of language differ in how `data/` renders their rows."""
