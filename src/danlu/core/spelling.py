"""Suggestions for a misspelt name."""

from __future__ import annotations

from difflib import get_close_matches


def closest_match(name: object, candidates: list[str]) -> str | None:
    """The candidate most like a misspelt name, or the longest that it begins with; None if none is like it at all."""
    lower = str(name).lower()
    matches = get_close_matches(lower, candidates, n=1, cutoff=0.6)
    beginnings = [candidate for candidate in candidates if len(candidate) > 2 and lower.startswith(candidate)]
    return matches[0] if matches else max(beginnings, key=len, default=None)


def did_you_mean(name: str, candidates: list[str] | dict[str, str]) -> str:
    """` Did you mean 'rank'?` for a misspelt name: the candidate most like it, or its value; else ""."""
    guess = closest_match(name, list(candidates))
    if guess is None:
        return ""
    return f" Did you mean {candidates[guess] if isinstance(candidates, dict) else guess!r}?"
