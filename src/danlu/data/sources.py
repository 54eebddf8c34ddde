"""Files and hub data sets as raw rows, one at a time, each with the place it came from.

A row of jsonl, csv or parquet is read when it is asked for, so a file may be larger than memory. A json array is the
one exception: its text is held, but its objects are still parsed one by one. Compressed files (`rows.jsonl.gz`) are
unpacked while they are read.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import hashlib
import json
import lzma
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from io import BufferedReader, TextIOWrapper
from itertools import count, islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from danlu.data.rows import MOST_DEPTH, TOO_DEEP, is_too_deep
from danlu.errors import DataError
from danlu.small_files import check_regular

if TYPE_CHECKING:  # a quarter of a second at the start of every tokenising process
    from danlu.recipe.sections import Source

TEXT_ROW_BYTES = 64 * 2**10
"""A document of a txt file comes in rows of about this size, so that a large one is tokenised in parallel."""

DOCUMENT_END = "<|endoftext|>"
"""A line of a txt file that is only this ends a document."""

MOST_LINE_BYTES = 2**30
_BATCH_ROWS = 512
_READ_BYTES = 2**20
_MOST_NAMES = 2000  # of a folder, among which a misspelt one is looked for
_SETTLED_NS = 2_000_000_000
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class BadRow:
    """Stands for a row that could not be read. The message names the place, the reason and what to do."""

    message: str


@dataclass(frozen=True)
class RawRow:
    """A row as it stands in its file.

    A line of JSON stays one until its columns are asked for. That is cheaper to hand to another process than what it
    says, and leaves the parsing to the processes that tokenise: one that reads can then feed many of them.

    Attributes:
        index: its number in the source, from 0, bad rows counted too.
        where: "alpaca.jsonl:17" where there are lines, else "alpaca.parquet row 17" (from 1).
        content: its columns, why there are none, or the line of JSON that holds them.
    """

    index: int
    where: str
    content: dict[str, Any] | BadRow | bytes

    @cached_property
    def value(self) -> dict[str, Any] | BadRow:
        """The columns."""
        return _json_row(self.content, self.where) if isinstance(self.content, bytes) else self.content

    def __getstate__(self) -> tuple[int, str, dict[str, Any] | BadRow | bytes]:
        """Without the columns, where a line of JSON says them: another process reads them again."""
        return self.index, self.where, self.content

    def __setstate__(self, state: tuple[int, str, dict[str, Any] | BadRow | bytes]) -> None:
        for name, value in zip(("index", "where", "content"), state, strict=True):
            object.__setattr__(self, name, value)

    @property
    def size(self) -> int:
        """Roughly the characters of text in it."""
        return len(self.content) if isinstance(self.content, bytes) else _characters(self.content)


Placed = tuple[str, dict[str, Any] | BadRow | bytes]  # where and content of a RawRow


def read_rows(source: Source) -> Iterator[RawRow]:
    """The rows of a source in order.

    A txt file is one document, or several separated by lines that are `<|endoftext|>` alone. A document comes in rows
    of about 64 KiB, cut at a blank line where there is one, else at a line or a word; all but its last row carry
    `document_ends: false`, all but its first `document_begins: false`. Nothing is left out: the rows joined give the
    document back (with line ends as one newline). A file in which each line is a document of its own should be jsonl.

    Raises:
        DataError: no such file or data set, an unknown kind of file, an empty one, or one broken beyond a single row. A
            single row that cannot be read is a `BadRow` instead.
    """
    path, limit = _path_and_rows(source)
    placed = _read_files(_files(path), path) if _exists(path) else _read_hub(str(path), source.split)
    number = 0
    for number, (where, content) in enumerate(islice(placed, limit), 1):
        yield RawRow(number - 1, where, content)
    if not number:
        raise DataError(f"{path}: there are no rows in it")


def source_names(sources: Sequence[Source]) -> list[str]:
    """A short name for each source, in order: the last part of its path, without directories that differ by machine.

    Where two sources share the last part, as much of the path before it is kept as tells them apart; sources of the
    same path are numbered. `data/chat.jsonl#500` is `chat.jsonl`, and beside `old/chat.jsonl` it is `data/chat.jsonl`.
    """
    paths = [_without_row_count(source.path) for source in sources]
    parts = [PurePath(path).parts or (path,) for path in paths]
    distinct, names = set(parts), list[str]()
    for own in parts:
        # Two paths may share all parts of the shorter one, which then keeps them all.
        unique = (n for n in range(1, len(own)) if sum(path[-n:] == own[-n:] for path in distinct) == 1)
        name = str(PurePath(*own[-next(unique, len(own)) :]))
        names.append(name.encode("utf-8", "backslashreplace").decode())
    return [
        f"{name} ({names[:number].count(name) + 1})" if names.count(name) > 1 else name
        for number, name in enumerate(names)
    ]


def _without_row_count(path: str) -> str:
    """`path` of `path#500`."""
    text, mark, number = path.rpartition("#")
    return text if mark and number.isdecimal() else path


def fingerprint(source: Source, memory: Path | None = None) -> str:
    """A hash of what `read_rows` would give: the bytes and names of the files, or the hub data set's own fingerprint.

    Args:
        memory: a folder where hashes of files are kept, so that one that has not changed since need not be read again.

    Raises:
        DataError: no such file or data set.
    """
    path, limit = _path_and_rows(source)
    digest = hashlib.blake2b(f"rows={limit}".encode(), digest_size=16)
    if not _exists(path):
        digest.update(_hub_rows(str(path), source.split)._fingerprint.encode())
        return digest.hexdigest()
    for file in _files(path):
        name = os.fsencode(file.name if file == path else file.relative_to(path.parent).as_posix())
        digest.update(b"\0" + name + f"\0{_file_digest(file, memory)}".encode())
    return digest.hexdigest()


def _file_digest(file: Path, memory: Path | None) -> str:
    entry = memory and memory / f"{hashlib.blake2b(bytes(file.resolve()), digest_size=16).hexdigest()}.json"
    before = _state(file)
    if entry:
        with suppress(OSError, ValueError, TypeError, KeyError):  # none, or a damaged one
            kept = json.loads(entry.read_text(encoding="utf-8"))
            if kept["state"] == before:
                return str(kept["digest"])
    digest = hashlib.blake2b(digest_size=16)
    with _told_of_damage(file, str(file)), _open(file) as stream:
        while part := stream.read(_READ_BYTES):
            digest.update(part)
    # Just after a change, another one could leave the times as they are: clocks have a grain.
    is_settled = time.time_ns() - max(before[-2:]) > _SETTLED_NS and _state(file) == before
    if entry and is_settled:
        with suppress(OSError):  # it only saves time
            entry.parent.mkdir(parents=True, exist_ok=True)
            unfinished = entry.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"state": before, "digest": digest.hexdigest()}), encoding="utf-8")
            unfinished.replace(entry)
    return digest.hexdigest()


def _state(file: Path) -> list[int]:
    """What changes whenever a file does. Unlike the time of change, nobody sets the time of the last status change."""
    now = file.stat()
    return [now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def _path_and_rows(source: Source) -> tuple[Path, int | None]:
    """`path#N` and `rows: N` mean the same; of both, the smaller."""
    text, mark, number = source.path.rpartition("#")
    if not mark or not number.isdecimal() or _exists(_path(source.path)):
        return _path(source.path), source.rows and min(source.rows, sys.maxsize)
    if not number.strip("0"):
        raise DataError(f"{source.path}: takes no rows at all; give at least #1")
    limit = int(number) if len(number) < 19 else sys.maxsize  # Python reads 4300 digits, and counts to sys.maxsize
    return _path(text), min(limit, source.rows or limit)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise DataError(f"{text}: no such file: '~' begins it with the name of no user of this machine") from None


def _exists(path: Path) -> bool:
    """Whether there is such a file or folder; a text that no path can be (too long, with a NUL byte) is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _files(path: Path) -> list[Path]:
    """The file itself, or the readable files below a folder, sorted by name."""
    if path.is_file():
        if _kind(path) not in _READERS:
            raise DataError(f"{path}: cannot read a '{_kind(path)}' file; the kinds are {_kinds()}")
        return [path]
    if not path.is_dir():
        try:
            check_regular(path)
        except OSError as error:
            raise DataError(f"{path}: rows cannot be read from it: {error.strerror}") from error
    # The folder of `Dataset.save_to_disk` keeps its rows in arrow files; the json beside them is about them.
    kinds = {".arrow"} if (path / "dataset_info.json").is_file() and (path / "state.json").is_file() else set(_READERS)
    found = sorted(
        file
        for file in path.rglob("*")
        # Tools keep notes of their own in hidden files and folders (.cache, .ipynb_checkpoints).
        if _kind(file) in kinds and file.is_file() and not _is_hidden(file.relative_to(path))
    )
    if not found:
        raise DataError(f"{path}: no data files in this folder; the kinds are {_kinds()}")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(file: Path) -> str:
    """Which of `_READERS` reads a file: the ending of its name, without that of a compression."""
    packing = file.suffix.lower()
    if packing not in _UNPACKERS:
        return packing
    inner = Path(file.stem).suffix.lower()
    return inner if inner in _LINEAR else f"{inner}{packing}"


def _kinds() -> str:
    kinds = ", ".join(sorted(kind.removeprefix(".") for kind in _READERS))
    return f"{kinds}; json, lines and text also as {', '.join(kind.removeprefix('.') for kind in _UNPACKERS)}"


def _name(file: Path, source: Path) -> str:
    """How messages call a file: by its name, or from the folder on that the recipe names.

    A name on disk is bytes; those that are not UTF-8 are written as `\\xe9`.
    """
    name = file.name if file == source else file.relative_to(source.parent).as_posix()
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _read_files(files: Iterable[Path], source: Path) -> Iterator[Placed]:
    for file in files:
        if not file.stat().st_size:
            raise DataError(f"{file}: the file is empty")
        name = _name(file, source)
        with _told_of_damage(file, name):
            yield from _READERS[_kind(file)](file, name)


@contextmanager
def _told_of_damage(file: Path, name: str) -> Iterator[None]:
    """Raises DataError for what reading and unpacking raise of a file that is damaged, or not what its name says."""
    try:
        yield
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        if file.suffix.lower() not in _UNPACKERS:
            raise DataError(f"{name}: cannot be read: {_first_line(error)}") from error
        kind = file.suffix.lower().removeprefix(".")
        raise DataError(f"{name}: damaged, or no {kind} file: {_first_line(error)}") from error


def _open(file: Path) -> BinaryIO:
    """The bytes of a file, unpacked."""
    unpack = _UNPACKERS.get(file.suffix.lower())
    try:
        return file.open("rb") if unpack is None else cast(BinaryIO, unpack(file))
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _unpack_zstandard(file: Path) -> BinaryIO:
    with file.open("rb") as stream:
        _check_zstandard(stream)
    # Imported here: 60 ms and 40 MiB that other kinds of files do not need.
    import pyarrow

    return cast(BinaryIO, BufferedReader(pyarrow.CompressedInputStream(file.open("rb"), "zstd"), _READ_BYTES))


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


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers, without a byte order mark.

    Raises DataError for one that is longer than `MOST_LINE_BYTES`, as a few packed bytes can be.
    """
    for number in count(1):
        line = stream.readline(MOST_LINE_BYTES + 1)
        if len(line) > MOST_LINE_BYTES:
            raise DataError(
                f"{name}:{number}: a line longer than {MOST_LINE_BYTES >> 20} MiB, the most that a row may have"
            )
        if not line:
            return
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(data, error, where) from error


def _not_utf8(data: bytes, error: UnicodeDecodeError, where: str) -> DataError:
    return DataError(f"{where}: byte 0x{data[error.start]:02x} is not UTF-8 text; save the file as UTF-8")


# -- json and jsonl ---------------------------------------------------------------------------------------------------


def _read_jsonl(file: Path, name: str) -> Iterator[Placed]:
    """Objects line by line, or an array of objects (which some files called .jsonl are)."""
    with _open(file) as stream:
        first = next((line for _, line in _lines(stream, name) if line.strip()), b"").strip()
    if first.startswith(b"[") and _begins_array(first, name):
        yield from _read_array(file, name)
        return
    with _open(file) as stream:
        for number, line in _lines(stream, name):
            if line.strip():
                yield f"{name}:{number}", line.rstrip(b"\r\n")


def _json_row(line: bytes, where: str) -> dict[str, Any] | BadRow:
    try:
        value = json.loads(_decode(line, where))
    except json.JSONDecodeError as error:
        return BadRow(f"{where}:{error.colno}: broken JSON: {error.msg}; each line must be one whole JSON object")
    except RecursionError:
        return BadRow(f"{where}: unreadable JSON: {TOO_DEEP}")
    except ValueError:  # a number of thousands of digits
        return BadRow(f"{where}: unreadable JSON: a number has too many digits")
    except DataError as error:
        return BadRow(str(error))
    if line.count(b"[") + line.count(b"{") > MOST_DEPTH and is_too_deep(value):
        return BadRow(f"{where}: unreadable JSON: {TOO_DEEP}")
    return _as_row(value, where)


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 1


def _as_row(value: Any, where: str) -> dict[str, Any] | BadRow:
    if isinstance(value, dict):
        return value
    return BadRow(f"{where}: a row must be an object with named columns, this is of type {type(value).__name__}")


def _read_json(file: Path, name: str) -> Iterator[Placed]:
    """An array of objects, one object, or objects line by line (which many files called .json are)."""
    with _open(file) as stream:
        first = next((line for _, line in _lines(stream, name) if line.strip()), b"")
    if first.lstrip().startswith(b"{") and isinstance(_json_row(first, name), dict):
        yield from _read_jsonl(file, name)
        return
    yield from _read_array(file, name)


def _begins_array(line: bytes, name: str) -> bool:
    """Whether the first line of a file that begins with a bracket is (the beginning of) an array of objects."""
    try:
        value = json.loads(_decode(line, f"{name}:1"))
    except (ValueError, RecursionError):
        return line[1:].lstrip()[:1] in (b"", b"{")
    except DataError:
        return False
    return bool(value) and all(isinstance(row, dict) for row in value)


def _read_array(file: Path, name: str) -> Iterator[Placed]:
    """An array of objects, or one object over several lines, held in memory as text."""
    with _open(file) as stream:
        data = stream.read().removeprefix(codecs.BOM_UTF8)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + data.count(b"\n", 0, error.start)
        raise _not_utf8(data, error, f"{name}:{line}") from error
    del data  # rows are parsed from the text; both at once would be twice the file
    yield from _json_values(text, name)


def _json_values(text: str, name: str) -> Iterator[Placed]:
    """The objects of a json array, or the one object, parsed one at a time."""
    decode = json.JSONDecoder().raw_decode
    space = re.compile(r"\s*")

    def skip(position: int) -> int:
        found = space.match(text, position)
        assert found is not None, "an empty run of spaces always matches"
        return found.end()

    position, line, counted = skip(0), 1, 0
    is_array = text.startswith("[", position)
    position = skip(position + is_array)
    try:
        while not (is_array and text.startswith("]", position)):
            line, counted = line + text.count("\n", counted, position), position
            begin = position
            value, position = decode(text, position)
            brackets = text.count("[", begin, position) + text.count("{", begin, position)
            if brackets > MOST_DEPTH and is_too_deep(value):
                value = BadRow(f"{name}:{line}: unreadable JSON: {TOO_DEEP}")
            yield f"{name}:{line}", value if isinstance(value, BadRow) else _as_row(value, f"{name}:{line}")
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


# -- csv and text -----------------------------------------------------------------------------------------------------


def _read_csv(file: Path, name: str) -> Iterator[Placed]:
    # The limit is one number for the whole process; 128 KiB would refuse a long answer.
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    with _open(file) as data, TextIOWrapper(data, encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream, delimiter="\t" if _kind(file) == ".tsv" else ",", strict=True)
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
                    yield (
                        where,
                        BadRow(f"{where}: {len(fields)} fields, but the first line names {len(columns)} columns"),
                    )
        except csv.Error as error:
            raise DataError(f"{name}:{reader.line_num}: broken CSV: {error}") from error
        except UnicodeDecodeError:
            _find_not_utf8(file, name)
            raise


def _find_not_utf8(file: Path, name: str) -> None:
    """Say in which line of a file the text is not UTF-8: a reader decodes ahead of the line it is at."""
    with _open(file) as stream:
        for number, line in _lines(stream, name):
            _decode(line, f"{name}:{number}")


def _read_text(file: Path, name: str) -> Iterator[Placed]:
    with _open(file) as stream:
        start, held, size, begins = 1, list[str](), 0, True
        for number, piece, is_line in _pieces(stream, name):
            text = piece.replace("\r\n", "\n")
            at_end = is_line and text.rstrip("\n") == DOCUMENT_END
            # A blank line ends a paragraph and belongs to it, so the next row begins with text.
            at_paragraph = bool(held) and not held[-1].strip() and bool(text.strip())
            if at_end or (size >= TEXT_ROW_BYTES and (at_paragraph or size >= 2 * TEXT_ROW_BYTES)):
                yield from _text_row(f"{name}:{start}", held, begins, at_end)
                start, held, size, begins = number + at_end, [], 0, at_end
            if not at_end:
                held.append(text)
                size += len(piece)
        yield from _text_row(f"{name}:{start}", held, begins, True)


def _pieces(stream: BinaryIO, name: str) -> Iterator[tuple[int, str, bool]]:
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
            yield number, _decode(data, f"{name}:{number}"), ends and not in_line
        in_line = not ends
        number += ends
    if rest:
        yield number, _decode(rest, f"{name}:{number}"), False


def _last_character(data: bytes) -> int:
    """Where the last, perhaps unfinished, UTF-8 character begins; the end for bytes that are no UTF-8."""
    for place in range(len(data) - 1, max(0, len(data) - 4), -1):
        if data[place] & 0xC0 != 0x80:
            return place
    return len(data)


def _text_row(where: str, held: list[str], begins: bool, ends: bool) -> Iterator[Placed]:
    text = "".join(held)
    if text.strip() or not (begins and ends):
        yield (
            where,
            {
                "text": text,
                **({} if begins else {"document_begins": False}),
                **({} if ends else {"document_ends": False}),
            },
        )


# -- columnar files and the hub ---------------------------------------------------------------------------------------


def _read_parquet(file: Path, name: str) -> Iterator[Placed]:
    # Imported here: 60 ms and 40 MiB that other kinds of files do not need.
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            yield from _numbered(name, (batch.to_pylist() for batch in parquet.iter_batches(_BATCH_ROWS)))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable parquet file: {_first_line(error)}") from error


def _read_arrow(file: Path, name: str) -> Iterator[Placed]:
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
            parts = (batch.slice(at, _BATCH_ROWS) for batch in batches for at in range(0, batch.num_rows, _BATCH_ROWS))
            yield from _numbered(name, (part.to_pylist() for part in parts))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name}: not a readable arrow file: {_first_line(error)}") from error


def _read_hub(path: str, split: str) -> Iterator[Placed]:
    columns = _hub_rows(path, split).iter(batch_size=_BATCH_ROWS)
    yield from _numbered(
        path, ([dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)] for part in columns)
    )


def _hub_rows(path: str, split: str) -> Any:
    """A `datasets.Dataset`, from the local cache when there is no network.

    Raises:
        DataError: it cannot be had; the message says what was tried.
    """
    if not _HUB_ID.fullmatch(path) or Path(path).suffix.lower() in _READERS:
        raise DataError(f"{path}: no such file{_did_you_mean(Path(path))}")
    # Imported here: most of a second, and only hub data sets need it.
    import datasets

    try:
        return datasets.load_dataset(path, split=split)
    except Exception as error:  # the hub client raises a dozen kinds, with none in common
        raise DataError(
            f"{path}: no such file{_did_you_mean(Path(path))}, and the hub data set '{path}' (split '{split}') cannot "
            f"be loaded: {type(error).__name__}: {_first_line(error)}. Without network, only sets that were loaded "
            "before are there"
        ) from error


def _did_you_mean(path: Path) -> str:
    folder = path.parent
    if not _exists(folder) or not folder.is_dir():
        return f" (there is no folder {folder} in {Path.cwd()})" if not folder.is_absolute() else ""
    near = get_close_matches(path.name[:255], [file.name for file in islice(folder.iterdir(), _MOST_NAMES)], n=1)
    if near:
        return f" (did you mean {folder / near[0]}?)"
    return "" if path.is_absolute() else f" in {Path.cwd()}"


def _numbered(name: str, batches: Iterable[list[dict[str, Any]]]) -> Iterator[Placed]:
    for number, row in enumerate((row for batch in batches for row in batch), 1):
        yield f"{name} row {number}", row


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_LINEAR = frozenset({".csv", ".json", ".jsonl", ".ndjson", ".tsv", ".txt"})  # read from front to end
_UNPACKERS: dict[str, Callable[[Path], Any]] = {
    ".bz2": bz2.open,
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": _unpack_zstandard,
}
_READERS: dict[str, Callable[[Path, str], Iterator[Placed]]] = {
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
    ".tsv": _read_csv,
    ".txt": _read_text,
}
