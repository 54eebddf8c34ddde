"""The objective of stage preference, over pairs of answers or over answers that are judged alone."""

from __future__ import annotations

from danlu.objectives.preference import Preference, StepPreference, preference_objective
from danlu.recipe import Recipe
from danlu.recipe.sections import terms_of
from danlu.stages.protocols import Better
from danlu.stages.reference import REFERENCE, reference_models


def preference(recipe: Recipe) -> Preference | StepPreference:
    """The weighted sum of the recipe's terms over pairs of answers, or over answers judged alone."""
    return preference_objective(terms_of(recipe.objective), REFERENCE in reference_models(recipe))


def preference_metrics(recipe: Recipe) -> dict[str, Better]:
    """Metrics of evaluations of pairs, or of judged answers."""
    return {"loss": "lower", **Preference(tuple(terms_of(recipe.objective)), True).better}
