"""A row of a data set as curation sees it: its texts, where it stands among all rows, and what it was made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from danlu.curation.packages import require

Role = Literal["text", "system", "user", "assistant", "tool", "repeated"]
"""The kind of a text. "repeated" is one that stands in the row before, as the prompt of a rejected answer does."""
WRITTEN: frozenset[Role] = frozenset({"text", "user", "assistant"})
"""The roles of what a row says; a system prompt or the output of a tool is its frame."""
_ROW_BITS = 40
MAX_ROWS = 1 << _ROW_BITS
"""Rows of one source that places can number."""


@dataclass(frozen=True, slots=True)
class Part:
    """A document (role "text"), or one message of a conversation."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a row.

    Attributes:
        parents: ids of the rows that it was made of; none for a row that was read.
        model: the model that wrote it; empty for none.
        seed: the seed of its draw; None where nothing was drawn.
        steps: names of the steps that changed it, in order.
    """

    parents: tuple[str, ...] = ()
    model: str = ""
    seed: int | None = None
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """A document or a conversation.

    Attributes:
        id: 32 hexadecimal digits, a hash of the texts and the place that the row came with. A row keeps it when a step
            changes its texts.
        place: the number of its source and its number there, as one integer (`place_of`). Places order all rows.
        parts: its texts. A step may change them, never their number or roles: whoever read the row puts each text back
            to where it stood.
    """

    id: str
    place: int
    parts: tuple[Part, ...]
    provenance: Provenance = field(default_factory=Provenance)

    @property
    def is_document(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].role == "text"

    @property
    def text(self) -> str:
        """The document, or what user and assistant wrote, one message after the other. Rules read nothing else."""
        if len(self.parts) == 1:
            part = self.parts[0]
            return part.text if part.role in WRITTEN else ""
        return "\n".join(part.text for part in self.parts if part.role in WRITTEN)

    def with_texts(self, texts: Sequence[str], step: str) -> Row:
        """The row after a step has changed its texts: one for each part, in order."""
        parts = tuple(Part(part.role, text) for part, text in zip(self.parts, texts, strict=True))
        return replace(self, parts=parts, provenance=replace(self.provenance, steps=(*self.provenance.steps, step)))


def place_of(source: int, row: int) -> int:
    """The place of a row (from 0) of a source (from 0): places are ordered by source, then by row."""
    assert source >= 0 and 0 <= row < MAX_ROWS, f"source {source}, row {row}: no such place"
    return source << _ROW_BITS | row


def source_and_row(place: int) -> tuple[int, int]:
    """The numbers that `place_of` was given."""
    return place >> _ROW_BITS, place & (MAX_ROWS - 1)


def row_of(parts: Iterable[Part], source: int, row: int, provenance: Provenance | None = None) -> Row:
    """A row with its id, from its texts and the numbers (from 0) of its source and of the row in it."""
    parts, place = tuple(parts), place_of(source, row)
    return Row(content_digest(parts, seed=place).hex(), place, parts, provenance or Provenance())


def content_digest(parts: Iterable[Part], seed: int = 0) -> bytes:
    """A hash (xxh3, 128 bits) of roles and texts, and of a number below 2^64."""
    content = bytearray()
    for part in parts:
        text = part.text.encode("utf-8", "surrogatepass")
        content += f"{part.role}:{len(text)}:".encode()  # the length: other parts never have the same bytes
        content += text
    digest: bytes = require("xxhash").xxh3_128_digest(content, seed)
    return digest


def document(text: str, source: int, row: int) -> Row:
    """A row that is one text."""
    return row_of([Part("text", text)], source, row)
