"""Made rows of judged answers for a verification: trees of random tokens, with labels and margins; a function of a
seed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from danlu.core.types import Branch, Pack, Sample
from danlu.recipe.sections.base import RowType

SHORTEST = 3  # tokens of a branch


def synthetic_trees(
    row_type: RowType, count: int, *, max_length: int, vocab_size: int, seed: int, mismatched: bool = False
) -> list[Pack]:
    """Makes `count` rows, each a pack of its own, with at most `max_length` tokens in a path from root to leaf.

    mismatched: answers that were judged alone have another answer to their prompt in the same tree, without targets.
    """
    make = _MAKERS[row_type]
    packs = []
    for number in range(count):
        random = np.random.default_rng([seed, number])
        lengths, parents, facts = make(random, max(4 * SHORTEST, max_length), number, mismatched)
        stops = np.cumsum(lengths).tolist()
        branches = tuple(map(Branch, parents, [0, *stops[:-1]], stops))
        weights = np.ones(stops[-1], np.float32)
        untrained = facts.get("mismatched", np.zeros(len(branches))) == 1
        for branch, is_untrained in zip(branches, untrained, strict=True):
            if branch.parent < 0 or is_untrained:
                weights[branch.start : branch.stop] = 0
        tokens = random.integers(0, vocab_size, stops[-1]).astype(np.int32)
        packs.append(Pack((Sample(tokens, weights, f"synthetic row {number}", branches=branches, facts=facts),)))
    return packs


TreeParts = tuple[list[int], list[int], dict[str, np.ndarray]]
"""The parts of a tree: (length of each branch, its parent, facts [branches])."""


def _pair(random: np.random.Generator, max_length: int, number: int, mismatched: bool) -> TreeParts:
    """Makes a prompt with a chosen and a rejected answer; every second row has a margin."""
    stem = int(random.integers(SHORTEST, max_length // 2))
    answers = random.integers(SHORTEST, max_length - stem + 1, 2).tolist()
    margin = float(random.random()) if number % 2 else math.nan
    return [stem, *answers], [-1, 0, 0], {"label": _facts(1, 0), "margin": _facts(margin, margin)}


def _judged(random: np.random.Generator, max_length: int, number: int, mismatched: bool) -> TreeParts:
    """Makes a prompt with an answer, desirable or not in turn."""
    count = 1 + mismatched
    stem = int(random.integers(SHORTEST, max_length // 2))
    answers = random.integers(SHORTEST, max_length - stem + 1, count).tolist()
    label = float(number % 2 == 0)
    if not mismatched:
        return [stem, *answers], [-1, 0], {"label": _facts(label)}
    facts = {"label": _facts(label, math.nan), "mismatched": np.array([0, 0, 1], np.float32)}
    return [stem, *answers], [-1, 0, 0], facts


def _steps(random: np.random.Generator, max_length: int, number: int, mismatched: bool) -> TreeParts:
    """A prompt and a chain of one to three steps, right or wrong."""
    count = int(random.integers(1, 4))
    lengths = random.integers(SHORTEST, max(SHORTEST, max_length // 4) + 1, count + 1).tolist()
    return lengths, list(range(-1, count)), {"label": _facts(*random.integers(0, 2, count).tolist())}


def _facts(*of_answers: float) -> np.ndarray:
    """Makes a fact of a prompt's answers; the prompt has none."""
    return np.array([math.nan, *of_answers], np.float32)


_MAKERS: dict[RowType, Callable[[np.random.Generator, int, int, bool], TreeParts]] = {
    "preference": _pair,
    "stepwise": _steps,
    "unpaired": _judged,
}
