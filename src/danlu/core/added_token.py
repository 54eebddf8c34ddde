"""A token that a model's tokenizer did not have: its text, its id, and the rows that it starts from. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AddedToken:
    """A token behind those of a base's tokenizer."""

    text: str
    id: int
    special: bool = False
    of: tuple[int, ...] | None = None
    """Tokens of the base: its rows start at the mean of theirs. None: at the mean of all of the base's tokens."""


def as_added_tokens(entries: Iterable[Any]) -> tuple[AddedToken, ...]:
    """Tokens of their fields as JSON has them. Raises ValueError for entries that are none."""
    try:
        tokens = [
            AddedToken(**{**entry, "of": None if entry["of"] is None else tuple(entry["of"])}) for entry in entries
        ]
    except (TypeError, KeyError):
        raise ValueError(f"{entries!r} are no added tokens") from None
    if not all(isinstance(token.text, str) and isinstance(token.id, int) and token.id >= 0 for token in tokens):
        raise ValueError(f"{entries!r} are no added tokens")
    return tuple(tokens)
