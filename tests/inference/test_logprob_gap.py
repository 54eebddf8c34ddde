"""The gap between a trainer's log-probabilities and recorded ones."""

from __future__ import annotations

import pytest

from danlu.inference.logprob_gap import RolloutGap, rollout_gap
from danlu.inference.request import Completion


def completion(logprobs: list[float]) -> Completion:
    tokens = list(range(len(logprobs)))
    return Completion(0, 0, tokens, logprobs, logprobs, None, [0] * len(tokens), "", "length")


def test_it_is_over_all_tokens() -> None:
    completions = [completion([-1.0, -2.0, -3.0]), completion([-0.5])]
    assert rollout_gap(completions, [[-1.0, -2.5, -3.0], [-0.25]]) == RolloutGap(4, 0.5, 0.1875)
    assert rollout_gap(completions, [[-1.0, -2.0, -3.0], [-0.5]]) == RolloutGap(4, 0.0, 0.0)
    assert rollout_gap([], []) == RolloutGap(0, 0.0, 0.0)


def test_every_token_has_both() -> None:
    with pytest.raises(ValueError, match="zip"):
        rollout_gap([completion([-1.0])], [[-1.0, -2.0]])
    with pytest.raises(ValueError, match="zip"):
        rollout_gap([completion([-1.0])], [])
