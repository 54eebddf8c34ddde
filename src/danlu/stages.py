"""One row for each stage of training: the table to add a new one to."""

from __future__ import annotations

from danlu.data.sources import reported_sources
from danlu.images.classifier import ClassifierBuilder
from danlu.images.reader import ImageReader
from danlu.language.builder import DecoderBuilder
from danlu.language.reader import PackReader
from danlu.language.tree_reader import TreeReader
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.objectives.preference import DPO
from danlu.recipe import Recipe
from danlu.recipe.sections import LossOptions
from danlu.stage_protocols import Better, Stage, policy_alone
from danlu.types import Objective


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


STAGES: dict[str, Stage] = {
    "classify": Stage(
        ImageReader, ClassifierBuilder, likelihood, policy_alone, plain_likelihood, metrics=likelihood_metrics
    ),
    "pretrain": Stage(
        PackReader, DecoderBuilder, likelihood, policy_alone, plain_likelihood, metrics=likelihood_metrics
    ),
    "sft": Stage(PackReader, DecoderBuilder, likelihood, policy_alone, plain_likelihood, metrics=likelihood_metrics),
}
"""By the name in a recipe's `stage`; sorted. The two stages of language differ in how `data/` renders their rows."""
