"""Random numbers of draws: functions of the draw's place, so that neither neighbours nor interruptions change them."""

from __future__ import annotations

import functools

DRAW, ACCEPT, RESIDUAL, PROPOSE = range(4)
"""Purposes of a number: a plain draw; whether a proposed token is kept, and the draw in its place; a draft model's
draw."""

_MASK64 = (1 << 64) - 1


def uniform(seed: int, number: int, sample: int, position: int, purpose: int = DRAW) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments (splitmix64 finaliser, chained).

    Args:
        number: of the request. sample: which of its answers. position: of the token in the sequence.
        purpose: DRAW, or one of the others.
    """
    state = _mixed(_sequence_state(seed, number, sample), position)
    return ((state if purpose == DRAW else _mixed(state, purpose)) >> 11) * 2.0**-53


@functools.lru_cache(maxsize=4096)
def _sequence_state(seed: int, number: int, sample: int) -> int:
    """The state that the numbers of one sequence have in common."""
    return functools.reduce(_mixed, (seed, number, sample), 0)


def _mixed(state: int, word: int) -> int:
    state = (state + word + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)
