"""Readers of the file formats: from a file of JSON, CSV, text, parquet or arrow to raw rows, one at a time.

A row of jsonl, csv or parquet is read when it is asked for, so a file may be larger than memory. A json array is the
one exception: its text is held, but its objects are still parsed one by one.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from danlu.core.errors import DataError
from danlu.data.column_values import MAX_DEPTH, TOO_DEEP, is_too_deep
from danlu.data.compressed_files import DECOMPRESSORS, first_line, open_decompressed
from danlu.data.raw_rows import BadRow, LocatedContent, decode_utf8, json_row, not_utf8_error, require_object

TEXT_ROW_BYTES = 64 * 2**10
"""A document of a txt file comes in rows of about this size, so that a large one is tokenised in parallel."""
DOCUMENT_END = "<|endoftext|>"
"""A line of a txt file that is only this ends a document."""
MAX_LINE_BYTES = 2**30
BATCH_ROWS = 512


def format_of(file: Path) -> str:
    """Returns the ending of a file's name by which `_READERS` reads it, without that of a compression."""
    packing = file.suffix.lower()
    if packing not in DECOMPRESSORS:
        return packing
    inner = Path(file.stem).suffix.lower()
    return inner if inner in _TEXT_FORMATS else f"{inner}{packing}"


def describe_formats() -> str:
    """The endings of the files that can be read, for messages."""
    kinds = ", ".join(sorted(kind.removeprefix(".") for kind in READERS))
    return f"{kinds}; json, lines and text also as {', '.join(kind.removeprefix('.') for kind in DECOMPRESSORS)}"


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without a byte order mark.

    Raises DataError for one that is longer than `MOST_LINE_BYTES`, as a few packed bytes can be.
    """
    for number in count(1):
        line = stream.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            raise DataError(
                f"{name}:{number}: a line longer than {MAX_LINE_BYTES >> 20} MiB, the most that a row may have"
            )
        if not line:
            return
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _first_line(file: Path, name: str) -> bytes:
    """The first line with anything in it, without the white space around it."""
    with open_decompressed(file) as stream:
        return next((line.strip() for _, line in _lines(stream, name) if line.strip()), b"")


def _read_jsonl(file: Path, name: str) -> Iterator[LocatedContent]:
    """Objects line by line, or an array of objects (which some files called .jsonl are)."""
    first = _first_line(file, name)
    if first.startswith(b"[") and _begins_array(first, name):
        yield from _read_array(file, name)
        return
    with open_decompressed(file) as stream:
        for number, line in _lines(stream, name):
            if line.strip():
                yield f"{name}:{number}", line.rstrip(b"\r\n")


def _read_json(file: Path, name: str) -> Iterator[LocatedContent]:
    """An array of objects, one object, or objects line by line (which many files called .json are)."""
    first = _first_line(file, name)
    is_jsonl = first.startswith(b"{") and isinstance(json_row(first, name), dict)
    yield from (_read_jsonl if is_jsonl else _read_array)(file, name)


def _begins_array(line: bytes, name: str) -> bool:
    """Whether the first line of a file that begins with a bracket is (the beginning of) an array of objects."""
    try:
        value = json.loads(decode_utf8(line, f"{name}:1"))
    except (ValueError, RecursionError):
        return line[1:].lstrip()[:1] in (b"", b"{")
    except DataError:
        return False
    return bool(value) and all(isinstance(row, dict) for row in value)


def _read_array(file: Path, name: str) -> Iterator[LocatedContent]:
    """An array of objects, or one object over several lines, held in memory as text."""
    with open_decompressed(file) as stream:
        data = stream.read().removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise not_utf8_error(data, error, f"{name}:{line}") from error
    del data  # rows are parsed from the text; both at once would be twice the file
    yield from _json_values(text, name)


def _json_values(text: str, name: str) -> Iterator[LocatedContent]:
    """The objects of a json array, or the one object, parsed one at a time."""
    decode = json.JSONDecoder().raw_decode
    space = re.compile(r"\s*")

    def skip(position: int) -> int:
        match = space.match(text, position)
        assert match is not None, "an empty run of spaces always matches"
        return match.end()

    position, line, counted = skip(0), 1, 0
    is_array = text.startswith("[", position)
    position = skip(position + is_array)
    try:
        while not (is_array and text.startswith("]", position)):
            line, counted = line + text.count("\n", counted, position), position
            begin = position
            value, position = decode(text, position)
            brackets = text.count("[", begin, position) + text.count("{", begin, position)
            if brackets > MAX_DEPTH and is_too_deep(value):
                value = BadRow(f"{name}:{line}: unreadable JSON: {TOO_DEEP}")
            yield f"{name}:{line}", value if isinstance(value, BadRow) else require_object(value, f"{name}:{line}")
            position = skip(position)
            if not is_array:
                break
            if text.startswith(",", position):
                position = skip(position + 1)
                if text.startswith("]", position):
                    raise json.JSONDecodeError("a comma before the end of the array", text, position)
            elif not text.startswith("]", position):
                raise json.JSONDecodeError("expecting ',' or ']' after a row", text, position)
        if skip(position + is_array) != len(text):
            raise json.JSONDecodeError("more text after the end", text, skip(position + is_array))
    except json.JSONDecodeError as error:
        # Where the next row of a broken array begins is a guess, so this cannot be one bad row.
        raise DataError(f"{name}:{error.lineno}:{error.colno}: broken JSON: {error.msg}") from error
    except RecursionError:  # where the row ends is not known
        raise DataError(f"{name}:{line}: unreadable JSON in the row that begins here: {TOO_DEEP}") from None
    except ValueError as error:  # a number of thousands of digits
        raise DataError(
            f"{name}:{line}: unreadable JSON in the row that begins here: a number has too many digits"
        ) from error


def _read_csv(file: Path, name: str) -> Iterator[LocatedContent]:
    # The limit is one number for the whole process; 128 KiB would refuse a long answer.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with open_decompressed(file) as data, TextIOWrapper(data, encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter="\t" if format_of(file) == ".tsv" else ",", strict=True)
        try:
            columns = next(reader, [])
            if len(set(columns)) != len(columns) or "" in columns:
                raise DataError(f"{name}:1: the first line must name the columns, each once; it is {columns}")
            line = reader.line_num + 1
            for fields in reader:
                where = f"{name}:{line}"
                line = reader.line_num + 1
                if len(fields) == len(columns):
                    yield where, dict(zip(columns, fields, strict=True))
                elif fields:
                    problem = f"{where}: {len(fields)} fields, but the first line names {len(columns)} columns"
                    yield where, BadRow(problem)
        except csv.Error as error:
            raise DataError(f"{name}:{reader.line_num}: broken CSV: {error}") from error
        except UnicodeDecodeError:
            _find_not_utf8(file, name)
            raise


def _find_not_utf8(file: Path, name: str) -> None:
    """Say in which line of a file the text is not UTF-8: a reader decodes ahead of the line it is at."""
    with open_decompressed(file) as stream:
        for number, line in _lines(stream, name):
            decode_utf8(line, f"{name}:{number}")


def _read_text(file: Path, name: str) -> Iterator[LocatedContent]:
    with open_decompressed(file) as stream:
        start, lines, size, begins = 1, list[str](), 0, True
        for number, segment, is_line in _line_segments(stream, name):
            text = segment.replace("\r\n", "\n")
            at_end = is_line and text.rstrip("\n") == DOCUMENT_END
            # A blank line ends a paragraph and belongs to it, so the next row begins with text.
            at_paragraph = bool(lines) and not lines[-1].strip() and bool(text.strip())
            if at_end or (size >= TEXT_ROW_BYTES and (at_paragraph or size >= 2 * TEXT_ROW_BYTES)):
                yield from _text_row(f"{name}:{start}", lines, begins, at_end)
                start, lines, size, begins = number + at_end, [], 0, at_end
            if not at_end:
                lines.append(text)
                size += len(segment)
        yield from _text_row(f"{name}:{start}", lines, begins, True)


def _line_segments(stream: BinaryIO, name: str) -> Iterator[tuple[int, str, bool]]:
    """Lines, and parts of lines that are longer than a row: line number, text, whether it is a line.

    Some corpora are a single line. Such a line is cut before a space, so that the next part begins as a word does, and
    where there is none before a whole character.
    """
    number, rest, in_line = 1, b"", False
    while read := stream.readline(TEXT_ROW_BYTES):
        data = rest + (read.removeprefix(codecs.BOM_UTF8) if number == 1 and not in_line else read)
        rest = b""
        ends = read.endswith(b"\n") or len(read) < TEXT_ROW_BYTES
        if not ends and data:
            cut = data.rfind(b" ")
            cut = cut if cut > 0 else _last_character(data)
            data, rest = data[:cut], data[cut:]
        if data:
            yield number, decode_utf8(data, f"{name}:{number}"), ends and not in_line
        in_line = not ends
        number += ends
    if rest:
        yield number, decode_utf8(rest, f"{name}:{number}"), False


def _last_character(data: bytes) -> int:
    """Returns the offset of the last, perhaps unfinished, UTF-8 character; the end for bytes that are no UTF-8."""
    for place in range(len(data) - 1, max(0, len(data) - 4), -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return len(data)


def _text_row(where: str, lines: list[str], begins: bool, ends: bool) -> Iterator[LocatedContent]:
    text = "".join(lines)
    if text.strip() or not (begins and ends):
        borders = {"document_begins": begins, "document_ends": ends}
        yield where, {"text": text, **{name: False for name, is_border in borders.items() if not is_border}}


def _read_parquet(file: Path, name: str) -> Iterator[LocatedContent]:
    # Imported here: 60 ms and 40 MiB that other kinds of files do not need.
    import pyarrow
    import pyarrow.parquet

    from danlu.data.columnar_rows import numbered_rows

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            yield from numbered_rows(name, parquet.iter_batches(BATCH_ROWS))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable parquet file: {first_line(error)}") from error


def _read_arrow(file: Path, name: str) -> Iterator[LocatedContent]:
    # Imported here: 60 ms and 40 MiB that other kinds of files do not need.
    import pyarrow

    from danlu.data.columnar_rows import numbered_rows

    try:
        with pyarrow.memory_map(str(file)) as mapped:
            if mapped.read(6) == b"ARROW1":
                reader = pyarrow.ipc.open_file(mapped)
                batches: Iterable[Any] = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:  # the streaming form, which the datasets library writes
                mapped.seek(0)
                batches = pyarrow.ipc.open_stream(mapped)
            parts = (batch.slice(at, BATCH_ROWS) for batch in batches for at in range(0, batch.num_rows, BATCH_ROWS))
            yield from numbered_rows(name, parts)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable arrow file: {first_line(error)}") from error


_TEXT_FORMATS = frozenset({".csv", ".json", ".jsonl", ".ndjson", ".tsv", ".txt"})  # read from front to end
READERS: dict[str, Callable[[Path, str], Iterator[LocatedContent]]] = {
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
    ".tsv": _read_csv,
    ".txt": _read_text,
}
