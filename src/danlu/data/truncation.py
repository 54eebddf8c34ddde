"""Samples longer than `max_length`: truncated, split or dropped, and what is left counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from danlu.data.message_spans import Reason
from danlu.data.render import RenderedSample


@dataclass(frozen=True)
class Fitted:
    """What became of a sample that had to fit_to_length a length.

    Attributes:
        samples: what is left: one, several after a split, or none.
        shortened: what was done about its length; None if it was short enough.
        dropped: why none is left.
        lost_tokens: tokens that are in no sample.
    """

    samples: list[RenderedSample]
    shortened: Literal["truncated", "split", "dropped"] | None = None
    dropped: str | None = None
    lost_tokens: int = 0


NOTHING_TRAINED = "no token would be trained"
NOTHING_LEFT = "longer than max_length, with no trained token in what was left"
TOO_LONG = "longer than max_length"


def fit_to_length(
    rendered: RenderedSample, max_length: int | None, overlong: Literal["truncate", "split", "drop"]
) -> Fitted:
    """A sample cut to at most `max_length` tokens (None: any length), and dropped if it trains nothing.

    truncate keeps the beginning. split cuts a conversation before a user turn where it can, else anywhere. Where the
    next part would begin with a target it begins with the token before it, as context, so that no target is lost (a
    part of a single token has no room for that). Parts that train nothing are left out.
    """
    count = len(rendered.tokens)
    if not rendered.weights.any():
        return Fitted([], None, NOTHING_TRAINED, count)
    if max_length is None or count <= max_length:
        return Fitted([rendered])
    if overlong == "drop":
        return Fitted([], "dropped", TOO_LONG, count)
    if overlong == "truncate":
        kept = rendered.part(0, max_length)
        if not kept.weights.any():
            return Fitted([], "truncated", NOTHING_LEFT, count)
        return Fitted([kept], "truncated", None, count - max_length)
    parts = [
        (start, stop) for start, stop in _split_ranges(rendered, max_length) if rendered.weights[start + 1 : stop].any()
    ]
    covered = np.zeros(count, bool)
    for start, stop in parts:
        covered[start:stop] = True
    reason = None if parts else NOTHING_LEFT
    return Fitted([rendered.part(*part) for part in parts], "split", reason, int(count - covered.sum()))


def _split_ranges(rendered: RenderedSample, max_length: int) -> list[tuple[int, int]]:
    """Ranges of at most `max_length` tokens that together hold every target."""
    count, start, own, ranges = len(rendered.tokens), 0, 0, []  # own: the first token that is in no part before
    turn_starts = np.flatnonzero(np.diff(rendered.turns)) + 1
    of_users = np.unique(rendered.turns[rendered.reasons == Reason.USER])
    users = turn_starts[np.isin(rendered.turns[turn_starts], of_users[of_users >= 0])]
    while count - start > max_length:
        # A part of one token would train nothing, and the next one needs that token before its first target.
        fitting = users[(users > max(own, start + 1)) & (users <= start + max_length)]
        own = int(fitting[-1]) if len(fitting) else start + max_length
        ranges.append((start, own))
        start = max(own - 1, start + 1) if rendered.weights[own] > 0 else own
    return [*ranges, (start, count)]
