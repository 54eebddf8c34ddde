"""Rules about the objective: its terms belong to the recipe's stage, go together, and read their keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from danlu.recipe.sections import (
    Bco,
    Divergence,
    PolicyGradientSection,
    PreferenceTerm,
    RewardObjective,
    Section,
    terms_of,
)
from danlu.recipe.sections.base import VariantSection
from danlu.recipe.yaml_tree import Problem


def objective_fits_stage(objective: Sequence[Section], stage: str) -> Iterator[Problem]:
    """Only stages preference, reward, distill and rl have an objective, and its terms are theirs."""
    if stage not in ("preference", "reward", "distill", "rl"):
        if objective:
            stages = " or ".join(dict.fromkeys(_stage_of(term) for term in objective))
            message = f"not read with stage {stage}: an objective of stage {stages}. Set stage, or leave it out"
            yield Problem("objective", message, reads=("stage",))
        return
    if not objective:
        yield Problem("objective", "empty: give at least one kind, or leave it out for the stage's own")
        return
    for index, term in enumerate(objective):
        own, of_rl = _stage_of(term), isinstance(term, PreferenceTerm | Divergence)
        if own != stage and not (stage == "rl" and of_rl):
            message = f"{_kind(term)} is an objective of stage {own}, not of stage {stage}"
            yield Problem(f"objective.{index}.kind", message, reads=("stage",))
    if stage == "rl":
        yield from _terms_of_rl(objective)
    elif stage == "reward" and len(objective) > 1:
        yield Problem("objective", f"{len(objective)} terms: stage reward has one. Give one", reads=("stage",))


def _terms_of_rl(objective: Sequence[Section]) -> Iterator[Problem]:
    """A policy gradient, and behind it perhaps a divergence from teachers; or terms over pairs of answers."""
    divergences = [index for index, term in enumerate(objective) if isinstance(term, Divergence)]
    others = [term for term in objective if not isinstance(term, Divergence)]
    if len(others) > 1 and not all(isinstance(term, PreferenceTerm) for term in others):
        message = f"{len(others)} terms: stage rl has one policy gradient. Give one"
        yield Problem("objective", message, reads=("stage",))
    for place, index in enumerate(divergences):
        key, kind = f"objective.{index}.kind", _kind(objective[index])
        if place:
            message = f"{kind} next to {_kind(objective[divergences[0]])}: there is one divergence. Leave one out"
            yield Problem(key, message, reads=("objective",))
        elif not others:
            message = (
                f"{kind} is a term next to a policy gradient, as in [grpo, {kind}]. Put one before it; stage: distill "
                "with on_policy learns from a teacher alone"
            )
            yield Problem(key, message, reads=("stage",))
        elif isinstance(others[0], PreferenceTerm):
            message = f"{kind} is a term next to a policy gradient, and {others[0].kind} compares pairs. Leave it out"
            yield Problem(key, message, reads=("objective",))
        elif index == 0:
            yield Problem(key, f"the policy gradient comes first: write [{_kind(others[0])}, {kind}]")


def preference_terms_go_together(objective: Sequence[Section], stage: str) -> Iterator[Problem]:
    """The terms of a sum are over the same kind of rows, some of them count, and the keys of a term go together."""
    terms = terms_of(objective)
    paired = next((term for term in terms if "unpaired" not in term.row_types), None)
    for index, term in enumerate(terms):
        if stage == "rl" and "preference" not in term.row_types:
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
    for index, term in enumerate(terms):
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
