"""The likelihood of rows, as stages pretrain, sft and classify train on it."""

from __future__ import annotations

from danlu.core.types import Objective
from danlu.data.sources import reported_sources
from danlu.objectives.cross_entropy import CrossEntropy
from danlu.recipe import Recipe
from danlu.recipe.sections import LossOptions
from danlu.stages.protocols import Better


def likelihood(recipe: Recipe) -> CrossEntropy:
    """The cross-entropy with the extras of the recipe's `loss`; with extras the plain likelihood is reported too."""
    loss = recipe.loss
    return CrossEntropy(loss.label_smoothing, loss.z_loss, reports_nll=loss != LossOptions())


def plain_likelihood(recipe: Recipe, objective: Objective) -> CrossEntropy:
    """The cross-entropy of held-out rows: label smoothing and z-loss take no part."""
    return CrossEntropy(reports_nll=True)


def likelihood_metrics(recipe: Recipe) -> dict[str, Better]:
    """Metrics of evaluations by the likelihood: the loss of each source too, where there are several."""
    by_source: dict[str, Better] = {f"loss/{name}": "lower" for name in reported_sources(recipe.data)}
    return {"loss": "lower", "perplexity": "lower", "accuracy": "higher", **by_source}
