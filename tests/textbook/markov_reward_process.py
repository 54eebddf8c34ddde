"""Markov reward processes: a chain that pays on the way, and what each state is worth (Sutton and Barto, ch. 3.3).

S states · gamma discount
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from textbook.markov_chain import MarkovChain


def discounted_return(rewards: Sequence[float] | np.ndarray, discount: float) -> float:
    """G = r_1 + gamma r_2 + gamma^2 r_3 + ... of one episode's rewards."""
    total = 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
    return total


@dataclass(frozen=True)
class MarkovRewardProcess:
    """A chain with a reward for each state that is left. Raises ValueError for shapes or a discount that do not fit."""

    chain: MarkovChain
    rewards: np.ndarray
    """[S] float64: the expected reward of the step out of each state."""
    discount: float
    """gamma, from 0 to 1; 1 asks for an end that is always reached and pays nothing."""

    def __post_init__(self) -> None:
        if self.rewards.shape != (self.chain.states,):
            raise ValueError(f"rewards have shape {self.rewards.shape}, and the chain {self.chain.states} states")
        if not 0 <= self.discount <= 1:
            raise ValueError(f"discount {self.discount}: it is from 0 to 1")
        if self.discount == 1 and (paid := self.chain.absorbing & (self.rewards != 0)).any():
            raise ValueError(
                f"state {int(np.argmax(paid))} is never left and pays: without a discount its value is not finite"
            )

    def backup(self, values: np.ndarray) -> np.ndarray:
        """r + gamma P v [S]: the right side of the Bellman expectation equation for values v [S]."""
        result: np.ndarray = self.rewards + self.discount * self.chain.transitions @ values
        return result

    def values(self) -> np.ndarray:
        """v [S], the expected return from each state: the solution of v = r + gamma P v.

        Raises ValueError where gamma is 1 and an absorbing state cannot be reached from everywhere.
        """
        if self.discount < 1:
            system = np.eye(self.chain.states) - self.discount * self.chain.transitions
            solution: np.ndarray = np.linalg.solve(system, self.rewards)
            return solution
        # An end is worth nothing; among the other states the equation has one solution.
        self.chain.steps_until_absorbed()  # raises where there is none
        passing = ~self.chain.absorbing
        between = self.chain.transitions[np.ix_(passing, passing)]
        values = np.zeros(self.chain.states)
        values[passing] = np.linalg.solve(np.eye(len(between)) - between, self.rewards[passing])
        return values

    def visits(self, start: np.ndarray) -> np.ndarray:
        """[S]: sum over t of gamma^t P(state at t is s), from the distribution `start` [S].

        start . v = visits . r, so these are the weights of each state's reward. Raises ValueError as `values` does.
        """
        # The same equation with the transitions turned around: a state is visited at first, or after another one.
        turned = np.eye(self.chain.states) - self.discount * self.chain.transitions.T
        if self.discount < 1:
            solution: np.ndarray = np.linalg.solve(turned, start)
            return solution
        self.chain.steps_until_absorbed()
        passing = ~self.chain.absorbing
        visits = np.zeros(self.chain.states)  # of an end that pays nothing none is counted
        visits[passing] = np.linalg.solve(turned[np.ix_(passing, passing)], start[passing])
        return visits
