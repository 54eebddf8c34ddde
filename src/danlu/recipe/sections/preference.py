"""Objectives of stage `preference`: what is learnt from answers that were preferred to others, or judged alone."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from danlu.recipe.sections.base import NonNegative, VariantSection


class PreferenceTerm(VariantSection):
    """A term of the objective of stage `preference`; several are added up."""

    weight: NonNegative = 1.0
    """What the term is multiplied by in the sum."""


class Sigmoid(PreferenceTerm):
    """Direct preference optimization (DPO, arXiv:2305.18290): -log sigmoid of beta x margin of the log-ratios."""

    kind: Literal["sigmoid"] = "sigmoid"
    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is held to the reference: the inverse temperature of the implicit reward."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of labels that are taken to be flipped (cDPO)."""


class Sft(PreferenceTerm):
    """The mean negative log-likelihood of the chosen answers' tokens, as in RPO and with `pref_ftx`."""

    kind: Literal["sft"] = "sft"


PreferenceObjective = Sigmoid | Sft
