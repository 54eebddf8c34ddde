"""The rewards of stage rl on answers that a synthesis has made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from danlu.core.errors import DataError, RecipeError
from danlu.production.synthesis.candidates import Candidate
from danlu.production.synthesis.steps import Rewards
from danlu.recipe.sections import RewardLimits
from danlu.rewards.build import build_rewards, check_columns, check_functions
from danlu.rewards.protocol import JudgedAnswer
from danlu.rewards.runner import RewardRunner

if TYPE_CHECKING:
    from danlu.recipe.sections.synthesis import RejectionStep

AT_A_TIME = 128
"""Answers that are judged together."""


def rewards_of(step: RejectionStep, seeds: Sequence[Candidate], key: str) -> Rewards:
    """The weighted sum of a step's rewards for answers; None where one of them has no number.

    Raises RecipeError for rewards that cannot be built, DataError for seeds that lack a column that they read.
    """
    try:
        parts = build_rewards(step.rewards)
    except RecipeError as error:
        raise RecipeError([f"{key}.{problem}" for problem in error.problems]) from None
    check_functions(parts, RewardLimits())
    problems = list[str]()
    for seed in seeds:
        try:
            check_columns(parts, seed.given, seed.where)
        except DataError as error:
            problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - 5:,} rows more"] if len(problems) > 5 else []
        raise DataError("\n  ".join([*problems[:5], *more]))

    def rewards(candidates: Sequence[Candidate]) -> list[float | None]:
        sums = list[float | None]()
        with RewardRunner(parts) as runner:
            for start in range(0, len(candidates), AT_A_TIME):
                answers = [_judged(each) for each in candidates[start : start + AT_A_TIME]]
                table = runner.score(answers)
                # A reward that declines (None of a function) leaves out its part, one that fails leaves no sum.
                weighted = np.nan_to_num(table.values) @ np.array([part.weight for part in parts])
                sums += [
                    None if is_unjudged else float(value)
                    for is_unjudged, value in zip(table.unjudged, weighted, strict=True)
                ]
        return sums

    return rewards


def _judged(candidate: Candidate) -> JudgedAnswer:
    messages = [{"role": part.role, "content": part.text} for part in candidate.prompt]
    return JudgedAnswer(candidate.answer or "", candidate.given, messages)
