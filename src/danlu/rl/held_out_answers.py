"""Answers to held-out prompts, for an evaluation: drawn and rewarded like those that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from danlu.core.types import Pack
from danlu.data.prompts import Prompt
from danlu.rl.experience import Experience
from danlu.rl.rollout_sampler import EVALUATION_NUMBERS


class HeldOutAnswers:
    """The items of an evaluation: each prompt with one greedy answer, so that two evaluations differ by the weights.

    Their numbers are their own: an evaluation leaves the draws of training as they are.
    """

    def __init__(self, experience: Experience, prompts: Sequence[Prompt]) -> None:
        self._experience, self._prompts = experience, tuple(prompts)
        settings = experience.settings
        self._sampling = replace(settings.sampling, temperature=0.0)

    def __call__(self) -> list[Pack]:
        """Items of the policy as it is now."""
        numbers = range(EVALUATION_NUMBERS, EVALUATION_NUMBERS + len(self._prompts))
        return self._experience.judged_items(list(numbers), self._prompts, self._sampling)
