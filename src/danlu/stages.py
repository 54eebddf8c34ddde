"""One row for each stage of training: the table to add a new one to."""

from __future__ import annotations

from danlu.data.sources import reported_sources
from danlu.images.classifier import ClassifierBuilder
from danlu.images.reader import ImageReader
from danlu.language.builder import DecoderBuilder
from danlu.language.distillation import (
    DistillationBuilder,
    distillation,
    held_out_distillation,
    teacher_columns,
    teacher_models,
)
from danlu.language.initial_score_head import first_score_head
from danlu.language.reader import PackReader
from danlu.language.reference import REFERENCE, reference_columns, reference_models
from danlu.language.tree_reader import TreeReader
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.objectives.preference import Preference, preference_objective
from danlu.objectives.reward import BradleyTerry, Stepwise
from danlu.objectives.step_preference import StepPreference
from danlu.recipe import Recipe, sections
from danlu.recipe.sections import HiddenStates, LossOptions, terms_of
from danlu.stage_protocols import Better, Stage, policy_alone
from danlu.types import Objective, Task


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
        return Stepwise(first_score_head(recipe, 2, bias=True))
    return BradleyTerry(first_score_head(recipe, 1, bias=False), section.centring)


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
    trained = (sections.BradleyTerry, sections.Stepwise, HiddenStates)
    return next((term.rate_ratio for term in recipe.objective or () if isinstance(term, trained)), 1.0)


def _reward_section(recipe: Recipe) -> sections.BradleyTerry | sections.Stepwise:
    """The recipe's objective; its rules have made sure that it is one, and of this stage."""
    section, *more = recipe.objective or [sections.BradleyTerry()]
    assert not more and isinstance(section, sections.BradleyTerry | sections.Stepwise), "the rules refuse others"
    return section


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
    "sft": Stage(PackReader, DecoderBuilder, likelihood, policy_alone, plain_likelihood, metrics=likelihood_metrics),
}
"""By the name in a recipe's `stage`; sorted. The two stages of language differ in how `data/` renders their rows."""
