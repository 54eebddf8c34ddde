"""Spans of a text, and the words just before them."""

from __future__ import annotations

import re
from collections.abc import Iterable

Span = tuple[int, int]
"""First character and stop of a part of a text."""
_CONTEXT = 24  # characters before a span in which the word for it stands


def is_preceded(text: str, start: int, pattern: re.Pattern[str]) -> bool:
    """Whether a pattern is found on the same line within 24 characters before a place."""
    before = text[max(0, start - _CONTEXT) : start]
    return pattern.search(before.rpartition("\n")[2]) is not None


def without_overlaps(spans: Iterable[tuple[Span, str]]) -> list[tuple[Span, str]]:
    """Spans with their kinds in the order of the text; of two that overlap the one given first stays."""
    kept = list[tuple[Span, str]]()
    for (start, stop), kind in spans:
        if all(stop <= other_start or other_stop <= start for (other_start, other_stop), _ in kept):
            kept.append(((start, stop), kind))
    return sorted(kept)
