"""Warnings, before a run begins, about data that teach something else than what is meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from danlu.data.prompts import Prompt
from danlu.data.samples import Samples
from danlu.data.thoughts import THOUGHTS, opened_thought
from danlu.data.tokenizer import Tokenizer
from danlu.objectives.branches import CHOSEN, REJECTED
from danlu.recipe.sections import FormatReward, JudgedTerm, Recipe

COUNTED_ROWS = 10_000
"""Rows of which the answers are counted."""
LARGEST_RATIO = 2.0
"""The weights of desirable and undesirable answers may differ by this factor without a remark."""
PROMPT_END = 32
"""The last tokens of a prompt that are read for a thought which it opens."""


def balance_lines(recipe: Recipe, samples: Samples) -> Iterator[str]:
    """Warns of judged answers of which one kind weighs much more than the other.

    The KTO paper (arXiv:2402.01306, section 4.2) has the product of weight and number of desirable answers between 1
    and 4/3 of that of undesirable ones.
    """
    terms = [term for term in recipe.objective or () if isinstance(term, JudgedTerm)]
    if not terms:
        return
    rows = min(len(samples), COUNTED_ROWS)
    labels = np.concatenate([samples.sample(number).facts["label"] for number in range(rows)])
    desirable, undesirable = int((labels == CHOSEN).sum()), int((labels == REJECTED).sum())
    for term in terms:
        good, bad = term.desirable * desirable, term.undesirable * undesirable
        if not (good and bad) or 1 / LARGEST_RATIO < good / bad < LARGEST_RATIO:
            continue
        key, value = ("undesirable", good / undesirable) if good > bad else ("desirable", bad / desirable)
        yield (
            f"objective {term.kind}: {desirable:,} desirable and {undesirable:,} undesirable answers weigh {good:g} : "
            f"{bad:g}, and the rarer kind teaches little next to the other. Set objective: {{kind: {term.kind}, {key}: "
            f"{value:.3g}}} for 1 : 1"
        )


def thought_lines(recipe: Recipe, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Iterator[str]:
    """Warns of a format reward that asks for the beginning of a thought which the prompt has opened already."""
    opened = opened_thought(tokenizer.decode(prompts[0].tokens[-PROMPT_END:]))
    for index, reward in enumerate(recipe.rewards or ()):
        if opened is not None and isinstance(reward, FormatReward) and opened in reward.pattern.replace("\\", ""):
            yield (
                f"rewards.{index} (format): the pattern asks for {opened}, with which the prompt ends: answers go on "
                f"behind it and do not have it. Leave it out of the pattern, up to {THOUGHTS[opened]}"
            )
