"""Sources of a recipe: the files or the hub data set that an entry of data.train names, their rows and fingerprints."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from danlu.core.errors import DataError
from danlu.core.small_files import check_regular
from danlu.data.column_mapping import LOOKED_THROUGH, ColumnMapping
from danlu.data.dataset_info import DATASET_INFO, neighboring_mapping
from danlu.data.file_formats import (
    BATCH_ROWS,
    DATA_CARD,
    DATASET_DICT,
    READ_BYTES,
    READERS,
    describe_formats,
    format_of,
    numbered_rows,
    open_decompressed,
    reading_errors,
)
from danlu.data.raw_rows import BadRow, LocatedContent, RawRow

if TYPE_CHECKING:  # a quarter of a second at the start of every tokenising process
    from danlu.recipe.sections import Data, Source
    from danlu.recipe.sections.data import Columns

_MAX_COMPARED_NAMES = 2000  # of a folder, among which a misspelt one is looked for
_SETTLED_NS = 2_000_000_000  # after which a change of a file shows in its times, whatever their grain
_MappedContent = tuple[str, dict[str, Any] | BadRow | bytes, ColumnMapping | None]
"""The where, content and mapping of a RawRow."""
_ESCAPED_SHORTLY = re.compile(r'["\\/\x00-\x1f]')  # letters with other escapes in JSON
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_rows(source: Source, columns: Columns | None = None) -> Iterator[RawRow]:
    """The rows of a source in order.

    A txt file is one document, or several separated by lines that are `<|endoftext|>` alone. A document comes in rows
    of about 64 KiB, cut at a blank line where there is one, else at a line or a word; all but its last row carry
    `document_ends: false`, all but its first `document_begins: false`. Nothing is left out: the rows joined give the
    document back (with line ends as one newline). A file in which each line is a document of its own should be jsonl.

    Args:
        columns: those of `data.columns`, for a source without any of its own.

    Raises:
        DataError: no such file or data set, an unknown kind of file, an empty one, or one broken beyond a single row;
            or columns that its rows do not have. A single row that cannot be read is a `BadRow` instead.
    """
    path, limit = _path_and_row_limit(source)
    number = 0
    for number, (where, content, mapping) in enumerate(islice(_mapped_rows(source, path, columns, limit), limit), 1):
        yield RawRow(number - 1, where, content, mapping)
    if not number:
        raise DataError(f"{path}: there are no rows in it")


def _mapped_rows(source: Source, path: Path, columns: Columns | None, limit: int | None) -> Iterator[_MappedContent]:
    """The rows of a source, each with the mapping of its columns. limit: how many of them count; None for all."""
    is_given, given = _given_mapping(source, path, columns)
    if _is_data_set(source, path):
        data_set = _data_set(source, path).with_format("arrow")
        yield from _checked(lambda: numbered_rows(str(path), data_set.iter(batch_size=BATCH_ROWS)), given, path, limit)
    elif is_given:
        yield from _checked(lambda: _read_files(_files(path), path), given, path, limit)
    else:
        for file in _files(path):
            yield from _checked(partial(_read_files, [file], path), neighboring_mapping(file), file, limit)


def _checked(
    read: Callable[[], Iterator[LocatedContent]], mapping: ColumnMapping | None, path: Path, limit: int | None
) -> Iterator[_MappedContent]:
    """Rows with a mapping, once it is known that some of them have the columns that it names.

    A column may come first behind the first rows where these can be read without it, as a system text can be absent;
    then the rows are read once more, up to where it stands. limit: the rows of the source that count; None for all.
    """
    placed = read()
    if mapping is not None:
        first = list(islice(placed, LOOKED_THROUGH))
        placed = chain(first, placed)
        rows = [row for _, content in islice(first, limit) if (row := _columns_in(content)) is not None]
        absent = mapping.absent(rows) if rows else {}
        if absent and any(map(mapping.can_read, rows)):
            absent = _absent_throughout(islice(read(), len(first), limit), absent)
        if absent:
            raise mapping.refuse(absent, rows, str(path))
    for place, content in placed:
        yield place, content, mapping


def _absent_throughout(rows: Iterator[LocatedContent], columns: Mapping[str, str]) -> dict[str, str]:
    """Those of some columns that none of the rows has; reads no further than it takes to see all of them."""
    absent = dict(columns)
    # Lines of JSON that cannot name them need not be parsed: an escape of most letters is \uXXXX.
    parts = {max(_ESCAPED_SHORTLY.split(name), key=len).encode("utf-8", "replace") for name in columns}
    for _, content in rows:
        if isinstance(content, bytes) and b"\\u" not in content and not any(part in content for part in parts):
            continue
        for name in absent.keys() & (_columns_in(content) or {}).keys():
            del absent[name]
        if not absent:
            break
    return absent


def _columns_in(content: dict[str, Any] | BadRow | bytes) -> dict[str, Any] | None:
    """The columns of a row as the file has them; None where it cannot be read."""
    columns = RawRow(0, "row", content).given
    return columns if isinstance(columns, dict) else None


def _given_mapping(source: Source, path: Path, columns: Columns | None) -> tuple[bool, ColumnMapping | None]:
    """Whether the columns of all files of a source are given, and their mapping; None for the files' own names."""
    if source.columns is not None:
        return True, ColumnMapping.of(source.columns, "columns") if source.columns else None
    if columns is not None:
        return True, ColumnMapping.of(columns, "data.columns") if columns else None
    mapping = neighboring_mapping(path) if _exists(path) and path.is_dir() else None
    return mapping is not None, mapping


def column_mappings(source: Source, columns: Columns | None = None) -> list[ColumnMapping]:
    """The mappings of a source's rows, without None for the files' own names. Raises DataError as `read_rows` does."""
    path, _ = _path_and_row_limit(source)
    is_given, given = _given_mapping(source, path, columns)
    is_one = is_given or _is_data_set(source, path)
    mappings = [given] if is_one else [neighboring_mapping(file) for file in _files(path)]
    return [mapping for mapping in mappings if mapping is not None]


def column_lines(sources: Sequence[Source], columns: Columns | None = None) -> list[str]:
    """Returns lines for the console that say which columns are read as a dataset_info.json has them."""
    mappings = (
        [] if columns is not None else [each for s in sources if s.columns is None for each in column_mappings(s)]
    )
    return [f"data: columns as {each.origin} has them: {each.describe()}" for each in dict.fromkeys(mappings)]


def read_file_rows(file: Path) -> Iterator[RawRow]:
    """The rows of one file in order; raises as `read_rows` does."""
    for number, (where, content) in enumerate(_read_files(_files(file), file)):
        yield RawRow(number, where, content)


def source_names(sources: Sequence[Source]) -> list[str]:
    """Returns a short name for each source, in order: the last part of its path, without directories that differ by
    machine.

    Where two sources share the last part, as much of the path before it is kept as distinguishes them; sources with the
    same path are numbered. `data/chat.jsonl#500` is `chat.jsonl`, and next to `old/chat.jsonl` it is `data/chat.jsonl`.
    A subset counts as the last part.
    """
    paths = [split_row_limit(source.path)[0] for source in sources]
    subsets = [() if source.subset is None else (source.subset,) for source in sources]
    parts = [(*(PurePath(path).parts or (path,)), *subset) for path, subset in zip(paths, subsets, strict=True)]
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


def reported_sources(data: Data) -> tuple[str, ...]:
    """Returns the names of the sources that losses are reported for: those of training if there are several, of
    evaluation likewise.

    The loss of a side with one source is the loss of all, so it has no name of its own.
    """
    sides = (data.train, data.eval if isinstance(data.eval, list) else [])
    return tuple(dict.fromkeys(name for sources in sides if len(sources) > 1 for name in source_names(sources)))


def split_row_limit(path: str) -> tuple[str, str]:
    """`path` and `500` of `path#500`; the whole and nothing where no number of rows is behind it."""
    text, mark, number = path.rpartition("#")
    return (text, number) if mark and number.isdecimal() else (path, "")


def fingerprint(source: Source, memory: Path | None = None) -> str:
    """Returns a hash of the rows that `read_rows` would yield: the bytes and names of the files, or the hub data set's
    own fingerprint.

    Args:
        memory: a folder where hashes of files are kept, so that one that has not changed since need not be read again.

    Raises:
        DataError: no such file or data set.
    """
    path, limit = _path_and_row_limit(source)
    digest = hashlib.blake2b(f"rows={limit}".encode(), digest_size=16)
    if _is_data_set(source, path):
        digest.update(_data_set(source, path)._fingerprint.encode())
        return digest.hexdigest()
    for file in _files(path):
        digest.update(b"\0" + _name_bytes(file, path) + f"\0{_file_digest(file, memory)}".encode())
    return digest.hexdigest()


def file_digests(source: Source, memory: Path | None = None) -> dict[str, str]:
    """The hash of each file of a source by its name, as `fingerprint` has them; of a hub data set its own.

    Raises:
        DataError: no such file or data set.
    """
    files = source_files(source)
    if files is None:
        path = _path_and_row_limit(source)[0]
        return {str(path): str(_data_set(source, path)._fingerprint)}
    return {name: _file_digest(file, memory) for name, file in files.items()}


def source_files(source: Source) -> dict[str, Path] | None:
    """Returns the files of a source by name; None for a hub data set, or a folder with the layout of one of which a
    subset is named. Raises DataError for anything else."""
    path, _ = _path_and_row_limit(source)
    if _is_data_set(source, path):
        return None
    return {_name_bytes(file, path).decode("utf-8", "backslashreplace"): file for file in _files(path)}


def _file_digest(file: Path, memory: Path | None) -> str:
    """A hash of a file's decompressed bytes, from `memory` where the file has not changed since it was hashed."""
    entry = memory and memory / f"{hashlib.blake2b(bytes(file.resolve()), digest_size=16).hexdigest()}.json"
    state = _file_state(file)
    if entry:
        with suppress(OSError, ValueError, TypeError, KeyError):  # none, or a damaged one
            kept = json.loads(entry.read_text(encoding="utf-8"))
            if kept["state"] == state:
                return str(kept["digest"])
    digest = hashlib.blake2b(digest_size=16)
    with reading_errors(file, str(file)), open_decompressed(file) as stream:
        while part := stream.read(READ_BYTES):
            digest.update(part)
    # Just after a change, another one could leave the times as they are: clocks have a grain.
    is_settled = time.time_ns() - max(state[-2:]) > _SETTLED_NS and _file_state(file) == state
    if entry and is_settled:
        with suppress(OSError):  # it only saves time
            entry.parent.mkdir(parents=True, exist_ok=True)
            unfinished = entry.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"state": state, "digest": digest.hexdigest()}), encoding="utf-8")
            unfinished.replace(entry)
    return digest.hexdigest()


def _file_state(file: Path) -> list[int]:
    """Returns values that change whenever a file does.

    Unlike the time of change, nobody sets the time of the last status change.
    """
    stat = file.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _path_and_row_limit(source: Source) -> tuple[Path, int | None]:
    """`path#N` and `rows: N` mean the same; of both, the smaller."""
    text, number = split_row_limit(source.path)
    if not number or _exists(_path(source.path)):
        return _split_path(source.path, source), source.rows and min(source.rows, sys.maxsize)
    if not number.strip("0"):
        raise DataError(f"{source.path}: takes no rows at all; give at least #1")
    limit = int(number) if len(number) < 19 else sys.maxsize  # Python reads 4300 digits, and counts to sys.maxsize
    return _split_path(text, source), min(limit, source.rows or limit)


def _split_path(text: str, source: Source) -> Path:
    """The path of a source without its number of rows, or below it the folder of its split."""
    path = _path(text)
    if source.subset is not None or not _exists(path / DATASET_DICT):
        return path
    from danlu.data.hub_data import split_folder

    return split_folder(path, source.split)


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
        if format_of(path) not in READERS:
            raise DataError(f"{path}: cannot read a '{format_of(path)}' file; the kinds are {describe_formats()}")
        return [path]
    if not path.is_dir():
        try:
            check_regular(path)
        except OSError as error:
            raise DataError(f"{path}: rows cannot be read from it: {error.strerror}") from error
    # The folder of `Dataset.save_to_disk` keeps its rows in arrow files; the json next to them describes them.
    kinds = {".arrow"} if (path / "dataset_info.json").is_file() and (path / "state.json").is_file() else set(READERS)
    files = sorted(
        file
        for file in path.rglob("*")
        # Tools keep notes of their own in hidden files and folders (.cache, .ipynb_checkpoints).
        if format_of(file) in kinds
        and file.is_file()
        and file.name != DATASET_INFO  # it describes the files next to it
        and not (file.parent / DATA_CARD).is_file()  # a card and a ledger, which describe the rows below them
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise DataError(f"{path}: no data files in this folder; the kinds are {describe_formats()}")
    return files


def _name_bytes(file: Path, source: Path) -> bytes:
    """The name of a file, or its path from the folder on that the recipe names."""
    return os.fsencode(file.name if file == source else file.relative_to(source.parent).as_posix())


def _read_files(files: Iterable[Path], source: Path) -> Iterator[LocatedContent]:
    for file in files:
        if not file.stat().st_size:
            raise DataError(f"{file}: the file is empty")
        name = _name_bytes(file, source).decode("utf-8", "backslashreplace")  # \xe9 for what is not UTF-8
        with reading_errors(file, name):
            yield from READERS[format_of(file)](file, name)


def _is_data_set(source: Source, path: Path) -> bool:
    """Whether `datasets` reads a source: one of the hub, and a folder with its layout of which a subset is named."""
    return source.subset is not None or not _exists(path)


def _data_set(source: Source, path: Path) -> Any:
    """Returns a `datasets.Dataset`, from the local cache when there is no network.

    Raises:
        DataError: it cannot be loaded; the message names each attempt.
    """
    from danlu.data.hub_data import hub_rows

    if _exists(path):
        if not path.is_dir() or (path / DATASET_DICT).is_file():
            raise DataError(
                f"{path}: subset '{source.subset}' is given, and only hub data sets, and folders whose README.md lists "
                "`configs`, have subsets. Leave it out"
            )
        return hub_rows(source, str(path), None)
    if not _HUB_ID.fullmatch(str(path)) or path.suffix.lower() in READERS:
        raise DataError(f"{path}: no such file{_did_you_mean(path)}")
    return hub_rows(source, str(path), f"no such file{_did_you_mean(path)}")


def _did_you_mean(path: Path) -> str:
    folder = path.parent
    if not _exists(folder) or not folder.is_dir():
        return f" (there is no folder {folder} in {Path.cwd()})" if not folder.is_absolute() else ""
    near = get_close_matches(
        path.name[:255], [file.name for file in islice(folder.iterdir(), _MAX_COMPARED_NAMES)], n=1
    )
    if near:
        return f" (did you mean {folder / near[0]}?)"
    return "" if path.is_absolute() else f" in {Path.cwd()}"
