"""Rows with personal data: masked, or dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from danlu.curation.personal.addresses import api_keys, emails, ip_addresses
from danlu.curation.personal.numbers import cards, has_long_number, national_ids, phones
from danlu.curation.personal.spans import Span, without_overlaps
from danlu.curation.ragged import Ragged
from danlu.curation.rows import Row
from danlu.curation.steps import KEEP, Marks, Needs, Summary, Verdict
from danlu.curation.tables import ragged_column

Kind = Literal["email", "key", "ip", "card", "id", "phone"]
KINDS: tuple[Kind, ...] = ("email", "key", "ip", "card", "id", "phone")
"""Kinds of personal data; of two spans that overlap, that of the kind further ahead counts."""


@dataclass(frozen=True)
class Personal:
    """Masks personal data in all texts of a row, or drops rows that have any.

    A mask stands for the characters of the data and for no others: spaces and punctuation around it stay, so the words
    next to it are the same tokens as before.

    Attributes:
        action: what is done.
        kinds: what is looked for.
        mask: what is written in its place; `{kind}` in it is the kind in capitals.
        regions: countries (ISO 3166) of telephone numbers without the code of one.
    """

    action: Literal["mask", "drop"] = "mask"
    kinds: tuple[Kind, ...] = KINDS
    mask: str = "[{kind}]"
    regions: tuple[str, ...] = ("US", "CN", "GB")
    name: ClassVar[str] = "personal"
    version: ClassVar[int] = 2
    needs: ClassVar[Needs] = "text"

    def measured_with(self) -> Mapping[str, object]:
        return {"kinds": list(self.kinds), "regions": list(self.regions)}

    def measure(self, rows: Sequence[Row]) -> Marks:
        """The spans of personal data of each row: part, start, stop and kind, four numbers each, in order."""
        return {"spans": Ragged.of([list(self._spans(row)) for row in rows], np.int64)}

    def decide(self, rows: Sequence[Row], marks: Marks, summary: Summary) -> list[Verdict]:
        spans = ragged_column(marks, "spans")
        return [
            self._verdict(row, spans[number].reshape(-1, 4).tolist()) if length else KEEP
            for number, (row, length) in enumerate(zip(rows, spans.lengths.tolist(), strict=True))
        ]

    def _spans(self, row: Row) -> Iterator[int]:
        for number, part in enumerate(row.parts):
            spans = ((span, kind) for kind in KINDS if kind in self.kinds for span in self._of_kind(kind, part.text))
            for (start, stop), kind in without_overlaps(spans):
                yield from (number, start, stop, KINDS.index(kind))

    def _of_kind(self, kind: Kind, text: str) -> Iterator[Span]:
        if kind in ("card", "id", "ip", "phone") and not has_long_number(text):
            return iter(())
        return phones(text, self.regions) if kind == "phone" else _FINDERS[kind](text)

    def _verdict(self, row: Row, spans: list[list[int]]) -> Verdict:
        counts = Counter(KINDS[kind] for *_, kind in spans)
        reason = "personal: " + ", ".join(kind for kind in KINDS if kind in counts)
        if self.action == "drop":
            return Verdict("drop", reason, value=float(len(spans)), threshold=0.0)
        texts = [part.text for part in row.parts]
        for number, start, stop, kind in reversed(spans):
            mask = self.mask.replace("{kind}", KINDS[kind].upper())
            texts[number] = texts[number][:start] + mask + texts[number][stop:]
        return Verdict("change", reason, value=float(len(spans)), threshold=0.0, texts=tuple(texts))


_FINDERS: dict[Kind, Callable[[str], Iterator[Span]]] = {
    "email": emails,
    "key": api_keys,
    "ip": ip_addresses,
    "card": cards,
    "id": national_ids,
}
