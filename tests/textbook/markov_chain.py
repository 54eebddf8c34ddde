"""Markov chains: what happens next depends on where one is, and on nothing before (Sutton and Barto, ch. 3.1).

S states
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Rows of probabilities may miss 1 by this much: what float64 loses over a sum of some thousand terms.
ROUNDING = 1e-9


def check_distributions(probabilities: np.ndarray, name: str) -> None:
    """Raises ValueError unless the last axis of an array holds probabilities that sum to 1, naming the first row."""
    if (probabilities < 0).any():
        place = tuple(int(index) for index in np.argwhere(probabilities < 0)[0])
        raise ValueError(f"{name}{list(place)} is {probabilities[place]}: a probability is not negative")
    sums = probabilities.sum(-1)
    if (wrong := np.abs(sums - 1) > ROUNDING).any():
        row = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise ValueError(f"{name}{list(row)} sums to {sums[row]}: the probabilities of a row sum to 1")


@dataclass(frozen=True)
class MarkovChain:
    """S states and the probability of each step between them. Raises ValueError for rows that are no distributions."""

    transitions: np.ndarray
    """[S, S] float64: transitions[s, t] = P(next state is t | state is s)."""

    def __post_init__(self) -> None:
        if self.transitions.ndim != 2 or self.transitions.shape[0] != self.transitions.shape[1]:
            raise ValueError(f"transitions have shape {self.transitions.shape}: a chain has as many rows as columns")
        check_distributions(self.transitions, "transitions")

    @property
    def states(self) -> int:
        """S."""
        return len(self.transitions)

    @property
    def absorbing(self) -> np.ndarray:
        """[S] bool: the states that are never left, but for how a sum of probabilities rounds."""
        stays: np.ndarray = np.diag(self.transitions) > 1 - ROUNDING
        return stays

    def distribution_after(self, steps: int, start: np.ndarray) -> np.ndarray:
        """[S]: where the chain is after so many steps from the distribution `start` [S] (Chapman and Kolmogorov)."""
        result: np.ndarray = start @ np.linalg.matrix_power(self.transitions, steps)
        return result

    def stationary_distribution(self) -> np.ndarray:
        """The distribution pi [S] that a step leaves as it is: pi P = pi, sum(pi) = 1.

        Raises ValueError where there are several, which is so where the chain has several parts it cannot leave.
        """
        # pi (P - I) = 0 has one equation too many; the one that says that pi sums to 1 takes its place beside them.
        equations = np.vstack([self.transitions.T - np.eye(self.states), np.ones(self.states)])
        right = np.append(np.zeros(self.states), 1.0)
        if np.linalg.matrix_rank(equations) < self.states:
            raise ValueError("the chain has several stationary distributions: it has parts that it cannot leave")
        solution: np.ndarray = np.linalg.lstsq(equations, right, rcond=None)[0]
        return solution

    def absorption_probabilities(self) -> np.ndarray:
        """[S, S]: from each state (row), the probability to end in each absorbing state (column); else 0.

        With Q the steps between states that are left and R those into absorbing ones it is (I - Q)^-1 R
        (Kemeny and Snell, Finite Markov Chains, theorem 3.3.7).

        Raises ValueError where an absorbing state cannot be reached from everywhere.
        """
        ends = self.absorbing
        result = np.diag(ends.astype(np.float64))
        result[np.ix_(~ends, ends)] = self._fundamental_matrix() @ self.transitions[np.ix_(~ends, ends)]
        return result

    def steps_until_absorbed(self) -> np.ndarray:
        """[S]: the expected number of steps until an absorbing state is reached, (I - Q)^-1 1. Raises ValueError."""
        steps = np.zeros(self.states)
        steps[~self.absorbing] = self._fundamental_matrix().sum(1)
        return steps

    def sample(self, generator: np.random.Generator, start: int, steps: int) -> np.ndarray:
        """[steps + 1] int64: states of one walk, of which the first is `start`."""
        walk = [start]
        for _ in range(steps):
            walk.append(int(generator.choice(self.states, p=self.transitions[walk[-1]])))
        return np.array(walk)

    def _fundamental_matrix(self) -> np.ndarray:
        """(I - Q)^-1: the expected visits to each state that is left, from each of them."""
        passing = ~self.absorbing
        between = self.transitions[np.ix_(passing, passing)]
        # Some power of Q loses probability from every state, or else the walk may go on for ever.
        remaining = np.linalg.matrix_power(between, max(1, len(between))).sum(1)
        if (remaining > 1 - ROUNDING).any():
            state = int(np.flatnonzero(passing)[np.argmax(remaining)])
            raise ValueError(f"from state {state} no absorbing state can be reached")
        inverse: np.ndarray = np.linalg.inv(np.eye(len(between)) - between)
        return inverse
