"""The lengths of the documents that a recipe trains on, as far as they are known before the run. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Lengths:
    """Tokens of each document, and where they are known from."""

    documents: tuple[int, ...] | None
    """Tokens of each row that is trained on; None: packs of `data.max_length` tokens, each of one document."""
    source: Literal["token cache", "file", "full packs"]


FULL_PACKS = Lengths(None, "full packs")
