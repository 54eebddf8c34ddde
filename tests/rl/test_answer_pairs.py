"""Pairs of a rollout's answers: which answers are compared, and what is left of their trees."""

from __future__ import annotations

import math

import numpy as np
import pytest

from danlu.core.types import Pack
from danlu.inference.request import Completion
from danlu.objectives.preference import preference_objective
from danlu.recipe.sections import Sigmoid
from danlu.rl.answer_pairs import LABEL, PairEstimator, best_and_worst, with_pair
from danlu.rl.estimators import Judged
from danlu.rl.experience_trees import answer_tree

NAN = math.nan


@pytest.mark.parametrize(
    ("rewards", "pair"),
    [
        ([0.0, 2.0, 1.0], (1, 0)),
        ([1.0, 2.0, 2.0, 1.0], (1, 0)),  # of equal ones the first
        ([NAN, -1.0, 3.0], (2, 1)),
        ([NAN, 1.0, NAN], None),
        ([NAN, NAN], None),
        ([1.0, 1.0], None),
        ([0.1 + 0.2, 0.3], None),  # equal but for rounding
    ],
)
def test_the_best_is_compared_with_the_worst(rewards: list[float], pair: tuple[int, int] | None) -> None:
    assert best_and_worst(np.array(rewards)) == pair


def tree(number: int, rewards: list[float]) -> Pack:
    """A prompt of three tokens, and answers of one, two, ... tokens."""
    tokens = [[100 * number + 10 * sample + place for place in range(sample + 1)] for sample in range(len(rewards))]
    completions = [
        Completion(number, sample, ids, [-1.0] * len(ids), [-1.0] * len(ids), None, [0] * len(ids), "", "stop")
        for sample, ids in enumerate(tokens)
    ]
    lengths = [float(len(ids)) for ids in tokens]
    facts = {"reward": rewards, "reward/one": rewards, "length": lengths, "truncated": [0.0] * len(rewards)}
    return answer_tree([7, 8, 9], completions, f"row {number}", facts)


def test_a_tree_is_cut_down_to_its_pair() -> None:
    sample = with_pair(tree(1, [1.0, 5.0, 0.0]), (1, 2)).samples[0]
    assert sample.tokens.tolist() == [7, 8, 9, 110, 111, 120, 121, 122]
    assert [tuple(branch) for branch in sample.branches] == [(-1, 0, 3), (0, 3, 5), (0, 5, 8)]
    assert sample.weights.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert sample.facts[LABEL].tolist()[1:] == [1, 0] and math.isnan(sample.facts[LABEL][0])
    assert sample.facts["reward"].tolist()[1:] == [5, 0] and len(sample.columns["sampled"]) == 8
    turned = with_pair(tree(1, [1.0, 5.0, 0.0]), (2, 0)).samples[0]  # the chosen answer comes first
    assert turned.tokens.tolist() == [7, 8, 9, 120, 121, 122, 100]
    assert with_pair(tree(1, [1.0, 1.0]), None).samples[0].tokens.tolist() == [7, 8, 9]


def judged(rewards: list[list[float]]) -> Judged:
    items = [tree(number, of_prompt) for number, of_prompt in enumerate(rewards)]
    flat = np.array([reward for of_prompt in rewards for reward in of_prompt])
    lengths = np.tile(np.arange(len(rewards[0])) + 1, len(rewards))
    groups = np.repeat(np.arange(len(rewards)), len(rewards[0]))
    return Judged(items, flat[:, None], [1.0], groups, lengths, np.zeros(len(flat), bool))


def test_prompts_without_signal_are_left_out_of_every_divisor() -> None:
    items, metrics = PairEstimator().estimate(judged([[0.0, 1.0, 4.0], [2.0, 2.0, 2.0], [NAN, 3.0, 1.0]]))
    assert metrics == {"pairs": 2.0, "length": 2.0, "truncated": 0.0, "reward": 15 / 8, "reward/one": 15 / 8}
    assert [item.samples[0].tokens.tolist()[3:] for item in items] == [[20, 21, 22, 0], [], [210, 211, 220, 221, 222]]
    assert [item.weight for item in items] == [4, 0, 5]
    divisors = preference_objective([Sigmoid()], False).divisors(items)
    assert divisors == {"chosen": 2, "rejected": 2, "chosen_tokens": 5}
    nothing, metrics = PairEstimator().estimate(judged([[NAN, NAN], [1.0, 1.0]]))
    assert metrics["pairs"] == 0 and metrics["reward"] == 1 and all(item.weight == 0 for item in nothing)
