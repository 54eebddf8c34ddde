"""The difference between a trainer's log-probabilities of a rollout and the recorded ones. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from danlu.inference.request import Completion


@dataclass(frozen=True)
class RolloutGap:
    """|trainer - rollout| of log-probabilities, in nats; 0 of no tokens."""

    tokens: int
    largest: float
    mean: float


def rollout_gap(completions: Sequence[Completion], trainer: Sequence[Sequence[float]]) -> RolloutGap:
    """The gap over all tokens of some completions.

    With `numerics: exact` it is 0. Else importance weights between trainer and rollout correct for it, and it is the
    first thing to look at where a policy gradient goes astray: 1e-6 in float32, 1e-2 in bfloat16 are usual.

    trainer: the log-probabilities of each completion's tokens under softmax(logits / temperature), by the weights that
    drew them. Raises ValueError where one of them has none.
    """
    pairs = [
        pair
        for completion, logprobs in zip(completions, trainer, strict=True)
        for pair in zip(completion.logprobs, logprobs, strict=True)
    ]
    if not pairs:
        return RolloutGap(0, 0.0, 0.0)
    gaps = [abs(recorded - computed) for recorded, computed in pairs]
    return RolloutGap(len(gaps), max(gaps), sum(gaps) / len(gaps))
