"""Stage `preference`: its objective over pairs or judged answers, and its reference, a frozen model or a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from danlu.core.types import Batch, Outputs, Role, TokenLogprobs
from danlu.data.column_store import ColumnType
from danlu.objectives.preference import Preference, StepPreference, preference_objective
from danlu.recipe import Recipe
from danlu.recipe.roles import REFERENCE, CachedModel, frozen_reference
from danlu.recipe.sections import terms_of
from danlu.stages.protocols import Better, ColumnSpec, FromColumns, RoleSpec


def preference(recipe: Recipe) -> Preference | StepPreference:
    """The weighted sum of the recipe's terms over pairs of answers, or over answers judged alone."""
    return preference_objective(terms_of(recipe.objective), REFERENCE in reference_models(recipe))


def preference_metrics(recipe: Recipe) -> dict[str, Better]:
    """Metrics of evaluations of pairs, or of judged answers."""
    return {"loss": "lower", **Preference(tuple(terms_of(recipe.objective)), True).better}


def reference_models(recipe: Recipe) -> Mapping[Role, RoleSpec]:
    """The reference of a recipe by its role, if it has one."""
    reference = frozen_reference(recipe)
    if reference is None:
        return {}
    return {REFERENCE: FromColumns(_from_column) if isinstance(reference, CachedModel) else reference}


def reference_columns(recipe: Recipe) -> Sequence[ColumnSpec]:
    """The column of a cached reference: the initial policy's log-probability of each token of the answers.

    It is computed by a frozen model with the same weights, unless the adapter that is trained starts with an effect.
    """
    reference = frozen_reference(recipe)
    if not isinstance(reference, CachedModel):
        return ()
    return (ColumnSpec(REFERENCE, reference.model, {REFERENCE: ColumnType("<f4")}, _logprobs),)


def _logprobs(outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
    return {REFERENCE: outputs.logprobs().logprobs}


@dataclass(frozen=True)
class ColumnLogprobs:
    """The stored output of a cached reference: the log-probabilities of the targets. It is an `Outputs` with that
    method alone."""

    batch: Batch

    def logprobs(self, *, temperature: float = 1.0, **others: Any) -> TokenLogprobs:
        """The column `reference` [N]: of the unchanged distribution, without entropies."""
        assert temperature == 1.0 and not any(others.values()), "only log-probabilities are cached"
        return TokenLogprobs(self.batch.columns[REFERENCE])


def _from_column(batch: Batch) -> Outputs:
    return cast(Outputs, ColumnLogprobs(batch))  # objectives ask a reference for nothing else
