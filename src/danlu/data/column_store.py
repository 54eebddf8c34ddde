"""Cached values of every token of samples (a reference's or a teacher's log-probabilities), computed once and kept on
disk.

They are in folders next to the tokens of the cache, one for each (samples, key of the values' origin). Samples are in
blocks, each a file that is written whole or not at all, so the work of a killed run is not done again. A sample's
values are found by its number, in whatever order an epoch takes the samples.

    reference-5f0c…/
      columns.json     format, the key, names and types of the columns
      000000.bin       CRC-32 of the rest (uint32), then each column of the block's tokens, one after the other
"""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from danlu.core.atomic_write import write_atomically
from danlu.core.errors import ResourceError
from danlu.core.types import Sample
from danlu.data.samples import Samples

log = logging.getLogger(__name__)

FORMAT = 1
DESCRIPTION = "columns.json"
MAX_BLOCK_TOKENS, MAX_BLOCK_BYTES = 2**18, 2**24
_CHECKED_AT_MOST = 256  # blocks that are verified by checksum when a store is opened: an even share of more
_OPEN_BLOCKS = 64
_HEADER_BYTES = 4


class ColumnType(NamedTuple):
    """The type of a column's value for each token: an array of this type and shape; () for a number."""

    dtype: str  # numpy's: "<f4"
    shape: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """The size of one token's value."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


class ColumnStore:
    """The columns of samples, block by block; see the top of this file.

    Args:
        cache: the folder of the token cache. name: leads the folder's name, for people who look into it.
        lengths: [n] tokens of each sample.
        types: of the columns, by name.
        key: everything else that the values follow from; JSON values.
    Raises ResourceError (here and from `write`) where the folder cannot be written.
    """

    def __init__(
        self, cache: Path, name: str, lengths: np.ndarray, types: Mapping[str, ColumnType], key: Mapping[str, Any]
    ) -> None:
        self._types = dict(types)
        columns = {column: [of.dtype, list(of.shape)] for column, of in types.items()}
        described = json.dumps({"format": FORMAT, "columns": columns, **key}, sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(described.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        self.folder = cache / f"{name}-{digest}"
        self._described = described
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])  # [n + 1] in tokens
        by_bytes = MAX_BLOCK_BYTES // max(1, sum(of.bytes for of in types.values()))
        self.blocks = list(_blocks(self._starts, max(1, min(MAX_BLOCK_TOKENS, by_bytes))))
        self._firsts = np.array([block.start for block in self.blocks])
        self._values = lru_cache(_OPEN_BLOCKS)(self._mapped)

    def missing(self) -> list[int]:
        """Returns the numbers of the blocks that are missing or damaged; damaged ones are logged."""
        present = [number for number in range(len(self.blocks)) if self._file(number).is_file()]
        checked = set(present[:: -(-len(present) // _CHECKED_AT_MOST) or 1])
        intact = set()
        for number in present:
            if damage := self._damage(number, check=number in checked):
                log.warning("%s is damaged (%s): it is computed again", self._file(number), damage)
            else:
                intact.add(number)
        return [number for number in range(len(self.blocks)) if number not in intact]

    def write(self, number: int, values: Mapping[str, np.ndarray]) -> None:
        """Writes a block: of each column the values of all its tokens, [T, ...]."""
        parts = [
            np.ascontiguousarray(values[name].astype(of.dtype, copy=False)).tobytes()
            for name, of in self._types.items()
        ]
        content = b"".join(parts)
        assert len(content) == self._bytes(number), f"{len(content)} bytes for {self._tokens(number)} tokens"
        with _writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / DESCRIPTION).is_file():
                write_atomically(self.folder / DESCRIPTION, self._described.encode("utf-8", "surrogatepass"))
            write_atomically(self._file(number), np.array(zlib.crc32(content), "<u4").tobytes() + content)
        self._values.cache_clear()

    def columns(self, sample: int) -> dict[str, np.ndarray]:
        """The columns of a sample, [S, ...] each: copies, which outlive the mapped file."""
        number = int(np.searchsorted(self._firsts, sample, side="right")) - 1
        first = self._starts[self.blocks[number].start]
        part = slice(self._starts[sample] - first, self._starts[sample + 1] - first)
        return {name: np.array(values[part]) for name, values in self._values(number).items()}

    def _mapped(self, number: int) -> dict[str, np.ndarray]:
        raw = np.memmap(self._file(number), np.uint8, "r", offset=_HEADER_BYTES, shape=(self._bytes(number),))
        tokens, start, mapped = self._tokens(number), 0, {}
        for name, of in self._types.items():
            stop = start + tokens * of.bytes
            mapped[name] = raw[start:stop].view(of.dtype).reshape(tokens, *of.shape)
            start = stop
        return mapped

    def _damage(self, number: int, *, check: bool) -> str | None:
        try:
            size, expected = self._file(number).stat().st_size, _HEADER_BYTES + self._bytes(number)
            if size != expected:
                return f"{size} bytes, expected {expected}"
            if check:
                content = self._file(number).read_bytes()
                if zlib.crc32(content[_HEADER_BYTES:]) != int(np.frombuffer(content, "<u4", 1)[0]):
                    return "its content is not what was written"
        except OSError as error:
            return str(error.strerror)
        return None

    def _file(self, number: int) -> Path:
        return self.folder / f"{number:06}.bin"

    def _tokens(self, number: int) -> int:
        block = self.blocks[number]
        return int(self._starts[block.stop] - self._starts[block.start])

    def _bytes(self, number: int) -> int:
        return self._tokens(number) * sum(of.bytes for of in self._types.values())


@dataclass(frozen=True)
class SamplesWithColumns:
    """Samples (`danlu.data.samples.Samples`) with the columns that a store has of them."""

    samples: Samples
    store: ColumnStore

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> np.ndarray:
        return self.samples.lengths

    @property
    def row_numbers(self) -> np.ndarray:
        return self.samples.row_numbers

    def sample(self, number: int) -> Sample:
        sample = self.samples.sample(number)
        return replace(sample, columns={**sample.columns, **self.store.columns(number)})

    def reasons(self, number: int) -> np.ndarray:
        return self.samples.reasons(number)

    def digest(self) -> str:
        """Returns the digest of the samples, which decides their order; columns follow from them and from the run's
        first weights.
        """
        return self.samples.digest()


def _blocks(starts: np.ndarray, tokens: int) -> Iterator[range]:
    """Yields consecutive samples with at most `tokens` tokens together, or one that is longer; starts: [n + 1] in
    tokens.
    """
    first, count = 0, len(starts) - 1
    while first < count:
        stop = max(first + 1, int(np.searchsorted(starts, starts[first] + tokens, side="right")) - 1)
        yield range(first, stop)
        first = stop


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{folder}: cannot be written: {error.strerror}. Free some space, or set data.cache to another folder"
        ) from error
