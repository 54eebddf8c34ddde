"""Chains, rewards, decisions, planning and gradients, against arithmetic by hand and against sampling."""

from __future__ import annotations

import numpy as np
import pytest

from textbook.markov_chain import MarkovChain
from textbook.markov_decision_process import MarkovDecisionProcess
from textbook.markov_reward_process import MarkovRewardProcess, discounted_return
from textbook.planning import (
    evaluate_policy,
    evaluate_policy_iteratively,
    policy_iteration,
    uniform_policy,
    value_iteration,
)
from textbook.policy_gradient import (
    advantages,
    expected_return,
    generalized_advantages,
    policy_gradient,
    reinforce_estimate,
    softmax_policy,
)


def gambler(goal=4, heads=0.5):
    """States 0 to `goal` coins; each toss wins or loses one; both ends stay."""
    transitions = np.zeros((goal + 1, goal + 1))
    transitions[0, 0] = transitions[goal, goal] = 1
    for coins in range(1, goal):
        transitions[coins, coins + 1], transitions[coins, coins - 1] = heads, 1 - heads
    return MarkovChain(transitions)


def corridor(length=4, discount=0.9, slip=0.1):
    """Left (0) and right (1) along a corridor whose right end is terminal; a step costs 1, and may slip."""
    transitions, rewards = np.zeros((length, 2, length)), np.full((length, 2), -1.0)
    for place in range(length - 1):
        for action, aim in enumerate((max(0, place - 1), place + 1)):
            transitions[place, action, aim] += 1 - slip
            transitions[place, action, place] += slip
    transitions[-1, :, -1], rewards[-1] = 1, 0
    return MarkovDecisionProcess(transitions, rewards, discount)


def random_process(seed=0, states=5, actions=3, discount=0.8):
    generator = np.random.default_rng(seed)
    transitions = generator.dirichlet(np.ones(states), (states, actions))
    return MarkovDecisionProcess(transitions, generator.normal(size=(states, actions)), discount)


def test_two_states_settle_where_the_flows_are_equal():
    chain = MarkovChain(np.array([[0.9, 0.1], [0.3, 0.7]]))
    np.testing.assert_allclose(chain.stationary_distribution(), [0.75, 0.25], atol=1e-12)
    np.testing.assert_allclose(chain.distribution_after(200, np.array([0.0, 1.0])), [0.75, 0.25], atol=1e-12)


def test_a_gambler_wins_in_proportion_to_the_coins():
    chain = gambler()
    np.testing.assert_allclose(chain.absorption_probabilities()[:, 4], [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(chain.steps_until_absorbed(), [0, 3, 4, 3, 0])  # k (n - k)
    walks = [chain.sample(np.random.default_rng(seed), 1, 200)[-1] for seed in range(400)]
    assert abs(np.mean(np.array(walks) == 4) - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 400)


@pytest.mark.parametrize(
    ("transitions", "message"),
    [
        (np.ones((2, 3)), "as many rows as columns"),
        (np.array([[0.5, 0.5], [0.5, 0.4]]), r"transitions\[1\] sums to 0.9"),
        (np.array([[1.5, -0.5], [0.5, 0.5]]), r"transitions\[0, 1\] is -0.5"),
    ],
)
def test_what_is_no_chain(transitions, message):
    with pytest.raises(ValueError, match=message):
        MarkovChain(transitions)


def test_an_end_is_one_however_its_probabilities_add_up():
    process = MarkovDecisionProcess(np.stack([np.tile([0.0, 1.0], (6, 1))] * 2), np.zeros((2, 6)), 1.0)
    chain = process.under(np.full((2, 6), 1 / 6)).chain
    assert chain.transitions[1, 1] != 1  # six times a sixth
    assert chain.absorbing.tolist() == [False, True]
    assert chain.steps_until_absorbed().tolist() == [1, 0]


def test_questions_without_an_answer():
    with pytest.raises(ValueError, match="several stationary"):
        MarkovChain(np.eye(2)).stationary_distribution()
    with pytest.raises(ValueError, match="no absorbing state"):
        MarkovChain(np.array([[0.0, 1.0, 0], [1.0, 0, 0], [0, 0, 1.0]])).steps_until_absorbed()
    with pytest.raises(ValueError, match="never left and pays"):
        MarkovRewardProcess(MarkovChain(np.eye(1)), np.ones(1), 1.0)


def test_values_are_mean_returns():
    process = MarkovRewardProcess(gambler(), np.array([0.0, 1, 2, 3, 0]), 0.9)
    values = process.values()
    np.testing.assert_allclose(process.backup(values), values, atol=1e-12)
    generator = np.random.default_rng(0)
    returns = []
    for _ in range(2000):
        walk = process.chain.sample(generator, 2, 60)
        returns.append(discounted_return(process.rewards[walk[:-1]], 0.9))
    assert abs(np.mean(returns) - values[2]) < 4 * np.std(returns) / np.sqrt(len(returns))


@pytest.mark.parametrize("discount", [0.7, 1.0])
def test_visits_weigh_rewards(discount):
    process = MarkovRewardProcess(gambler(), np.array([0.0, 1, 2, 3, 0]), discount)
    start = np.array([0.1, 0.2, 0.3, 0.4, 0.0])
    assert process.visits(start) @ process.rewards == pytest.approx(start @ process.values(), abs=1e-12)


def test_evaluation_by_solving_and_by_sweeping():
    process = random_process()
    policy = softmax_policy(np.random.default_rng(1).normal(size=(5, 3)))
    swept = evaluate_policy_iteratively(process, policy)
    np.testing.assert_allclose(swept.values, evaluate_policy(process, policy), atol=1e-10)
    wrong = evaluate_policy(process, uniform_policy(process))
    assert np.abs(wrong - swept.values).max() > 1e-2  # another policy has other values


@pytest.mark.parametrize("process", [random_process(), random_process(3, 7, 2), corridor(), corridor(discount=1.0)])
def test_both_iterations_find_the_optimum_that_no_policy_beats(process):
    by_policies, by_values = policy_iteration(process), value_iteration(process)
    np.testing.assert_allclose(by_policies.values, by_values.values, atol=1e-9)
    np.testing.assert_allclose(process.optimality_backup(by_values.values), by_values.values, atol=1e-9)
    # All deterministic policies, tried one by one.
    if process.actions**process.states <= 250:
        for number in range(process.actions**process.states):
            choice = [(number // process.actions**state) % process.actions for state in range(process.states)]
            try:
                values = evaluate_policy(process, np.eye(process.actions)[choice])
            except ValueError:  # it never ends
                continue
            assert (values <= by_values.values + 1e-9).all()


def test_the_corridor_is_walked_to_the_right():
    plan = policy_iteration(corridor(discount=1.0))
    np.testing.assert_array_equal(plan.policy[:-1].argmax(1), [1, 1, 1])
    np.testing.assert_allclose(plan.values, [-3 / 0.9, -2 / 0.9, -1 / 0.9, 0])  # a step takes 1 / 0.9 tries


def test_what_never_ends_is_told():
    process = corridor(discount=1.0)
    staying = np.eye(2)[[0, 0, 0, 0]]
    with pytest.raises(ValueError, match="state 0 is never left and pays"):
        evaluate_policy(process, staying)
    with pytest.raises(ValueError, match="still change"):
        evaluate_policy_iteratively(process, staying, most_sweeps=50)


def test_the_exact_gradient_is_that_of_finite_differences():
    process, generator = random_process(), np.random.default_rng(2)
    preferences, start = generator.normal(size=(5, 3)), generator.dirichlet(np.ones(5))
    gradient, step = policy_gradient(process, preferences, start), 1e-5
    for place in np.ndindex(5, 3):
        moved = np.zeros((5, 3))
        moved[place] = step
        difference = expected_return(process, preferences + moved, start) - expected_return(
            process, preferences - moved, start
        )
        assert gradient[place] == pytest.approx(difference / (2 * step), abs=1e-8)
    policy = softmax_policy(preferences)
    np.testing.assert_allclose((policy * advantages(process, policy)).sum(1), 0, atol=1e-12)


@pytest.mark.parametrize("with_baseline", [False, True])
def test_reinforce_is_unbiased(with_baseline):
    process = corridor(discount=0.9)
    preferences = np.array([[0.2, 0.4], [0.1, 0.6], [0.0, 0.3], [0.0, 0.0]])
    start = np.array([0.0, 1.0, 0.0, 0.0])
    policy, exact = softmax_policy(preferences), policy_gradient(process, preferences, start)
    baseline = evaluate_policy(process, policy) if with_baseline else None
    generator = np.random.default_rng(5)
    estimates = np.array(
        [reinforce_estimate(process.sample(policy, generator, 1, 400), policy, 0.9, baseline) for _ in range(2000)]
    )
    error = estimates.std(0) / np.sqrt(len(estimates))
    assert (np.abs(estimates.mean(0) - exact) <= 4 * error + 1e-12).all()
    assert (np.abs(estimates.mean(0) + exact) > 4 * error).any()  # a wrong sign would be seen


def test_generalized_advantages_lie_between_one_step_and_returns():
    generator = np.random.default_rng(0)
    rewards, values = generator.normal(size=6), np.append(generator.normal(size=6), 0)
    one_step = generalized_advantages(rewards, values, 0.9, 0.0)
    np.testing.assert_allclose(one_step, rewards + 0.9 * values[1:] - values[:-1])
    returns = [discounted_return(rewards[step:], 0.9) for step in range(6)]
    np.testing.assert_allclose(generalized_advantages(rewards, values, 0.9, 1.0), returns - values[:-1])
    by_definition = [sum((0.9 * 0.7) ** later * one_step[t + later] for later in range(6 - t)) for t in range(6)]
    np.testing.assert_allclose(generalized_advantages(rewards, values, 0.9, 0.7), by_definition)
