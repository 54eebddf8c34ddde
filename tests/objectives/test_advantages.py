"""Advantages against the formulas written out, group by group, and against the textbook's recursion."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from textbook import policy_gradient

from danlu.objectives.advantages import (
    answer_advantages,
    combined_advantages,
    generalized_advantages,
    overlong_penalty,
    whitened,
)

NAN = float("nan")
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.5, 0.25, 2.0, 2.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 3, 3, 3, 9, 9])


def by_group(formula):
    """A function of the rewards of one group, applied to each group."""
    result = torch.zeros(8, dtype=torch.float64)
    for group in GROUPS.unique():
        rows = group == GROUPS
        result[rows] = formula(REWARDS[rows])
    return result


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, lambda: by_group(lambda r: (r - r.mean()) / (r.std() + 1e-4))),
        ({"scale": "none"}, lambda: by_group(lambda r: r - r.mean())),
        ({"scale": "mean"}, lambda: by_group(lambda r: (r - r.mean()) / max(r.mean(), 0.1))),
        ({"scale": "batch"}, lambda: by_group(lambda r: r - r.mean()) / (REWARDS.std() + 1e-4)),
        ({"baseline": "leave-one-out", "scale": "none"}, lambda: by_group(lambda r: r - (r.sum() - r) / (len(r) - 1))),
        ({"baseline": "batch", "scale": "batch"}, lambda: (REWARDS - REWARDS.mean()) / (REWARDS.std() + 1e-4)),
        ({"baseline": "none", "scale": "none"}, lambda: REWARDS),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_the_formulas(options, expected):
    advantages = answer_advantages(REWARDS, GROUPS, **options)
    torch.testing.assert_close(advantages, expected(), rtol=1e-12, atol=1e-12)
    if options.get("baseline") != "batch" and options.get("baseline") != "none":
        other = answer_advantages(REWARDS, torch.tensor([7, 7, 3, 3, 3, 9, 9, 9]), **options)
        assert not torch.allclose(advantages, other)  # groups matter


def test_equal_rewards_teach_nothing_and_one_answer_alone_neither():
    for baseline in ("group", "leave-one-out"):
        advantages = answer_advantages(torch.tensor([3.0, 3.0, 5.0]), torch.tensor([0, 0, 1]), baseline=baseline)
        assert advantages.tolist() == [0, 0, 0]


def test_a_mean_near_0_is_no_huge_step():
    rewards = torch.tensor([0.0, 0.0, 0.0, 1e-6, 0.0, 0.0, 0.0, 1.0])
    advantages = answer_advantages(rewards, torch.arange(8) // 4, scale="mean")
    assert advantages[:4].abs().max() < 1e-5
    assert advantages[4:].tolist() == [-1, -1, -1, 3]  # control: a mean of 0.25 is divided by as it is


def test_the_greedy_answer_is_the_baseline():
    greedy = torch.tensor([0.5, 0.5, NAN])
    options = {"baseline": "greedy", "scale": "none", "greedy_rewards": greedy}
    advantages = answer_advantages(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1]), **options)
    assert advantages.tolist() == [0.5, -0.5, 0]


@pytest.mark.parametrize("baseline", ["group", "leave-one-out", "batch"])
@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
def test_an_answer_without_a_reward_leaves_no_trace(baseline, scale):
    rewards = torch.cat([REWARDS, torch.tensor([NAN, NAN])])
    groups = torch.cat([GROUPS, torch.tensor([7, 3])])
    without = answer_advantages(REWARDS, GROUPS, baseline=baseline, scale=scale)
    advantages = answer_advantages(rewards, groups, baseline=baseline, scale=scale)
    torch.testing.assert_close(advantages[:8], without, rtol=1e-12, atol=1e-12)
    assert advantages[8:].tolist() == [0, 0]
    as_zero = answer_advantages(rewards.nan_to_num(0.0), groups, baseline=baseline, scale=scale)
    assert not torch.allclose(as_zero[:8], without)  # what a reward of 0 in its place would have done


def test_rewards_apart_count_alike_whatever_their_size():
    rewards = torch.stack([REWARDS, 100 * REWARDS.flip(0)], 1)
    apart = combined_advantages(rewards, [1.0, 1.0], GROUPS, apart=True)
    smaller = combined_advantages(rewards * torch.tensor([1.0, 1e-2]), [1.0, 1.0], GROUPS, apart=True)
    torch.testing.assert_close(apart, smaller, rtol=1e-2, atol=1e-2)  # up to the 1e-4 beside a deviation
    together = combined_advantages(rewards, [1.0, 1.0], GROUPS, apart=False)
    assert not torch.allclose(apart, together, atol=0.1)
    torch.testing.assert_close(together, answer_advantages(rewards.sum(1), GROUPS))
    of_parts = sum(answer_advantages(rewards[:, part], GROUPS) for part in range(2))
    torch.testing.assert_close(apart, (of_parts - of_parts.mean()) / (of_parts.std() + 1e-4))


def test_rewards_that_were_not_given_beside_others():
    rewards = torch.tensor([[1.0, NAN], [0.0, 2.0], [NAN, NAN]])
    advantages = combined_advantages(rewards, [1.0, 0.5], torch.zeros(3, dtype=torch.int64), apart=False, scale="none")
    assert advantages.tolist() == [0, 0, 0]  # 1 and 0 + 0.5 * 2: equal


def test_overlong_answers():
    assert overlong_penalty(torch.tensor([10, 80, 90, 100, 120]), 100, 20).tolist() == [0, 0, -0.5, -1, -1]


@pytest.mark.parametrize(("discount", "trace_decay"), [(1.0, 0.95), (0.9, 0.0), (0.9, 1.0)])
def test_generalized_advantages_of_ragged_answers(discount, trace_decay):
    generator = np.random.default_rng(0)
    offsets = [0, 3, 4, 9, 9]
    rewards, values, last = generator.normal(size=9), generator.normal(size=9), np.array([0.0, 0.7, 0.0, 1.0])
    advantages, returns = generalized_advantages(
        *(torch.from_numpy(x) for x in (rewards, values, last)), offsets, discount=discount, trace_decay=trace_decay
    )
    for answer, (start, stop) in enumerate(itertools.pairwise(offsets)):
        expected = policy_gradient.generalized_advantages(
            rewards[start:stop], np.append(values[start:stop], last[answer]), discount, trace_decay
        )
        np.testing.assert_allclose(advantages[start:stop], expected, rtol=1e-12)
        np.testing.assert_allclose(returns[start:stop], expected + values[start:stop], rtol=1e-12)
    cut = generalized_advantages(*(torch.from_numpy(x) for x in (rewards, values, 0 * last)), offsets)[0]
    assert not np.allclose(cut[3], advantages[3])  # an answer that was cut off is worth what the critic says


def test_whitening_leaves_out_what_does_not_count():
    values, weights = torch.tensor([1.0, 2.0, 3.0, 100.0]), torch.tensor([1.0, 1.0, 1.0, 0.0])
    white = whitened(values, weights)
    assert white[3] == 0 and abs(white[:3].mean()) < 1e-6 and abs(white[:3].square().mean() - 1) < 1e-5
    kept = whitened(values, weights, shift=False)
    torch.testing.assert_close(kept[:3].mean(), torch.tensor(2.0))
    assert not torch.allclose(whitened(values, torch.ones(4))[:3], white[:3])
