"""Planning in a known decision process: evaluation, policy iteration, value iteration (Sutton and Barto, ch. 4).

S states · A actions · gamma discount
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from textbook.markov_decision_process import MarkovDecisionProcess

# How much better an action has to be before a policy changes its mind: equally good ones would be swapped for ever.
TIE = 1e-12


class Plan(NamedTuple):
    """A policy, what it is worth, and how many sweeps it took to find it."""

    policy: np.ndarray  # [S, A] float64: P(action | state)
    values: np.ndarray  # [S] float64
    sweeps: int


def uniform_policy(process: MarkovDecisionProcess) -> np.ndarray:
    """[S, A]: every action is as likely as every other."""
    return np.full((process.states, process.actions), 1 / process.actions)


def evaluate_policy(process: MarkovDecisionProcess, policy: np.ndarray) -> np.ndarray:
    """v [S] of a policy [S, A], by solving the Bellman expectation equation. Raises ValueError without a solution."""
    return process.under(policy).values()


def evaluate_policy_iteratively(
    process: MarkovDecisionProcess, policy: np.ndarray, *, tolerance: float = 1e-12, most_sweeps: int = 100_000
) -> Plan:
    """The same by backups from zero until none changes a value by more than `tolerance` (ch. 4.1).

    Raises ValueError where that is not so after `most_sweeps`.
    """
    values = np.zeros(process.states)
    for sweep in range(1, most_sweeps + 1):
        backed_up = process.expectation_backup(policy, values)
        if np.abs(backed_up - values).max() <= tolerance:
            return Plan(policy, backed_up, sweep)
        values = backed_up
    raise ValueError(
        f"values still change after {most_sweeps} sweeps: an episode may never end, and nothing is discounted"
    )


def greedy_policy(process: MarkovDecisionProcess, values: np.ndarray) -> np.ndarray:
    """[S, A]: the best action by one step of looking ahead over values [S], the first of several."""
    best = process.action_values(values).argmax(1)
    policy: np.ndarray = np.eye(process.actions)[best]
    return policy


def policy_iteration(process: MarkovDecisionProcess) -> Plan:
    """An optimal policy: evaluate, be greedy, until greed changes nothing (ch. 4.3; Howard 1960).

    It begins with the uniform policy, which ends wherever some policy does. Raises ValueError where none does and
    nothing is discounted.
    """
    policy, sweeps = uniform_policy(process), 0
    while True:
        sweeps += 1
        values = evaluate_policy(process, policy)
        q = process.action_values(values)
        improves = q.max(1) > (policy * q).sum(1) + TIE
        if not improves.any():
            return Plan(policy, values, sweeps)
        policy = np.where(improves[:, None], greedy_policy(process, values), policy)


def value_iteration(process: MarkovDecisionProcess, *, tolerance: float = 1e-12, most_sweeps: int = 100_000) -> Plan:
    """An optimal policy by optimality backups alone (ch. 4.4).

    The values are within tolerance x gamma / (1 - gamma) of the optimal ones. Raises ValueError where a value still
    changes by more than the tolerance after `most_sweeps`.
    """
    values = np.zeros(process.states)
    for sweep in range(1, most_sweeps + 1):
        backed_up = process.optimality_backup(values)
        if np.abs(backed_up - values).max() <= tolerance:
            return Plan(greedy_policy(process, backed_up), backed_up, sweep)
        values = backed_up
    raise ValueError(f"values still change after {most_sweeps} sweeps: some policy earns without end")
