"""Statistics of many rewards: means with their errors, how likely one of k answers is right, and why some lack."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from danlu.rewards.runner import RewardPart


def pass_at_k(count: int, right: int, k: int) -> float:
    """The chance that at least one of k answers is right, where `right` of `count` drawn ones are.

    The unbiased estimate 1 - C(count - right, k) / C(count, k) of Chen et al. (arXiv:2107.03374, sec. 2.1), over all
    choices of k of the answers; 1 - (1 - right / count)^k would be too low.
    """
    assert 0 <= right <= count and 1 <= k <= count, f"{right} of {count}, k {k}"
    return 1.0 - math.comb(count - right, k) / math.comb(count, k)


def best_of_k(rewards: Sequence[float], k: int) -> float:
    """The expected highest reward of k of the answers: the mean over all choices of k of them.

    Of n rewards in rising order the i-th is the highest of C(i - 1, k - 1) choices out of C(n, k). Where rewards are 0
    or 1 it is `pass_at_k`.
    """
    count = len(rewards)
    assert 1 <= k <= count, f"{count} rewards, k {k}"
    highest = (math.comb(place, k - 1) * reward for place, reward in enumerate(sorted(rewards)))
    return math.fsum(highest) / math.comb(count, k)


def distinct_failures(failures: Iterable[tuple[str, str]], most: int = 3) -> list[str]:
    """Why rewards were not given, each reason once and the most frequent ones first.

    failures: of each, where it was and why. most: reasons to give; a last entry has all others.
    """
    places: dict[str, list[str]] = {}
    for where, reason in failures:
        places.setdefault(reason, []).append(where)
    ordered = sorted(places.items(), key=lambda each: -len(each[1]))
    messages = [f"{reason} ({_some(where)})" for reason, where in ordered[:most]]
    if others := ordered[most:]:
        messages.append(f"other reasons ({_some([place for _, where in others for place in where])})")
    return messages


def _some(places: Sequence[str]) -> str:
    return places[0] if len(places) == 1 else f"{places[0]}, and {len(places) - 1:,} more"


def summarise(
    parts: Sequence[RewardPart],
    values: np.ndarray,
    prompts: np.ndarray,
    threshold: float | None = None,
    *,
    unjudged: np.ndarray | None = None,
) -> dict[str, dict[str, Any]]:
    """Summarises the rewards of each part, and "sum", their weighted sum, where there are several or a weight is not 1.

    Args:
        values: [M, R] float64, NaN where a reward was not given; an answer's sum is over those that were.
        prompts: [M] int, the number of each answer's prompt.
        unjudged: [M] bool, answers that have no sum although some reward was given, as `RewardTable` says.
        threshold: an answer with at least this reward is right; None: where all rewards are 0 or 1, 1 is right.

    Each has `given` answers with a reward, their `mean`, the `standard_error` of the mean over prompts (None for a
    single prompt), and where answers are right or not `pass_at`, by k from 1 to the answers of a prompt: the mean over
    the prompts with at least k judged answers. `best_at` has likewise the mean of the highest reward of k answers.
    """
    named = {part.name: values[:, number] for number, part in enumerate(parts)}
    if len(parts) > 1 or any(part.weight != 1 for part in parts):
        weights = np.array([part.weight for part in parts])
        without = np.isnan(values).all(axis=1) | (False if unjudged is None else unjudged)
        sums = np.where(without, np.nan, np.nansum(values * weights, axis=1))
        named["sum"] = sums
    return {name: _summary(column, prompts, threshold) for name, column in named.items()}


def _summary(column: np.ndarray, prompts: np.ndarray, threshold: float | None) -> dict[str, Any]:
    given = ~np.isnan(column)
    rewards, of_prompt = column[given], prompts[given]
    summary: dict[str, Any] = {"given": int(given.sum()), "mean": None, "standard_error": None}
    if not len(rewards):
        return summary
    numbers, index = np.unique(of_prompt, return_inverse=True)
    counts = np.bincount(index)
    summary["mean"] = float(rewards.mean())
    if len(numbers) > 1:
        # Answers to one prompt are alike: the spread is that of prompts (the ratio estimate of a cluster sample).
        deviations = np.bincount(index, rewards - rewards.mean())
        variance = (deviations**2).sum() * len(numbers) / (len(numbers) - 1)
        summary["standard_error"] = float(np.sqrt(variance) / len(rewards))
    of_prompts = np.split(rewards[np.argsort(index, kind="stable")], np.cumsum(counts)[:-1])
    by_prompt = [each.tolist() for each in of_prompts]
    summary["best_at"] = {
        k: float(np.mean([best_of_k(each, k) for each in by_prompt if len(each) >= k]))
        for k in range(1, int(counts.max()) + 1)
    }
    if threshold is not None or np.isin(rewards, (0.0, 1.0)).all():
        rights = np.bincount(index, rewards >= (1.0 if threshold is None else threshold)).astype(int)
        summary["pass_at"] = {
            k: float(
                np.mean([pass_at_k(n, c, k) for n, c in zip(counts.tolist(), rights.tolist(), strict=True) if n >= k])
            )
            for k in range(1, int(counts.max()) + 1)
        }
    return summary
