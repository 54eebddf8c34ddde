"""The evolutionary search for LongRoPE's factors (arXiv:2402.13753, algorithm 1), as functions of numbers.

A candidate is one factor for each rotated pair, the fastest pair first; factors never fall from one pair to the next,
since slower pairs have seen less of their turn and are interpolated more. A `judge`, a function given by the caller,
returns the loss of a candidate. No torch.

Of the paper's algorithm one thing is left out: the number of first tokens that are not scaled. No config.json can say
it, and neither transformers nor vLLM would compute it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from danlu.models.rope_config import Rope
from danlu.recipe.sections import LongRopeSearch

Candidate = tuple[float, ...]
Judge = Callable[[int, Candidate], float]
"""(generation, candidate) -> its loss, the lower the better."""

DIGITS = 2
"""Decimal places of factors, the step of 0.01 that the paper searches in."""
STRETCH = 1.25
"""Factors are at most this much larger than the factor of the length (paper, table 4)."""


def search(rope: Rope, original: int, length: int, settings: LongRopeSearch, seed: int, judge: Judge) -> Candidate:
    """Returns the best candidate found for documents of `length` tokens, of a model trained at `original`.

    The first generation is linear scaling, NTK-aware scaling and YaRN with mutations of these; each later one has
    mutations and crossovers of the best `parents` of all that came before. No candidate is judged twice. The result
    follows from the arguments and the losses of `judge`, so that a judge that caches its losses resumes an interrupted
    search.
    """
    losses: dict[Candidate, float] = {}
    for generation in range(settings.generations + 1):
        if generation == 0:
            candidates = list(_first(rope, original, length, settings.population, seed))
        else:
            ranked = sorted(losses, key=lambda candidate: (losses[candidate], candidate))
            candidates = list(_next(ranked[: settings.parents], generation, length / original, settings, seed))
        for candidate in candidates:
            if candidate not in losses:
                losses[candidate] = judge(generation, candidate)
    return min(losses, key=lambda candidate: (losses[candidate], candidate))


def count(settings: LongRopeSearch) -> int:
    """The most candidates that a search judges."""
    return settings.population + settings.generations * (settings.mutations + settings.crossovers)


def known_methods(rope: Rope, original: int, length: int) -> list[Candidate]:
    """Linear scaling, NTK-aware scaling and YaRN (with its usual ramp, 1 to 32 turns) as factors of each pair."""
    factor, pairs = length / original, rope.dim // 2
    exponents = np.arange(pairs) / max(1, pairs - 1)
    periods = 2 * math.pi * rope.theta ** (2 * np.arange(pairs) / rope.dim)  # tokens of a turn
    kept = np.clip((original / periods - 1) / (32 - 1), 0, 1)  # 1 where a pair turns 32 times and more
    yarn = 1 / (kept + (1 - kept) / factor)
    return [_rounded(each, factor) for each in (np.full(pairs, factor), factor**exponents, yarn)]


def _first(rope: Rope, original: int, length: int, population: int, seed: int) -> Iterator[Candidate]:
    known = known_methods(rope, original, length)[:population]
    yield from known
    for number in range(population - len(known)):
        random = np.random.default_rng([seed, 0, number])
        yield mutated(known[number % len(known)], 0.3, length / original, random)


def _next(
    parents: Sequence[Candidate], generation: int, factor: float, settings: LongRopeSearch, seed: int
) -> Iterator[Candidate]:
    for number in range(settings.mutations):
        random = np.random.default_rng([seed, generation, number])
        yield mutated(parents[int(random.integers(len(parents)))], settings.probability, factor, random)
    for number in range(settings.crossovers):
        random = np.random.default_rng([seed, generation, settings.mutations + number])
        first, second = random.choice(len(parents), 2, replace=len(parents) < 2)
        yield crossed(parents[int(first)], parents[int(second)], settings.probability, random)


def mutated(parent: Candidate, probability: float, factor: float, random: np.random.Generator) -> Candidate:
    """Returns the parent with some factors redrawn, each between the one before it and the parent's one behind it.

    At least one is drawn: the parent itself has been judged before.
    """
    drawn = random.random(len(parent)) < probability
    drawn[int(random.integers(len(parent)))] = True
    child = np.array(parent)
    for pair in np.flatnonzero(drawn).tolist():
        lowest = child[pair - 1] if pair else 1.0
        highest = parent[pair + 1] if pair + 1 < len(parent) else max(STRETCH * factor, lowest)
        child[pair] = random.uniform(lowest, max(lowest, highest))
    return _rounded(child, factor)


def crossed(first: Candidate, second: Candidate, probability: float, random: np.random.Generator) -> Candidate:
    """Each factor from one of two parents; where that falls from one pair to the next, the larger one stays."""
    taken = random.random(len(first)) < probability
    child = np.where(taken, second, first)
    return tuple(np.maximum.accumulate(child).tolist())


def _rounded(factors: np.ndarray, factor: float) -> Candidate:
    """Rounds factors to the steps of the search, within its bounds, and never falling."""
    bounded = np.clip(np.round(factors, DIGITS), 1.0, round(STRETCH * factor, DIGITS))
    return tuple(float(value) for value in np.round(np.maximum.accumulate(bounded), DIGITS))
