"""Samples that are trees, with answers of random tokens."""

from __future__ import annotations

import itertools

import numpy as np

from danlu.core.types import Branch, Pack, Sample


def pair(seed: int, stem: int, *answers: int, vocabulary: int = 64) -> Sample:
    """A prompt of `stem` tokens and answers behind it; the first is preferred, of the others none."""
    random = np.random.default_rng(seed)
    ends = np.cumsum([stem, *answers]).tolist()
    branches = (Branch(-1, 0, stem), *(Branch(0, start, stop) for start, stop in itertools.pairwise(ends)))
    weights = random.choice([1.0, 1.0, 0.25], ends[-1]).astype(np.float32)
    weights[:stem] = 0
    label = np.array([np.nan, 1, *[0] * (len(answers) - 1)], np.float32)
    tokens = random.integers(0, vocabulary, ends[-1]).astype(np.int32)
    return Sample(tokens, weights, f"pairs.jsonl:{seed}", "", branches, {}, {"label": label})


def nested(seed: int, vocabulary: int = 64) -> Sample:
    """A prompt with a step that two answers go on from, and a third answer beside it."""
    sample = pair(seed, 9, 4, 6, 5, 3, vocabulary=vocabulary)
    step = sample.branches[1]
    sample.weights[step.start : step.stop] = 0
    _, first, second, third, last = sample.branches
    return Sample(
        sample.tokens, sample.weights, sample.row, "",
        (sample.branches[0], first, second._replace(parent=1), third._replace(parent=1), last),
        {}, {"label": np.array([np.nan, np.nan, 1, 0, np.nan], np.float32)},
    )  # fmt: skip


def trees_of(count: int, packs: int, vocabulary: int = 64) -> list[list[Pack]]:
    """The packs of a few steps, of pairs and deeper trees."""
    samples = [
        nested(n, vocabulary) if n % 3 == 2 else pair(n, 3 + n % 5, 2 + n % 4, 1 + n % 3, vocabulary=vocabulary)
        for n in range(count * packs)
    ]
    return [[Pack((sample,)) for sample in samples[step * packs : (step + 1) * packs]] for step in range(count)]
