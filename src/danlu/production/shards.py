"""Shards: so many rows of a source, in order, kept as a file. Their borders follow from the rows alone."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from danlu.core.errors import DataError
from danlu.curation.packages import require
from danlu.curation.rows import Part, Row, place_of, row_of
from danlu.data.raw_rows import BadRow, RawRow, json_row
from danlu.data.row_texts import PlacedText, check_row, placed_texts, with_texts
from danlu.data.rows import Format, detect_format
from danlu.data.sources import read_rows
from danlu.production.work_files import WorkFolder, digest_of
from danlu.recipe.sections import Source

SHARD_ROWS, SHARD_BYTES = 2048, 8 << 20
"""A shard ends with the row that reaches one of these."""


@dataclass(frozen=True)
class Shard:
    """A shard of a source, without its rows.

    Attributes:
        number: its number among the shards of all sources, from 0.
        source: the number of its source, from 0.
        first: the number of its first row in the source, from 0.
        rows: how many rows it has, those too that cannot be read.
        format: that of its rows.
        key: a hash of all of this but the number, and of the rows.
    """

    number: int
    source: int
    first: int
    rows: int
    format: Format
    key: str

    def file(self, kind: str, key: str) -> str:
        """The name of a file of work on this shard."""
        return f"{self.number:06}/{kind}-{key}"


class ShardRows:
    """The rows of a shard.

    Args:
        shard: what it is.
        content: of the file that `split_into_shards` has written.
    """

    def __init__(self, shard: Shard, content: bytes) -> None:
        self.shard = shard
        head, _, lines = _unpack(content).partition(b"\n")
        self._head: dict[str, Any] = json.loads(head)
        self._lines = lines.split(b"\n")

    @property
    def where(self) -> list[str]:
        """The place of each row, as messages name it."""
        return self._head["where"]  # type: ignore[no-any-return]

    def line(self, number: int) -> bytes:
        """A row as JSON, as it came; of one that cannot be read, what there is of it."""
        return self._lines[number]

    def read(self, number: int) -> RowColumns | BadRow:
        """The columns of a row with its texts, or why there are none."""
        if (message := self._head["bad"].get(str(number))) is not None:
            return BadRow(message)
        value = json_row(self._lines[number], self.where[number])
        if isinstance(value, BadRow):
            return value
        try:
            check_row(value, self.shard.format, self.where[number])
        except DataError as error:
            return BadRow(str(error))
        return RowColumns(value, self.shard, number)


@dataclass
class RowColumns:
    """The columns of a row, and its number in its shard."""

    value: dict[str, Any]
    shard: Shard
    number: int

    @cached_property
    def places(self) -> list[PlacedText]:
        return placed_texts(self.value, self.shard.format)

    @property
    def row(self) -> Row:
        """The row that steps of curation judge."""
        parts = [Part(place.role, place.text) for place in self.places]
        return row_of(parts, self.shard.source, self.shard.first + self.number)

    def line_with(self, texts: Sequence[str]) -> bytes:
        """The row as a line of JSON, with other texts."""
        return json_line(with_texts(self.value, self.places, texts))


def bad_row_id(shard: Shard, number: int, line: bytes) -> str:
    """The id of a row that cannot be read."""
    return digest_of(b"%d %d %b" % (place_of(shard.source, shard.first + number), len(line), line)).hex()


def json_line(value: dict[str, Any], where: str = "") -> bytes:
    """Columns as a line of JSON, without its end.

    Raises:
        DataError: JSON cannot hold a value, such as the bytes of an image. Dates and decimals become texts.
    """

    def as_text(value: object) -> str:
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, decimal.Decimal):
            return str(value)
        raise DataError(f"{where}: JSON cannot hold a value of type {type(value).__name__}, which is in a column of it")

    try:
        return json.dumps(value, ensure_ascii=False, default=as_text).encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which has no bytes in UTF-8
        return json.dumps(value, default=as_text).encode("ascii")


def split_into_shards(
    sources: Sequence[Source], work: WorkFolder, *, shard_rows: int = SHARD_ROWS, shard_bytes: int = SHARD_BYTES
) -> Iterator[Shard]:
    """Reads all rows in order, and yields each shard once its file is in the work folder.

    Raises:
        DataError: a source cannot be read, or none of its first rows has a format that is known.
    """
    number = 0
    for source, section in enumerate(sources):
        rows = read_rows(section)
        format, rows = _format_of(section, rows)
        for first, lines, head in _groups(rows, shard_rows, shard_bytes):
            content = json.dumps(head).encode() + b"\n" + b"\n".join(lines)
            key = digest_of(json.dumps([source, first, format]).encode() + content).hex()
            shard = Shard(number, source, first, len(lines), format, key)
            if work.read(shard.file("rows", key)) is None:
                work.write(shard.file("rows", key), require("zstandard").ZstdCompressor().compress(content))
            yield shard
            number += 1


def read_shard(shard: Shard, work: WorkFolder) -> ShardRows:
    """The rows of a shard from its file."""
    content = work.read(shard.file("rows", shard.key))
    if content is None:
        raise DataError(f"{work.folder / shard.file('rows', shard.key)}: gone or altered. Run the command again")
    return ShardRows(shard, content)


def _unpack(content: bytes) -> bytes:
    unpacked: bytes = require("zstandard").ZstdDecompressor().decompress(content)
    return unpacked


def _groups(
    rows: Iterable[RawRow], shard_rows: int, shard_bytes: int
) -> Iterator[tuple[int, list[bytes], dict[str, Any]]]:
    """The rows of a source in groups: the number of the first one, their lines, and where they come from."""
    first, lines, where, bad, size = 0, list[bytes](), list[str](), dict[str, str](), 0
    for row in rows:
        line, fault = _line(row)
        if fault is not None:
            bad[str(len(lines))] = fault
        lines.append(line)
        where.append(row.where)
        size += len(line)
        if len(lines) == shard_rows or size >= shard_bytes:
            yield first, lines, {"where": where, "bad": bad}
            first, lines, where, bad, size = row.index + 1, [], [], {}, 0
    if lines:
        yield first, lines, {"where": where, "bad": bad}


def _line(row: RawRow) -> tuple[bytes, str | None]:
    """A row as a line of JSON, under the names that row formats read, and why it cannot be read."""
    if isinstance(row.content, bytes) and row.mapping is None:
        return row.content.strip().replace(b"\n", b" "), None
    if isinstance(row.value, BadRow):
        return b"", row.value.message
    return json_line(row.value, row.where), None


def _format_of(source: Source, rows: Iterator[RawRow]) -> tuple[Format, Iterator[RawRow]]:
    """The format of a source's rows, by the first one that has one, and all the rows."""
    if source.format != "auto":
        return source.format, rows
    looked_at, error = list[RawRow](), None
    for row in rows:
        looked_at.append(row)
        if isinstance(row.value, BadRow):
            error = error or DataError(row.value.message)
            continue
        try:
            return detect_format(row.value, row.where), chain(looked_at, rows)
        except DataError as problem:
            error = error or problem
        if len(looked_at) >= SHARD_ROWS:
            break
    raise error or DataError(f"{source.path}: there are no rows in it")
