"""Files opened for reading, decompressed on the way where the ending of their name says so."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from danlu.core.errors import DataError

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
