"""Markov decision processes: at each state an action is chosen (Sutton and Barto, ch. 3).

S states · A actions · gamma discount
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from textbook.markov_chain import MarkovChain, check_distributions
from textbook.markov_reward_process import MarkovRewardProcess


@dataclass(frozen=True)
class Episode:
    """One walk: states [T + 1], and of each of the T steps the action and the reward."""

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True)
class MarkovDecisionProcess:
    """What each action leads to and pays. Raises ValueError for shapes or probabilities that do not fit.

    An end of episodes is a state in which every action stays and pays nothing.
    """

    transitions: np.ndarray
    """[S, A, S] float64: transitions[s, a, t] = P(next state is t | state is s, action is a)."""
    rewards: np.ndarray
    """[S, A] float64: the expected reward of each action in each state."""
    discount: float
    """gamma, from 0 to 1."""

    def __post_init__(self) -> None:
        shape = self.transitions.shape
        if len(shape) != 3 or shape[0] != shape[2] or self.rewards.shape != shape[:2]:
            raise ValueError(
                f"transitions have shape {shape}, not [S, A, S], or rewards {self.rewards.shape} not [S, A]"
            )
        check_distributions(self.transitions, "transitions")

    @property
    def states(self) -> int:
        """S."""
        return self.transitions.shape[0]

    @property
    def actions(self) -> int:
        """A."""
        return self.transitions.shape[1]

    @property
    def terminal(self) -> np.ndarray:
        """[S] bool: the states in which every action stays."""
        stays: np.ndarray = (self.transitions[np.arange(self.states), :, np.arange(self.states)] == 1).all(-1)
        return stays

    def under(self, policy: np.ndarray) -> MarkovRewardProcess:
        """What remains to happen once actions are chosen by a policy [S, A]: P(action | state). Raises ValueError."""
        check_distributions(policy, "policy")
        transitions = np.einsum("sa,sat->st", policy, self.transitions)
        return MarkovRewardProcess(MarkovChain(transitions), (policy * self.rewards).sum(1), self.discount)

    def action_values(self, values: np.ndarray) -> np.ndarray:
        """q [S, A] = r(s, a) + gamma sum over t of P(t | s, a) v(t), for state values v [S]."""
        result: np.ndarray = self.rewards + self.discount * self.transitions @ values
        return result

    def expectation_backup(self, policy: np.ndarray, values: np.ndarray) -> np.ndarray:
        """[S]: the right side of the Bellman expectation equation, v = sum over a of pi(a | s) q(s, a)."""
        result: np.ndarray = (policy * self.action_values(values)).sum(1)
        return result

    def optimality_backup(self, values: np.ndarray) -> np.ndarray:
        """[S]: the right side of the Bellman optimality equation, v = max over a of q(s, a)."""
        result: np.ndarray = self.action_values(values).max(1)
        return result

    def sample(self, policy: np.ndarray, generator: np.random.Generator, start: int, steps: int) -> Episode:
        """An episode of at most so many steps under a policy [S, A], which ends at a terminal state."""
        terminal = self.terminal
        states: list[int] = [start]
        actions: list[int] = []
        rewards: list[float] = []
        while len(actions) < steps and not terminal[states[-1]]:
            actions.append(int(generator.choice(self.actions, p=policy[states[-1]])))
            rewards.append(float(self.rewards[states[-1], actions[-1]]))
            states.append(int(generator.choice(self.states, p=self.transitions[states[-1], actions[-1]])))
        return Episode(np.array(states), np.array(actions, dtype=np.int64), np.array(rewards))
