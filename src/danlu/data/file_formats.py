"""Readers of the file formats: from a file of JSON, CSV, text, parquet or arrow to raw rows, one at a time.

A row of jsonl, csv or parquet is read when it is asked for, so a file may be larger than memory. A json array is the
one exception: its text is held, but its objects are still parsed one by one. Files of text may be packed: they are
decompressed as they are read.

A column of parquet or arrow has one type for all rows, so the objects of a row are filled in with null for every key
that an object of another row has. Such nulls are no values: the key was not there. JSON in a column of type
`arrow.json` (`Json` of the datasets library) is parsed.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

from danlu.core.errors import DataError
from danlu.data.column_values import MAX_DEPTH, TOO_DEEP, is_too_deep
from danlu.data.raw_rows import BadRow, LocatedContent, decode_utf8, json_row, not_utf8_error, require_object

TEXT_ROW_BYTES = 64 * 2**10
"""A document of a txt file comes in rows of about this size, so that a large one is tokenised in parallel."""
DOCUMENT_END = "<|endoftext|>"
"""A line of a txt file that is only this ends a document."""
MAX_LINE_BYTES = 2**30
BATCH_ROWS = 512
DATASET_DICT = "dataset_dict.json"  # of a folder that `DatasetDict.save_to_disk` wrote
DATA_CARD = "data-card.json"
"""The card in a folder that danlu has produced (`danlu.production`), with rows in folders below it."""


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
            # The reader decodes ahead of the line it is at: the line that is not UTF-8 is looked for.
            with open_decompressed(file) as lines:
                for number, raw in _lines(lines, name):
                    decode_utf8(raw, f"{name}:{number}")
            raise


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

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            yield from numbered_rows(name, parquet.iter_batches(BATCH_ROWS))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable parquet file: {first_line(error)}") from error


def _read_arrow(file: Path, name: str) -> Iterator[LocatedContent]:
    # Imported here: 60 ms and 40 MiB that other kinds of files do not need.
    import pyarrow

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


READ_BYTES = 2**20


def open_decompressed(file: Path) -> BinaryIO:
    """The bytes of a file, unpacked."""
    unpack = DECOMPRESSORS.get(file.suffix.lower())
    try:
        return file.open("rb") if unpack is None else cast(BinaryIO, unpack(file))
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


@contextmanager
def reading_errors(file: Path, name: str) -> Iterator[None]:
    """Raises DataError for errors of reading and unpacking a file that is damaged, or not of the kind that its name
    says.
    """
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if file.suffix.lower() not in DECOMPRESSORS:
            raise DataError(f"{name}: cannot be read: {first_line(error)}") from error
        kind = file.suffix.lower().removeprefix(".")
        raise DataError(f"{name}: damaged, or no {kind} file: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _open_zstandard(file: Path) -> BinaryIO:
    with file.open("rb") as stream:
        _check_zstandard(stream)
    # Imported here: 60 ms and 40 MiB that other kinds of files do not need.
    import pyarrow

    return cast(BinaryIO, BufferedReader(pyarrow.CompressedInputStream(file.open("rb"), "zstd"), READ_BYTES))


def _check_zstandard(stream: BinaryIO) -> None:
    """Raises EOFError for frames that are not whole (RFC 8878, section 3.1), which Arrow reads without an error."""

    def take(size: int) -> bytes:
        data = stream.read(size)
        if len(data) < size:
            raise EOFError("the file ends within a frame")
        return data

    while magic := stream.read(4):
        number = int.from_bytes(magic, "little")
        if number & 0xFFFFFFF0 == 0x184D2A50:  # a frame to be skipped
            stream.seek(int.from_bytes(take(4), "little"), os.SEEK_CUR)
            continue
        if number != 0xFD2FB528:
            raise EOFError("what follows is no frame")
        descriptor = take(1)[0]
        single = descriptor >> 5 & 1
        take((1 - single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6])
        last = 0
        while not last:
            block = int.from_bytes(take(3), "little")
            last, kind, size = block & 1, block >> 1 & 3, block >> 3
            if content := 1 if kind == 1 else size:  # of a repeated byte there is one
                stream.seek(content - 1, os.SEEK_CUR)
                take(1)
        take(4 if descriptor >> 2 & 1 else 0)


DECOMPRESSORS: dict[str, Callable[[Path], Any]] = {
    ".bz2": bz2.open,
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}


Read = Callable[[Any], Any]
"""Turns a value as pyarrow gives it into the value of a row; never called with None."""


def numbered_rows(name: str, batches: Iterable[Any]) -> Iterator[LocatedContent]:
    """The rows of pyarrow record batches or tables, which have numbers (from 1) but no lines."""
    number = 0
    for batch in batches:
        reads = {field.name: read for field in batch.schema if (read := _read_of(field.type)) is not None}
        for row in batch.to_pylist():
            number += 1
            yield f"{name} row {number}", _read_row(row, reads, f"{name} row {number}") if reads else row


def _read_row(row: dict[str, Any], reads: dict[str, Read], where: str) -> dict[str, Any] | BadRow:
    for column, read in reads.items():
        if row[column] is not None:
            try:
                row[column] = read(row[column])
            except (ValueError, RecursionError) as error:
                return BadRow(f"{where}: unreadable JSON in column '{column}': {error}")
    return row


def _read_of(arrow_type: Any) -> Read | None:
    """How values of a type are read; None where they are as pyarrow gives them."""
    from pyarrow import types

    if getattr(arrow_type, "extension_name", "") == "arrow.json":
        return _json_value
    if types.is_struct(arrow_type):
        reads = {field.name: _read_of(field.type) or (lambda value: value) for field in arrow_type}
        return lambda value: {key: reads[key](inner) for key, inner in value.items() if inner is not None}
    if types.is_map(arrow_type):
        read_item = _read_of(arrow_type.item_type) or (lambda value: value)
        # Maps have the keys of their own row: a null is a value of theirs.
        return lambda pairs: {key: inner if inner is None else read_item(inner) for key, inner in pairs}
    is_list = any(is_kind(arrow_type) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list))
    if is_list and (read_value := _read_of(arrow_type.value_type)) is not None:
        return lambda values: [None if value is None else read_value(value) for value in values]
    return None


def _json_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    if is_too_deep(value):
        raise ValueError(TOO_DEEP)
    return value
