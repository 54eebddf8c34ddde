"""Texts with planted near duplicates, and the Jaccard index of all pairs by plain Python: the oracle of MinHash."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

Pair = tuple[int, int]


def planted_texts(originals: int, copies: int, words: int, seed: int) -> list[str]:
    """Texts of random words, each with some copies of which a random share of words is others; shuffled."""
    draw = random.Random(seed)
    vocabulary = [f"w{number}" for number in range(5000)]
    texts = []
    for _ in range(originals):
        original = draw.choices(vocabulary, k=words)
        texts.append(original)
        for _ in range(copies):
            share = draw.choice([0, 0.005, 0.01, 0.02, 0.04, 0.1])
            texts.append([draw.choice(vocabulary) if draw.random() < share else word for word in original])
    draw.shuffle(texts)
    return [" ".join(each) for each in texts]


def pairs_with_jaccard(texts: Sequence[str], size: int, at_least: float) -> dict[Pair, float]:
    """The pairs of texts (numbers, the lower first) with this Jaccard index of runs of words or more, and the index."""
    sets = []
    for text in texts:
        words = text.split()
        sets.append({tuple(words[at : at + size]) for at in range(len(words) - size + 1)})
    indices = {}
    for (left, ours), (right, theirs) in combinations(enumerate(sets), 2):
        common = len(ours & theirs)
        if common and common / (len(ours) + len(theirs) - common) >= at_least:
            indices[left, right] = common / (len(ours) + len(theirs) - common)
    return indices
