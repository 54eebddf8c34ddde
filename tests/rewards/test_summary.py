"""Means, their errors, and pass@k against counting all choices of k answers."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from danlu.rewards.runner import RewardPart
from danlu.rewards.summary import best_of_k, distinct_failures, pass_at_k, summarise
from danlu.rewards.text import Length

NAN = np.nan


def parts(*weights):
    return [RewardPart(f"part{number}", Length(), weight) for number, weight in enumerate(weights)]


@pytest.mark.parametrize("count", range(1, 7))
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(count):
    for right in range(count + 1):
        answers = [True] * right + [False] * (count - right)
        for k in range(1, count + 1):
            choices = list(combinations(answers, k))
            assert pass_at_k(count, right, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)
    # Control: drawing with replacement has another chance.
    assert pass_at_k(4, 2, 2) != pytest.approx(1 - (1 - 2 / 4) ** 2)


def test_means_over_answers_that_have_a_reward():
    values = np.array([[1, 0.5], [0, NAN], [NAN, NAN], [1, 2.5], [1, 1], [0, 0]])
    prompts = np.array([0, 0, 0, 7, 7, 7])
    summary = summarise(parts(1.0, 2.0), values, prompts)
    assert list(summary) == ["part0", "part1", "sum"]
    assert (summary["part0"]["given"], summary["part0"]["mean"]) == (5, 0.6)
    assert (summary["part1"]["given"], summary["part1"]["mean"]) == (4, 1.0)
    assert summary["sum"]["given"] == 5 and summary["sum"]["mean"] == pytest.approx((2 + 0 + 6 + 3 + 0) / 5)
    # Two judged answers to the first prompt, one right; three to the second, two right.
    assert summary["part0"]["pass_at"] == pytest.approx({1: (1 / 2 + 2 / 3) / 2, 2: 1, 3: 1})
    assert "pass_at" not in summary["part1"] and "pass_at" not in summary["sum"]
    left_out = np.array([False] * (len(values) - 1) + [True])
    failed = summarise(parts(1.0, 2.0), values, prompts, unjudged=left_out)
    assert failed["sum"]["given"] == summary["sum"]["given"] - 1 and failed["part0"] == summary["part0"]
    passed = summarise(parts(1.0, 2.0), values, prompts, threshold=1.0)
    assert passed["part1"]["pass_at"] == pytest.approx({1: (0 + 2 / 3) / 2, 2: 1, 3: 1})
    assert passed["sum"]["pass_at"][1] == pytest.approx((1 / 2 + 2 / 3) / 2)


def test_the_error_of_a_mean_is_that_of_prompts():
    random = np.random.default_rng(0)
    means = []
    errors = []
    prompts = np.repeat(np.arange(50), 4)
    for _ in range(400):
        values = random.normal(size=50).repeat(4) + 0.1 * random.normal(size=200)
        summary = summarise(parts(1.0), values[:, None], prompts)
        assert list(summary) == ["part0"]
        means.append(summary["part0"]["mean"])
        errors.append(summary["part0"]["standard_error"])
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.1)
    # Control: as if the answers were independent, it would be half as large.
    assert np.mean(errors) != pytest.approx(np.std(values) / np.sqrt(200), rel=0.5)


def test_the_error_of_few_prompts_is_that_of_a_sample():
    """By hand: means 1 and 0 of two prompts with two answers each deviate by +-1 of sums, so 2 * 2 / (2 - 1) / 4^2."""
    summary = summarise(parts(1.0), np.array([[1.0], [1.0], [0.0], [0.0]]), np.array([0, 0, 1, 1]))
    assert summary["part0"]["standard_error"] == pytest.approx(0.5)


def test_nothing_given():
    summary = summarise(parts(1.0), np.array([[NAN], [NAN]]), np.array([0, 1]))
    assert summary == {"part0": {"given": 0, "mean": None, "standard_error": None}}
    assert summarise(parts(1.0), np.array([[3.0]]), np.array([0]))["part0"]["standard_error"] is None


def test_a_reason_is_told_once_with_the_place_it_was_first_met() -> None:
    failures = [("a", "odd"), ("b", "late"), ("c", "late"), ("d", "late"), ("e", "none"), ("f", "none"), ("g", "big")]
    assert distinct_failures(failures) == [
        "late (b, and 2 more)",
        "none (e, and 1 more)",
        "odd (a)",
        "other reasons (g)",
    ]
    assert distinct_failures(failures[:4]) == ["late (b, and 2 more)", "odd (a)"]
    assert distinct_failures([]) == []


def test_the_best_of_k_is_the_mean_over_all_choices_of_k() -> None:
    rewards = [0.5, -1.0, 2.0, 0.25, 2.0]
    for k in range(1, 6):
        choices = list(combinations(rewards, k))
        assert best_of_k(rewards, k) == pytest.approx(sum(map(max, choices)) / len(choices))
    assert best_of_k(rewards, 2) != pytest.approx(sum(rewards) / 5)  # control
    rights = [1.0, 0.0, 0.0, 1.0]
    assert [best_of_k(rights, k) for k in (1, 2, 3)] == pytest.approx([pass_at_k(4, 2, k) for k in (1, 2, 3)])
