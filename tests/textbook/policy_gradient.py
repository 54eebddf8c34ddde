"""The policy gradient of a softmax policy: exact, and estimated from episodes (Sutton and Barto, ch. 13).

S states · A actions · T steps of an episode · gamma discount
"""

from __future__ import annotations

import numpy as np

from textbook.markov_decision_process import Episode, MarkovDecisionProcess
from textbook.planning import evaluate_policy


def softmax_policy(preferences: np.ndarray) -> np.ndarray:
    """pi [S, A] = exp(h(s, a)) / sum over b of exp(h(s, b)), of preferences h [S, A]."""
    exp = np.exp(preferences - preferences.max(1, keepdims=True))
    result: np.ndarray = exp / exp.sum(1, keepdims=True)
    return result


def expected_return(process: MarkovDecisionProcess, preferences: np.ndarray, start: np.ndarray) -> float:
    """J = start . v: what the policy earns from a distribution `start` [S] of first states."""
    return float(start @ evaluate_policy(process, softmax_policy(preferences)))


def advantages(process: MarkovDecisionProcess, policy: np.ndarray) -> np.ndarray:
    """[S, A] = q(s, a) - v(s): how much better an action is than what the policy does at that state."""
    values = evaluate_policy(process, policy)
    result: np.ndarray = process.action_values(values) - values[:, None]
    return result


def policy_gradient(process: MarkovDecisionProcess, preferences: np.ndarray, start: np.ndarray) -> np.ndarray:
    """dJ / dh [S, A], exact: visits(s) pi(a | s) advantage(s, a) (the policy gradient theorem, Sutton et al. 2000).

    Visits are discounted: sum over t of gamma^t P(state at t is s).
    """
    policy = softmax_policy(preferences)
    visits = process.under(policy).visits(start)
    result: np.ndarray = visits[:, None] * policy * advantages(process, policy)
    return result


def score(policy: np.ndarray, state: int, action: int) -> np.ndarray:
    """d log pi(action | state) / dh [S, A]: onehot(action) - pi(. | state) in the row of the state, else 0."""
    result = np.zeros_like(policy)
    result[state] = -policy[state]
    result[state, action] += 1
    return result


def reinforce_estimate(
    episode: Episode, policy: np.ndarray, discount: float, baseline: np.ndarray | None = None
) -> np.ndarray:
    """One episode's unbiased estimate of dJ / dh [S, A], sum of gamma^t (G_t - b(s_t)) score (REINFORCE, ch. 13.3-4).

    baseline: [S], of each state, from anywhere but this episode; it changes the variance alone.
    """
    estimate = np.zeros_like(policy)
    following = 0.0  # G_t, the return from step t on
    for step in reversed(range(len(episode.actions))):
        state, action = int(episode.states[step]), int(episode.actions[step])
        following = float(episode.rewards[step]) + discount * following
        advantage = following - (0.0 if baseline is None else float(baseline[state]))
        estimate += discount**step * advantage * score(policy, state, action)
    return estimate


def generalized_advantages(rewards: np.ndarray, values: np.ndarray, discount: float, trace_decay: float) -> np.ndarray:
    """[T]: A_t = sum over l of (gamma lambda)^l delta_(t+l), delta_t = r_t + gamma v_(t+1) - v_t (arXiv:1506.02438).

    rewards: [T]; values: [T + 1], of the states before each step and of the last one, 0 where that is an end.
    trace_decay: lambda; 1 gives returns less values, 0 the errors of one step.
    """
    result = np.zeros(len(rewards))
    carried = 0.0
    for step in reversed(range(len(rewards))):
        delta = rewards[step] + discount * values[step + 1] - values[step]
        carried = delta + discount * trace_decay * carried
        result[step] = carried
    return result
