"""Statistics of rows before anything is done with them: forms, lengths, messages, scripts, exact duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from danlu.core.errors import DataError
from danlu.curation.rows import Part, content_digest
from danlu.curation.words import is_unspaced
from danlu.data.raw_rows import BadRow
from danlu.data.row_texts import check_row, placed_texts
from danlu.data.rows import detect_format
from danlu.data.sources import read_rows, source_names
from danlu.recipe.sections import Source

_PERCENTILES = (0, 5, 50, 95, 100)


@dataclass
class SourceStatistics:
    """Counts over the rows of one source.

    Attributes:
        formats: rows by row format.
        bad: rows that cannot be read, and the message of the first one.
        characters: of the texts of each row, all roles.
        messages: texts of each row.
        unspaced: rows in scripts without spaces, such as Chinese.
        repeated: rows with the roles and texts of an earlier one of any source.
    """

    name: str
    formats: Counter[str] = field(default_factory=Counter)
    bad: int = 0
    first_bad: str = ""
    characters: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)
    unspaced: int = 0
    repeated: int = 0

    def as_json(self) -> dict[str, object]:
        """The counts, with percentiles of lengths."""
        return {
            "source": self.name,
            "rows": len(self.characters),
            "formats": dict(self.formats),
            "bad": self.bad,
            "characters": sum(self.characters),
            "characters_of_rows": _percentiles(self.characters),
            "messages_of_rows": _percentiles(self.messages),
            "unspaced": self.unspaced,
            "repeated": self.repeated,
        }


def statistics_of(sources: Sequence[Source]) -> list[SourceStatistics]:
    """Reads all rows once; memory grows by some 50 bytes for each.

    Raises:
        DataError: a source cannot be read at all.
    """
    seen, results = set[bytes](), list[SourceStatistics]()
    for source, name in zip(sources, source_names(sources), strict=True):
        statistics = SourceStatistics(name)
        for raw in read_rows(source):
            try:
                if isinstance(raw.value, BadRow):
                    raise DataError(raw.value.message)
                format = detect_format(raw.value, raw.where) if source.format == "auto" else source.format
                check_row(raw.value, format, raw.where)
            except DataError as error:
                statistics.bad += 1
                statistics.first_bad = statistics.first_bad or str(error)
                continue
            parts = [Part(each.role, each.text) for each in placed_texts(raw.value, format)]
            digest = content_digest(parts)
            statistics.formats[format] += 1
            statistics.characters.append(sum(len(part.text) for part in parts))
            statistics.messages.append(len(parts))
            statistics.unspaced += is_unspaced("\n".join(part.text for part in parts))
            statistics.repeated += digest in seen
            seen.add(digest)
        results.append(statistics)
    return results


def statistics_lines(statistics: SourceStatistics) -> Iterator[str]:
    """The counts for the terminal."""
    formats = ", ".join(f"{count:,} {format}" for format, count in statistics.formats.most_common())
    yield f"{statistics.name}: {formats or 'no row that can be read'}"
    if statistics.characters:
        yield f"  {sum(statistics.characters):,} characters; of a row {_shown(statistics.characters)}"
        yield f"  texts of a row {_shown(statistics.messages)}"
        yield f"  {statistics.repeated:,} with the texts of an earlier row, {statistics.unspaced:,} without spaces"
    if statistics.bad:
        yield f"  {statistics.bad:,} cannot be read, the first: {statistics.first_bad}"


def _percentiles(values: Sequence[int]) -> dict[str, int]:
    if not values:
        return {}
    results = np.percentile(values, _PERCENTILES, method="nearest")
    return {str(percent): int(value) for percent, value in zip(_PERCENTILES, results, strict=True)}


def _shown(values: Sequence[int]) -> str:
    least, low, median, high, most = _percentiles(values).values()
    return f"{least:,} to {most:,}, half of them up to {median:,}, 90 % within {low:,} to {high:,}"
