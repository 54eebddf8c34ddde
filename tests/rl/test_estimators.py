"""Advantages of rollouts: by group and by critic, with KL in the reward, and without answers that nobody judged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from danlu.inference.episode import Episode, Segment
from danlu.inference.request import Completion
from danlu.objectives.advantages import generalized_advantages
from danlu.objectives.policy_losses import AdaptiveKl
from danlu.rl.estimators import (
    LAST_VALUE,
    REFERENCE,
    RETURN,
    VALUE_OLD,
    GaeEstimator,
    GroupEstimator,
    Judged,
    KlPenalty,
    RewardShaping,
    TeacherAdvantages,
)
from danlu.rl.experience_trees import ADVANTAGE, answer_tree


def completion(tokens, logprob=-1.0):
    values = [logprob] * tokens
    return Completion(0, 0, list(range(tokens)), values, values, None, [0] * tokens, "", "stop")


def judged(rewards, lengths=((2, 3), (1, 4)), truncated=(), **scores):
    """Two prompts of two tokens with two answers each."""
    items = [
        answer_tree([1, 2], [completion(length) for length in of_prompt], f"row {number}", {})
        for number, of_prompt in enumerate(lengths)
    ]
    flat = [length for of_prompt in lengths for length in of_prompt]
    return Judged(
        items,
        np.array(rewards, np.float64).reshape(len(flat), -1),
        [1.0],
        np.repeat(np.arange(len(lengths)), len(lengths[0])),
        np.array(flat),
        np.array(truncated or [False] * len(flat), bool),
        **scores,
    )


def of_answers(items, name):
    return [
        item.samples[0].columns[name][branch.start : branch.stop]
        for item in items
        for branch in item.samples[0].branches[1:]
    ]


def test_an_answer_has_one_advantage_and_the_prompt_none():
    items, _ = GroupEstimator(scale="none").estimate(judged([1, 0, 0, 4]))
    assert [set(column.tolist()) for column in of_answers(items, ADVANTAGE)] == [{0.5}, {-0.5}, {-2.0}, {2.0}]
    assert items[0].samples[0].columns[ADVANTAGE][:2].tolist() == [0, 0]


def test_an_answer_without_a_reward_is_neither_trained_nor_in_the_baseline():
    items, _ = GroupEstimator(scale="none").estimate(judged([1, np.nan, 0, 4]))
    weights = items[0].samples[0].weights
    assert weights.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert [column[0] for column in of_answers(items, ADVANTAGE)] == [0, 0, -2, 2]
    as_zero, _ = GroupEstimator(scale="none").estimate(judged([1, 0, 0, 4]))
    assert of_answers(as_zero, ADVANTAGE)[0][0] != 0  # control: as a reward of 0 it would be in the baseline


def test_truncated_answers_count_in_the_baseline_and_train_nothing():
    shaping = RewardShaping(masks_truncated=True)
    items, _ = GroupEstimator(scale="none", shaping=shaping).estimate(judged([1, 0, 0, 4], truncated=[0, 1, 0, 0]))
    assert items[0].samples[0].weights.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert of_answers(items, ADVANTAGE)[0][0] == 0.5


def test_long_answers_are_punished():
    shaping = RewardShaping(overlong_margin=2, overlong_weight=2.0, max_new_tokens=4)
    items, _ = GroupEstimator(baseline="none", scale="none", shaping=shaping).estimate(judged([1, 1, 1, 1]))
    assert [column[0] for column in of_answers(items, ADVANTAGE)] == [1, 0, 1, -1]  # of 2, 3, 1 and 4 tokens


def test_a_punishment_is_no_reward_for_who_has_none():
    shaping = RewardShaping(overlong_margin=2, overlong_weight=2.0, max_new_tokens=4)
    items, _ = GroupEstimator(scale="none", shaping=shaping).estimate(judged([1, np.nan, 1, 1]))
    assert items[0].samples[0].weights.tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert of_answers(items, ADVANTAGE)[0][0] == 0  # the only one of its group


def reference_scores(data, values):
    return [
        {REFERENCE: np.full(item.tokens, value, np.float32)} for item, value in zip(data.items, values, strict=True)
    ]


def test_kl_is_taken_from_the_reward_of_whole_answers():
    kl = KlPenalty(AdaptiveKl(0.1, 1.0), adapts=False)
    data = judged([1, 1, 1, 1])
    data = judged([1, 1, 1, 1], token_scores=reference_scores(data, [-3.0, -1.0]), branch_scores=[{}, {}])
    items, metrics = GroupEstimator(baseline="none", scale="none", kl=kl).estimate(data)
    # log pi - log pi_ref is 2 a token of the first prompt's answers, and 0 of the second's.
    advantages = [column[0] for column in of_answers(items, ADVANTAGE)]
    assert advantages == pytest.approx([1 - 0.1 * 2 * 2, 1 - 0.1 * 2 * 3, 1, 1])
    assert metrics["kl_in_reward"] == pytest.approx((4 + 6) / 4)


def test_the_coefficient_adapts_and_comes_back():
    kl = KlPenalty(AdaptiveKl(0.1, 1.0, horizon=100), adapts=True)
    data = judged([1, 1, 1, 1])
    data = judged([1, 1, 1, 1], token_scores=reference_scores(data, [-3.0, -3.0]), branch_scores=[{}, {}])
    estimator = GroupEstimator(kl=kl)
    estimator.estimate(data)
    assert kl.coefficient.coefficient == pytest.approx(0.1 * (1 + 0.2 * 4 / 100))
    other = GroupEstimator(kl=KlPenalty(AdaptiveKl(0.1, 1.0), adapts=True))
    other.restore(estimator.state())
    assert other.state() == estimator.state() != {"kl": 0.1}


def test_an_answer_without_a_reward_is_in_no_mean_of_kl():
    plain = judged([1, np.nan, 1, 1])
    data = judged([1, np.nan, 1, 1], token_scores=reference_scores(plain, [-3.0, -1.0]), branch_scores=[{}, {}])
    estimators = [
        GroupEstimator(kl=KlPenalty(AdaptiveKl(0.1, 1.0, horizon=100), adapts=True)),
        GaeEstimator(kl=KlPenalty(AdaptiveKl(0.1, 1.0, horizon=100), adapts=True)),
    ]
    with_values = replace(data, **critic_scores(plain, 0.0, 0.0))
    with_values = replace(with_values, token_scores=[
        {**scores, **reference}
        for scores, reference in zip(with_values.token_scores, data.token_scores, strict=True)
    ])  # fmt: skip
    for estimator in estimators:
        _, metrics = estimator.estimate(with_values)
        assert metrics["kl_in_reward"] == pytest.approx(4 / 3)  # of 2, 1 and 4 tokens; with the other's 3 it is 10 / 4
        assert estimator.state()["kl"] == pytest.approx(0.1 * (1 + 0.2 * 3 / 100))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shaped", [None, "overlong", "kl"])
def test_without_a_greedy_answers_reward_there_is_no_baseline(apart, shaped):
    """As 0 it would be the worst greedy answer there is, and all answers to its prompt would be taught."""
    rewards = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 3.0]])
    plain = judged(rewards)
    data = judged(rewards, token_scores=reference_scores(plain, [-1.0, -1.0]), branch_scores=[{}, {}])
    data = replace(data, weights=[1.0, 1.0], greedy_rewards=np.array([[np.nan, np.nan], [0.5, np.nan]]))
    shaping = RewardShaping(overlong_margin=4, max_new_tokens=9) if shaped == "overlong" else RewardShaping()
    kl = KlPenalty(AdaptiveKl(0.1, 1.0), adapts=False) if shaped == "kl" else None
    estimator = GroupEstimator(baseline="greedy", scale="none", apart=apart, shaping=shaping, kl=kl)
    items, _ = estimator.estimate(data)
    assert not items[0].samples[0].weights.any() and items[1].samples[0].weights.sum() == 5
    assert not np.concatenate(of_answers(items, ADVANTAGE)[:2]).any()
    assert np.concatenate(of_answers(items, ADVANTAGE)[2:]).all()


PER_TOKEN = ([1.0, -2.0], [0.5, 0.0, 3.0], [2.0], [-1.0, 0.0, 0.25, 4.0])
"""log pi - log pi_ref of each token of four answers."""


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_with_the_baseline_batch_each_token_pays_for_its_own_kl_and_for_later_ones(scale):
    """REINFORCE++ (arXiv:2501.03262, equations 8 to 10): r - beta x sum of KL(i) over i >= t with k1, normalised over
    the tokens of the global batch, as OpenRLHF's `get_cumulative_returns` and verl's
    `compute_reinforce_plus_plus_outcome_advantage` do."""
    rewards, beta, kls = [1.0, 0.0, np.nan, 3.0], 0.2, list(PER_TOKEN)
    data = judged(rewards)
    scores = []
    for number, item in enumerate(data.items):
        sample = item.samples[0]
        reference = sample.columns["old"].copy()
        reference[sample.weights > 0] -= np.concatenate(kls[2 * number : 2 * number + 2])
        scores.append({REFERENCE: reference})
    data = replace(data, token_scores=scores, branch_scores=[{}, {}])
    kl = KlPenalty(AdaptiveKl(beta, 1.0), adapts=False)
    items, metrics = GroupEstimator(baseline="batch", scale=scale, kl=kl).estimate(data)
    returns = [
        [reward - beta * sum(of_answer[place:]) for place in range(len(of_answer))]
        for reward, of_answer in zip(rewards, kls, strict=True)
    ]
    trained = np.concatenate([returns[0], returns[1], returns[3]])
    deviation = trained.std(ddof=1) + 1e-4 if scale == "batch" else 1.0
    for column, of_answer in zip(of_answers(items, ADVANTAGE), returns, strict=True):
        np.testing.assert_allclose(column, np.nan_to_num((np.array(of_answer) - trained.mean()) / deviation), rtol=1e-5)
    assert metrics["kl_in_reward"] == pytest.approx((-1.0 + 3.5 + 3.25) / 3)
    # Control: with another baseline an answer is one action, and pays for all of its KL at each token.
    whole, _ = GroupEstimator(baseline="none", scale="none", kl=kl).estimate(data)
    assert of_answers(whole, ADVANTAGE)[1] == pytest.approx([-beta * 3.5] * 3)


def test_teachers_log_ratios_are_added_to_what_rewards_say():
    plain = judged([1, np.nan, 0, 4])
    scores = [
        {"teacher": np.full(item.tokens, -3.0, np.float32), "teacher.1": np.full(item.tokens, -0.5, np.float32)}
        for item in plain.items
    ]
    data = judged([1, np.nan, 0, 4], token_scores=scores, branch_scores=[{}, {}])
    estimator = TeacherAdvantages(GroupEstimator(scale="none"), {"teacher": 0.25, "teacher.1": 0.75}, weight=2.0)
    items, metrics = estimator.estimate(data)
    ratio = 0.25 * (-3 - -1) + 0.75 * (-0.5 - -1)
    assert metrics == {"reverse_kl": pytest.approx(-ratio)}
    assert [column[0] for column in of_answers(items, ADVANTAGE)] == pytest.approx(
        [0 + 2 * ratio, 0, -2 + 2 * ratio, 2 + 2 * ratio]  # the second has no reward, and is not trained
    )
    assert not any(item.samples[0].columns[ADVANTAGE][:2].any() for item in items)
    assert items[0].samples[0].weights.tolist() == [0, 0, 1, 1, 0, 0, 0]


def critic_scores(data, value, last):
    return {
        "token_scores": [
            {VALUE_OLD: np.full(item.tokens, value, np.float32), REFERENCE: np.full(item.tokens, -3.0, np.float32)}
            for item in data.items
        ],
        "branch_scores": [
            {LAST_VALUE: last * np.arange(len(item.samples[0].branches), dtype=np.float32)} for item in data.items
        ],
    }


@pytest.mark.parametrize("bootstraps", [True, False])
def test_a_critic_gives_each_token_its_advantage(bootstraps):
    rewards, truncated = [1.0, 0.0, 2.0, 0.0], [False, True, False, False]
    data = judged(rewards, truncated=truncated, **critic_scores(judged(rewards), 0.25, 0.5))
    estimator = GaeEstimator(discount=0.9, trace_decay=0.8, whitens=False, bootstraps_truncated=bootstraps)
    items, _ = estimator.estimate(data)
    lengths, earned = [2, 3, 1, 4], []
    for length, reward in zip(lengths, rewards, strict=True):
        earned += [0.0] * (length - 1) + [reward]
    advantages, returns = generalized_advantages(
        torch.tensor(earned),
        torch.full((10,), 0.25),
        torch.tensor([0.0, 2 * 0.5 if bootstraps else 0.0, 0.0, 0.0]),  # of the second branch behind the prompt
        [0, 2, 5, 6, 10],
        discount=0.9,
        trace_decay=0.8,
    )
    np.testing.assert_allclose(np.concatenate(of_answers(items, ADVANTAGE)), advantages, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(of_answers(items, RETURN)), returns, rtol=1e-6)
    assert items[0].samples[0].columns[VALUE_OLD][2:].tolist() == [0.25] * 5


def test_an_answer_goes_on_from_its_last_branch():
    """An episode in three branches that was cut off, and an answer in one: what the critic says behind each."""
    segments = (
        Segment((1, 2), (5, 6), (True, True)),
        Segment((1, 2, 9), (7,), (True,)),
        Segment((1, 8), (7,), (True,)),
    )
    episode = Episode(0, 0, [5, 6, 7, 7], [-1.0] * 4, [-1.0] * 4, None, [0] * 4, "", "length", segments=segments)
    item = answer_tree([1, 2], [episode, completion(2)], "row", {})
    assert len(item.samples[0].branches) == 5  # the prompt's, three, and one
    scores = {
        "token_scores": [{VALUE_OLD: np.zeros(item.tokens, np.float32)}],
        "branch_scores": [{LAST_VALUE: np.array([0.0, 10.0, 20.0, 30.0, 40.0], np.float32)}],
    }
    data = Judged([item], np.zeros((2, 1)), [1.0], np.zeros(2, np.int64), np.array([4, 2]), np.ones(2, bool), **scores)
    assert data.last_branches(0) == [-2, -1]
    items, _ = GaeEstimator(discount=1.0, trace_decay=1.0, whitens=False).estimate(data)
    (sample,) = items[0].samples
    assert sample.columns[RETURN][sample.weights > 0].tolist() == [30] * 4 + [40] * 2


STEPS = ({0: ([0, 1], [0.5, -1.0])}, {}, {0: ([0], [3.0])}, {0: ([1, 1, 2], [1.0, 0.25, -2.0])})
"""Of answers of 2, 3, 1 and 4 tokens: where their steps end, and what these earned; the second has no steps."""
TOKENS = ([0.5, -1.0], [0.0, 0.0, 2.0], [3.0], [0.0, 1.25, -2.0, 0.0])
"""What each token earned: the second answer's reward is 2, at its end."""


def with_steps(data):
    steps = [
        {part: (np.array(places), np.array(values)) for part, (places, values) in of_answer.items()}
        for of_answer in STEPS
    ]
    return replace(data, step_rewards=steps)


def gae(rewards, values, last, discount, trace_decay):
    """By the recursion, from the last token to the first, in float64."""
    advantages, carried, following = [], 0.0, last
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carried = reward + discount * following - value + discount * trace_decay * carried
        advantages.insert(0, carried)
        following = value
    return advantages


def test_values_of_an_episode_with_a_rewritten_history_are_of_one_answer():
    """The token behind a rewritten history follows the last one before it; what was not drawn is not in between."""
    segments = (
        Segment((1, 2), (5, 6, 9), (True, True, False)),
        Segment((1, 2, 9), (7,), (True,)),
        Segment((1, 8), (4, 7, 3), (True, False, True)),
    )
    drawn = [5, 6, 7, 4, 3]
    episode = Episode(0, 0, drawn, [-1.0] * 5, [-1.0] * 5, None, [0] * 5, "", "stop", segments=segments)
    item = answer_tree([1, 2], [episode, completion(2)], "row", {})
    (sample,) = item.samples
    values = np.random.default_rng(2).normal(size=item.tokens).astype(np.float32)
    scores = {
        "token_scores": [{VALUE_OLD: values, REFERENCE: np.full(item.tokens, -3.0, np.float32)}],
        "branch_scores": [{LAST_VALUE: np.full(5, 100.0, np.float32)}],
    }
    lengths = np.array([5, 2])
    data = Judged([item], np.array([[2.0], [-1.0]]), [1.0], np.zeros(2, np.int64), lengths, np.zeros(2, bool), **scores)
    (estimated,), _ = GaeEstimator(discount=0.9, trace_decay=0.8, whitens=False).estimate(data)
    places = sample.weights > 0
    assert sample.tokens[places].tolist() == [*drawn, 0, 1]
    of_tokens = values[places].astype(np.float64).tolist()
    wanted = gae([0.0] * 4 + [2.0], of_tokens[:5], 0.0, 0.9, 0.8) + gae([0.0, -1.0], of_tokens[5:], 0.0, 0.9, 0.8)
    column = estimated.samples[0].columns[ADVANTAGE]
    np.testing.assert_allclose(column[places], wanted, rtol=1e-5)
    np.testing.assert_allclose(estimated.samples[0].columns[RETURN][places], np.add(wanted, of_tokens), rtol=1e-5)
    assert not column[~places].any()
    apart = gae([0.0, 0.0], of_tokens[:2], 0.0, 0.9, 0.8)  # the control: of the first branch alone
    assert abs(np.array(apart) - wanted[:2]).min() > 1e-2


def test_rewards_of_steps_are_earned_where_they_end():
    rewards = [sum(each) for each in TOKENS]
    data = with_steps(judged(rewards, **critic_scores(judged(rewards), 0.25, 0.5)))
    data = replace(data, weights=[2.0])
    items, _ = GaeEstimator(discount=0.9, trace_decay=0.8, whitens=False).estimate(data)
    wanted = [gae([2 * each for each in earned], [0.25] * len(earned), 0.0, 0.9, 0.8) for earned in TOKENS]
    for column, of_answer in zip(of_answers(items, ADVANTAGE), wanted, strict=True):
        np.testing.assert_allclose(column, of_answer, rtol=1e-6)
    # Control: as rewards of whole answers, with the same sums, they are other advantages.
    whole, _ = GaeEstimator(discount=0.9, trace_decay=0.8, whitens=False).estimate(replace(data, step_rewards=()))
    same = [
        np.allclose(column, of_answer, rtol=1e-3)
        for column, of_answer in zip(of_answers(whole, ADVANTAGE), wanted, strict=True)
    ]
    assert same == [False, True, True, False]


def test_groups_compare_sums_of_steps_or_with_process_supervision_steps():
    rewards = [sum(each) for each in TOKENS]
    data = with_steps(judged(rewards))
    summed, _ = GroupEstimator(scale="none").estimate(data)
    assert [set(column.tolist()) for column in of_answers(summed, ADVANTAGE)] == [{-1.25}, {1.25}, {1.875}, {-1.875}]
    items, _ = GroupEstimator(process_supervision=True).estimate(data)
    first, second = [0.5, -1.0, 2.0], [3.0, 1.0, 0.25, -2.0]  # of the steps of each prompt's answers, the second's one
    normalised = [
        [(value - np.mean(of_prompt)) / (np.std(of_prompt, ddof=1) + 1e-4) for value in of_prompt]
        for of_prompt in (first, second)
    ]
    (a, b, c), (d, e, f, g) = normalised
    wanted = [[a + b, b], [c, c, c], [d], [e + f + g, e + f + g, g, 0.0]]
    for column, of_answer in zip(of_answers(items, ADVANTAGE), wanted, strict=True):
        np.testing.assert_allclose(column, of_answer, rtol=1e-6)
    without = replace(data, step_rewards=())  # control: each answer as one step is as without process supervision
    plain, one_step = (GroupEstimator(process_supervision=each).estimate(without)[0] for each in (False, True))
    np.testing.assert_allclose(
        np.concatenate(of_answers(plain, ADVANTAGE)), np.concatenate(of_answers(one_step, ADVANTAGE)), rtol=1e-6
    )


def test_several_rewards_of_steps_are_normalised_apart_and_added_up_by_weight():
    rewards = np.array([[1.0, 5.0], [0.0, np.nan], [2.0, 1.0], [0.0, 1.0]])
    data = replace(
        judged(rewards), weights=[1.0, 0.5], step_rewards=[{}, {}, {1: (np.array([0]), np.array([1.0]))}, {}]
    )
    items, _ = GroupEstimator(scale="none", process_supervision=True).estimate(data)
    wanted = [[0.5, 0.5], [-0.5] * 3, [1.0], [-1.0] * 4]  # of the second reward one answer, and two alike
    for column, of_answer in zip(of_answers(items, ADVANTAGE), wanted, strict=True):
        np.testing.assert_allclose(column, of_answer)


def test_a_critics_tokens_pay_for_their_kl():
    rewards = [0.0] * 4
    data = judged(rewards, **critic_scores(judged(rewards), 0.0, 0.0))
    kl = KlPenalty(AdaptiveKl(0.5, 1.0), adapts=False)
    items, metrics = GaeEstimator(trace_decay=0.0, whitens=False, kl=kl).estimate(data)
    # With lambda 0 and no values an advantage is the token's own reward: -0.5 x (-1 - -3).
    assert {float(x) for column in of_answers(items, ADVANTAGE) for x in column} == {-1.0}
    assert metrics == {"kl_in_reward": pytest.approx(2 * 10 / 4), "kl_coefficient": 0.5}  # of 10 tokens in 4 answers


def test_whitened_advantages_have_no_mean():
    rewards = [1.0, 0.0, np.nan, 3.0]
    items, _ = GaeEstimator().estimate(judged(rewards, **critic_scores(judged(rewards), 0.1, 0.0)))
    trained = np.concatenate([item.samples[0].columns[ADVANTAGE][item.samples[0].weights > 0] for item in items])
    assert abs(trained.mean()) < 1e-6 and trained.std() == pytest.approx(1, abs=1e-4)
    assert of_answers(items, ADVANTAGE)[2].tolist() == [0.0]
