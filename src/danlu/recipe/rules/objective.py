"""Rules about the objective: its terms are of the recipe's stage, go together, and read the keys they are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from danlu.recipe.sections import (
    Bco,
    PolicyGradientSection,
    PreferenceTerm,
    Recipe,
    RewardObjective,
    Section,
    terms_of,
)
from danlu.recipe.sections.base import VariantSection
from danlu.recipe.yaml_tree import Problem


def objective_fits_stage(recipe: Recipe) -> Iterator[Problem]:
    """Only stages preference, reward, distill and rl have an objective, and its terms are theirs."""
    objective = recipe.objective
    if recipe.stage not in ("preference", "reward", "distill", "rl"):
        if objective:
            stages = " or ".join(dict.fromkeys(_stage_of(term) for term in objective))
            message = f"not read with stage {recipe.stage}: an objective of stage {stages}. Set stage, or leave it out"
            yield Problem("objective", message, reads=("stage",))
        return
    if objective is not None and not objective:
        yield Problem("objective", "empty: give at least one kind, or leave it out for the stage's own")
        return
    for index, term in enumerate(objective or ()):
        if (stage := _stage_of(term)) != recipe.stage and not (recipe.stage == "rl" and stage == "preference"):
            message = f"{_kind(term)} is an objective of stage {stage}, not of stage {recipe.stage}"
            yield Problem(f"objective.{index}.kind", message, reads=("stage",))
    of_pairs = recipe.stage == "rl" and all(isinstance(term, PreferenceTerm) for term in objective or ())
    if recipe.stage in ("reward", "rl") and len(objective or ()) > 1 and not of_pairs:
        message = f"{len(objective or ())} terms: stage {recipe.stage} has one. Give one"
        yield Problem("objective", message, reads=("stage",))


def preference_terms_go_together(recipe: Recipe) -> Iterator[Problem]:
    """The terms of a sum are over the same kind of rows, and some of them count."""
    terms = terms_of(recipe.objective)
    paired = next((term for term in terms if "unpaired" not in term.row_types), None)
    for index, term in enumerate(terms):
        if recipe.stage == "rl" and "preference" not in term.row_types:
            message = (
                f"{term.kind} takes answers judged one by one, and stage rl compares the best and the worst answer to "
                "each prompt. Use a kind of pairs, such as sigmoid"
            )
            yield Problem(f"objective.{index}.kind", message, reads=("stage",))
            continue
        if paired is not None and "preference" not in term.row_types:
            message = (
                f"{term.kind} takes answers judged one by one, {paired.kind} pairs of answers: a run has rows of one "
                "kind. Leave one of both out"
            )
            yield Problem(f"objective.{index}.kind", message)
    if terms and not any(term.weight for term in terms):
        yield Problem("objective", "every weight is 0: nothing would be learnt. Give one term a weight above 0")


def term_reads_its_keys(recipe: Recipe) -> Iterator[Problem]:
    """Keys of a term go together."""
    for index, term in enumerate(terms_of(recipe.objective)):
        if isinstance(term, Bco) and term.shift != "none" and term.ld_alpha is not None:
            message = "the running mean of rewards is one of whole answers. Use shift: none, or leave it out"
            yield Problem(f"objective.{index}.ld_alpha", message, reads=(f"objective.{index}.shift",))


def _stage_of(term: Section) -> str:
    if isinstance(term, PreferenceTerm):
        return "preference"
    if isinstance(term, PolicyGradientSection):
        return "rl"
    return "reward" if isinstance(term, get_args(RewardObjective)) else "distill"


def _kind(term: Section) -> str:
    return term.kind if isinstance(term, VariantSection) else type(term).__name__
