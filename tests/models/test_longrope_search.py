"""The search for LongRoPE's factors: its candidates keep the paper's constraints, and it finds what can be found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from danlu.models.longrope_search import Candidate, count, crossed, known_methods, mutated, search
from danlu.models.rope import inverse_frequencies
from danlu.models.rope_config import LinearScaling, LongRopeScaling, Rope, ntk_theta
from danlu.recipe.sections import LongRopeSearch

ORIGINAL, LENGTH = 64, 512
ROPE = Rope(10000.0, 16, ORIGINAL)
SETTINGS = LongRopeSearch(population=16, parents=8, mutations=8, crossovers=8, generations=30)
WANTED = np.array([1.0, 1.5, 2.0, 2.0, 4.0, 6.0, 7.0, 9.0])


def distance(candidate: Candidate) -> float:
    return float(np.abs(np.log(np.array(candidate) / WANTED)).sum())


def is_valid(candidate: Candidate) -> bool:
    factors = np.array(candidate)
    return bool((np.diff(factors) >= 0).all() and factors[0] >= 1 and factors[-1] <= 10) and len(candidate) == 8


def test_it_finds_what_the_known_methods_do_not_have() -> None:
    judged: list[Candidate] = []
    best = search(ROPE, ORIGINAL, LENGTH, SETTINGS, 0, lambda generation, each: judged.append(each) or distance(each))
    assert all(map(is_valid, judged))
    assert len(judged) == len(set(judged)) <= count(SETTINGS)
    assert (
        distance(best) == min(map(distance, judged)) < 0.25 * min(map(distance, known_methods(ROPE, ORIGINAL, LENGTH)))
    )


def test_it_follows_from_the_seed() -> None:
    def judged(seed: int) -> list[Candidate]:
        found: list[Candidate] = []
        search(ROPE, ORIGINAL, LENGTH, SETTINGS, seed, lambda generation, each: found.append(each) or distance(each))
        return found

    assert judged(3) == judged(3)
    assert judged(3) != judged(4)


def test_the_first_candidates_are_the_known_methods() -> None:
    linear, ntk, yarn = known_methods(ROPE, ORIGINAL, LENGTH)
    plain = inverse_frequencies(ROPE)

    def frequencies(candidate: Candidate) -> torch.Tensor:
        rope = Rope(ROPE.theta, ROPE.dim, LENGTH, LongRopeScaling(candidate, candidate, ORIGINAL, 8.0))
        return inverse_frequencies(rope, torch.tensor([LENGTH]))[0]

    torch.testing.assert_close(frequencies(linear), inverse_frequencies(Rope(10000.0, 16, 64, LinearScaling(8.0))))
    by_base = inverse_frequencies(Rope(ntk_theta(10000.0, 16, 8.0), 16, 64))
    torch.testing.assert_close(frequencies(ntk), by_base, rtol=0.01, atol=0)  # factors have two decimal places
    assert yarn[0] < 3 < yarn[-1] == 8.0
    assert not torch.allclose(frequencies(ntk), plain / 8, rtol=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_children_never_fall(seed: int) -> None:
    random = np.random.default_rng(seed)
    linear, ntk, _ = known_methods(ROPE, ORIGINAL, LENGTH)
    child = mutated(ntk, 0.5, LENGTH / ORIGINAL, random)
    assert is_valid(child) and child != ntk
    both = crossed(linear, child, 0.5, random)
    assert is_valid(both)
    assert set(both) <= set(linear) | set(child)
