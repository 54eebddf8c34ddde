"""The tokens of an answer at which its steps end: rewards of steps judge text, and are earned by tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from danlu.inference.episode import segments_of
from danlu.inference.request import Completion
from danlu.inference.stopping import Decode, Detokenizer
from danlu.rewards.protocol import StepRewards

TokenRewards = tuple[np.ndarray, np.ndarray]
"""Rewards at steps: (places [K] int64 among the drawn tokens of an answer, rewards [K] float64)."""


def token_rewards(
    completion: Completion, prompt: Sequence[int], steps: Mapping[int, StepRewards], decode: Decode
) -> dict[int, TokenRewards]:
    """Computes the rewards of an answer's steps, by the number of the reward, at the tokens that complete the steps'
    last characters. If there are several turns, the judged text is that of the last.

    prompt: the tokens that the answer was drawn after.
    """
    if not steps or not completion.tokens:
        return {}
    segment = segments_of(completion, prompt)[-1]
    before = np.flatnonzero(~np.array(segment.drawn, bool))
    first = int(before[-1]) + 1 if len(before) else 0  # of the last answer in its segment
    tokens = segment.tokens[first:]
    offset = len(completion.tokens) - len(tokens)
    lengths = _text_lengths((*segment.prompt, *segment.tokens[:first]), tokens, decode)
    placed = {}
    for reward, each in steps.items():
        places = np.minimum(np.searchsorted(lengths, np.array(each.ends)), len(tokens) - 1)
        placed[reward] = (offset + places.astype(np.int64), np.array(each.values, np.float64))
    return placed


def _text_lengths(context: Sequence[int], tokens: Sequence[int], decode: Decode) -> np.ndarray:
    """[T] int64: characters of the text that is whole with each token."""
    detokenizer, length, lengths = Detokenizer(decode, context), 0, []
    for token in tokens:
        length += len(detokenizer.push(token))
        lengths.append(length)
    return np.array(lengths, np.int64)
