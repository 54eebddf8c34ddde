"""Objectives of stage `reward`: a score head on a decoder."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from danlu.recipe.sections.base import NonNegative, RowType, VariantSection


class _ScoreHead(VariantSection):
    rate_ratio: Annotated[float, Field(gt=0)] = 1.0
    """The score head learns this many times faster than `optimizer.learning_rate` says."""


class BradleyTerry(_ScoreHead):
    """-log sigmoid(score of the chosen answer - score of the rejected one - margin) (arXiv:2203.02155, equation 1)."""

    row_types: ClassVar[tuple[RowType, ...]] = ("preference",)
    needs_mismatched: ClassVar[bool] = False
    takes_margins: ClassVar[bool] = True
    kind: Literal["bradley-terry"] = "bradley-terry"
    centring: NonNegative = 0.0
    """Weight of the squared sum of both scores, which keeps them around 0 (arXiv:2312.09244, section 3)."""


class Stepwise(_ScoreHead):
    """Process reward: whether each step of an answer is right, a binary cross-entropy at its last token
    (arXiv:2305.20050)."""

    row_types: ClassVar[tuple[RowType, ...]] = ("stepwise",)
    needs_mismatched: ClassVar[bool] = False
    takes_margins: ClassVar[bool] = False
    kind: Literal["stepwise"] = "stepwise"


RewardObjective = BradleyTerry | Stepwise
