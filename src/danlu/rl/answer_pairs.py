"""The best and the worst of a prompt's answers as a pair that preference losses compare (online DPO, arXiv:2402.04792).

S tokens of a tree
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from danlu.core.types import Branch, Pack
from danlu.objectives.branches import CHOSEN, REJECTED
from danlu.rl.estimators import Estimator, Judged

LABEL = "label"
"""Fact of a branch: `CHOSEN`, `REJECTED`, NaN for one that is no answer of a pair."""
SMALLEST_DIFFERENCE = 1e-9
"""Rewards that are nearer to each other count as equal, as they do where prompts without signal are counted."""


class PairEstimator(Estimator):
    """An estimator that adds no columns of tokens: it keeps a pair of each prompt's answers.

    Of answers with equal rewards the first is taken. A prompt has no pair if its answers all have the same reward, or
    if fewer than two have any: nothing of it is trained, or counted in a divisor.
    """

    facts = (LABEL,)

    def estimate(self, judged: Judged) -> tuple[list[Pack], dict[str, float]]:
        """Trees of a prompt with its chosen and its rejected answer; the metrics are of all answers."""
        total = judged.total.numpy()
        items = []
        for number, item in enumerate(judged.items):
            answers = [answer for answer, _ in judged.answers(number)]
            items.append(with_pair(item, best_and_worst(total[answers])))
        pairs = sum(len(item.samples[0].branches) > 1 for item in items)
        return items, {"pairs": float(pairs), **_of_answers(judged.items)}


def best_and_worst(rewards: np.ndarray) -> tuple[int, int] | None:
    """The places of the highest and of the lowest of rewards [answers], NaN where there is none; None if all are equal,
    or fewer than two are there."""
    if np.isnan(rewards).all():
        return None
    best, worst = int(np.nanargmax(rewards)), int(np.nanargmin(rewards))
    return (best, worst) if rewards[best] - rewards[worst] > SMALLEST_DIFFERENCE else None


def with_pair(item: Pack, pair: tuple[int, int] | None) -> Pack:
    """A prompt's tree with these two of its answers alone, labelled chosen and rejected; without a pair the prompt."""
    (sample,) = item.samples
    numbers = [0, *(1 + place for place in pair or ())]
    kept = np.concatenate(
        [np.arange(sample.branches[number].start, sample.branches[number].stop) for number in numbers]
    )
    stops = np.cumsum([sample.branches[number].stop - sample.branches[number].start for number in numbers]).tolist()
    branches = [
        Branch(-1 if place == 0 else 0, start, stop)
        for place, (start, stop) in enumerate(zip([0, *stops], stops, strict=False))
    ]
    cut = sample.rearranged(kept, branches, numbers)
    labels = [np.nan, CHOSEN, REJECTED][: len(numbers)]
    return Pack((replace(cut, facts={**cut.facts, LABEL: np.array(labels, np.float32)}),))


def _of_answers(items: Sequence[Pack]) -> dict[str, float]:
    """Means over all answers of a rollout that have the fact: rewards, lengths, the truncated."""
    facts = items[0].samples[0].facts
    names = ["length", "truncated", *(name for name in facts if name.split("/")[0] == "reward")]
    values = {
        name: np.concatenate([item.samples[0].facts[name] for item in items]).astype(np.float64) for name in names
    }
    return {name: float(np.nanmean(each)) for name, each in values.items() if not np.isnan(each).all()}
