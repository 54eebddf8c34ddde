"""Files that keep finished work of a production, so that it goes on where it stopped, and keys that name them.

A file's name has a hash of all that its content hangs on, and the file begins with a hash of the content. Files are
renamed into place, but not flushed to the disk: what a power cut tears has another hash, and is computed again.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from danlu.curation.ragged import Ragged
from danlu.curation.tables import Table

_DIGEST_BYTES = 16


def key_of(*parts: Any) -> str:
    """32 hexadecimal digits, a hash of values as JSON has them (tuples are lists); mappings by sorted keys."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=_DIGEST_BYTES).hexdigest()


def digest_of(content: bytes) -> bytes:
    """A hash of 16 bytes."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


class WorkFolder:
    """A folder of hashed files. Several processes may use it: whoever writes a name writes the same work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def has(self, name: str) -> bool:
        """Whether there is a file, whole or not."""
        return (self.folder / name).is_file()

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none, or it is torn or altered."""
        try:
            data = (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None
        content = data[_DIGEST_BYTES:]
        return content if digest_of(content) == data[:_DIGEST_BYTES] else None

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, which is there whole or not at all if this process is killed. Raises OSError."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                file.write(digest_of(content))
                file.write(content)
            unfinished.rename(target)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def read_table(self, name: str) -> Table | None:
        """The table of a file; None as `read` has it."""
        content = self.read(name)
        return None if content is None else table_from_bytes(content)

    def write_table(self, name: str, table: Table) -> None:
        """Writes a table; raises OSError."""
        self.write(name, table_to_bytes(table))

    def remove_others(self, keep: Callable[[str], bool]) -> None:
        """Deletes the files with names, without their folder, that are not to be kept, and folders that are empty."""
        for file in self.folder.rglob("*"):
            if file.is_file() and not keep(file.name):
                file.unlink(missing_ok=True)
        for folder in sorted((each for each in self.folder.rglob("*") if each.is_dir()), reverse=True):
            with suppress(OSError):  # it has files
                folder.rmdir()


def table_to_bytes(table: Table) -> bytes:
    """A table in the form of `numpy.savez`; a ragged column is two arrays."""
    arrays = dict[str, np.ndarray]()
    for name, values in table.items():
        if isinstance(values, Ragged):
            arrays |= {f"{name}/values": values.values, f"{name}/stops": values.stops}
        else:
            arrays[name] = values
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # names of columns are no parameters of savez
    return buffer.getvalue()


def table_from_bytes(content: bytes) -> Table:
    """The table that `table_to_bytes` was given."""
    table = dict[str, np.ndarray | Ragged]()
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        for stored in arrays.files:
            name, _, part = stored.partition("/")
            if part == "values":
                table[name] = Ragged(arrays[stored], arrays[f"{name}/stops"])
            elif not part:
                table[name] = arrays[stored]
    return table
