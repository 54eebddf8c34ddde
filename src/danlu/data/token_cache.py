"""Tokenised data on disk: one folder for each (content, tokenizer, settings), written once, read by memory map.

A folder appears under its final name only when it is whole: it is written next to it, flushed to the disk, marked
COMPLETE with the size and checksums of its files, and renamed. The writer holds a file lock that the kernel drops when
the process dies, so a killed run leaves nothing but a folder the next one removes, and of two runs at once the second
waits and reads what the first wrote.

    alpaca_en-5f0c…/
      tokens.bin      uint16, or int32 when the vocabulary needs it
      labels.bin      uint8 codes into palette.bin, or uint32 when there are more than 256 labels
      palette.bin     the different labels (weight, reason): any float32 weight is kept exactly
      offsets.bin     int64 [samples + 1]        row_numbers.bin  int64 [samples]
      rows.bin        utf-8 text                 row_offsets.bin  int64 [samples + 1]
      branches.bin    of trees: BRANCH [branches]                 branch_offsets.bin  int64 [samples + 1]
      facts.bin       of trees: float32 [branches, facts]
      statistics.json
      COMPLETE        json: format, token type, names of facts, sizes, checksums
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from danlu.core.atomic_write import sync_file, sync_folder
from danlu.core.errors import ResourceError
from danlu.core.file_lock import AlreadyLocked, FileLock
from danlu.core.types import Sample
from danlu.data.samples import BRANCH, LABEL, SampleBlock, TreeTable
from danlu.data.store_names import MARKER, has_stores, leading

log = logging.getLogger(__name__)

FORMAT = 6  # raised whenever rendering, cutting or this layout changes what a row becomes
CHECK_BYTES = 16 * 2**20  # one checksum for so many bytes
CHECKED_AT_MOST = 256  # checksums verified when a store is opened: all of it up to 4 GiB, an even sample beyond
UNFINISHED = ".unfinished"
_DIGESTED_FILES = ("tokens.bin", "labels.bin", "palette.bin", "offsets.bin")  # what `Samples.digest` depends on
_SUMMED_FILES = (*_DIGESTED_FILES, "row_numbers.bin", "rows.bin", "row_offsets.bin")
_TREE_FILES = ("branches.bin", "branch_offsets.bin", "facts.bin")  # of samples that are trees; digested too


class DamagedStore(Exception):
    """A store on disk does not match its marker; the error never leaves this file."""


class TokenStore:
    """The samples of one source, read by memory map (`danlu.data.samples.Samples`).

    Attributes:
        statistics: the argument of `StoreWriter.finish`.
        max_token: the largest token id, -1 when there are none.
        trees: branches and facts; None where samples are no trees.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        marker = _read_marker(folder)
        self.statistics: dict[str, Any] = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))
        self.max_token: int = marker["max_token"]
        fact_names: list[str] | None = marker["facts"]
        sums = [marker["files"][name] for name in _DIGESTED_FILES]
        if fact_names is not None:
            sums += [fact_names, *(marker["files"][name] for name in _TREE_FILES)]
        self._digest = hashlib.blake2b(json.dumps(sums).encode(), digest_size=8).hexdigest()
        self._tokens = _map(folder / "tokens.bin", marker["token_dtype"])
        self._codes = _map(folder / "labels.bin", marker["label_dtype"])
        self._palette = np.fromfile(folder / "palette.bin", LABEL)
        self._offsets = _map(folder / "offsets.bin", "<i8")
        self.row_numbers: np.ndarray = _map(folder / "row_numbers.bin", "<i8")
        self._rows = _map(folder / "rows.bin", "u1")
        self._row_offsets = _map(folder / "row_offsets.bin", "<i8")
        self.lengths: np.ndarray = np.diff(self._offsets).astype(np.int32)
        self.trees: TreeTable | None = None
        if fact_names is not None:
            facts = _map(folder / "facts.bin", "<f4").reshape(-1, len(fact_names))
            self.trees = TreeTable(
                _map(folder / "branch_offsets.bin", "<i8"),
                _map(folder / "branches.bin", BRANCH),
                {name: facts[:, number] for number, name in enumerate(fact_names)},
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, number: int) -> Sample:
        part = slice(self._offsets[number], self._offsets[number + 1])
        row = bytes(self._rows[self._row_offsets[number] : self._row_offsets[number + 1]])
        tokens = np.array(self._tokens[part], dtype=np.int32)  # a copy: the sample outlives the map's pages
        sample = Sample(tokens, self._palette["weight"][self._codes[part]], row.decode())
        return sample if self.trees is None else self.trees.given_to(sample, number)

    def reasons(self, number: int) -> np.ndarray:
        return self._palette["reason"][self._codes[self._offsets[number] : self._offsets[number + 1]]]

    def digest(self) -> str:
        return self._digest


class StoreWriter:
    """Writes blocks of samples into a folder that is not yet a store; `finish` makes it one."""

    def __init__(self, folder: Path, key: str, vocabulary: int) -> None:
        self.folder = folder
        self._key = key
        self._token_dtype = np.dtype("<u2" if vocabulary <= 2**16 else "<i4")
        self._label_dtype: np.dtype = np.dtype("u1")
        self._label_codes: dict[bytes, int] = {}
        self._max_token = -1
        self._end = 0
        self._row_end = 0
        self._branch_end = 0
        self._fact_names: list[str] | None = None  # of trees
        self._files = {name: _SummedFile(folder / name) for name in _SUMMED_FILES}
        for name in ("offsets.bin", "row_offsets.bin"):
            self._files[name].write(np.zeros(1, "<i8"))

    def add(self, block: SampleBlock) -> None:
        """Append samples."""
        if not len(block):
            return
        self._max_token = max(self._max_token, int(block.tokens.max(initial=-1)))
        encoded = [row.encode() for row in block.rows]
        row_ends = self._row_end + np.cumsum([len(row) for row in encoded])
        with _writing(self.folder.parent):
            self._files["tokens.bin"].write(block.tokens.astype(self._token_dtype))
            self._write_codes(block)
            self._files["offsets.bin"].write(self._end + block.offsets[1:].astype("<i8"))
            self._files["row_numbers.bin"].write(block.row_numbers.astype("<i8"))
            self._files["rows.bin"].write(np.frombuffer(b"".join(encoded), np.uint8))
            self._files["row_offsets.bin"].write(row_ends.astype("<i8"))
            if block.trees is not None:
                self._write_trees(block.trees)
        self._end += int(block.offsets[-1])
        self._row_end = int(row_ends[-1])

    def _write_trees(self, trees: TreeTable) -> None:
        if self._fact_names is None:
            self._fact_names = list(trees.facts)
            self._files |= {name: _SummedFile(self.folder / name) for name in _TREE_FILES}
            self._files["branch_offsets.bin"].write(np.zeros(1, "<i8"))
        assert list(trees.facts) == self._fact_names, "all rows of a source have the same facts"
        self._files["branches.bin"].write(trees.branches)
        self._files["branch_offsets.bin"].write(self._branch_end + trees.offsets[1:].astype("<i8"))
        self._files["facts.bin"].write(np.stack(list(trees.facts.values()), axis=1).astype("<f4"))
        self._branch_end += int(trees.offsets[-1])

    def finish(self, statistics: Mapping[str, Any]) -> None:
        """Flush everything to the disk and mark the folder complete.

        `statistics` (JSON values) comes back with the store.
        """
        with _writing(self.folder.parent):
            self._files["palette.bin"].write(np.frombuffer(b"".join(self._label_codes), LABEL))
            (self.folder / "statistics.json").write_text(json.dumps(statistics), encoding="utf-8")
            sync_file(self.folder / "statistics.json")
            marker = {
                "format": FORMAT,
                "key": self._key,
                "token_dtype": self._token_dtype.str,
                "label_dtype": self._label_dtype.str,
                "max_token": self._max_token,
                "facts": self._fact_names,
                "files": {name: file.close() for name, file in self._files.items()},
            }
            (self.folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")
            sync_file(self.folder / MARKER)
            sync_folder(self.folder)

    def close(self) -> None:
        """Closes the files; unfinished ones are deleted."""
        for file in self._files.values():
            file.abandon()

    def _write_codes(self, block: SampleBlock) -> None:
        table = [self._label_codes.setdefault(label.tobytes(), len(self._label_codes)) for label in block.palette]
        if len(self._label_codes) > 256 and self._label_dtype == np.uint8:
            # Rare (weights that differ row by row), so the file is simply written again with wider codes.
            self._files["labels.bin"].close()
            narrow, self._label_dtype = self.folder / "narrow-labels.bin", np.dtype("<u4")
            (self.folder / "labels.bin").rename(narrow)
            self._files["labels.bin"] = _SummedFile(self.folder / "labels.bin")
            with narrow.open("rb") as file:
                while part := file.read(CHECK_BYTES):
                    self._files["labels.bin"].write(np.frombuffer(part, np.uint8).astype(self._label_dtype))
            narrow.unlink()
        self._files["labels.bin"].write(np.array(table, dtype=self._label_dtype)[block.codes])


class TokenCache:
    """The folder of stores.

    Raises (from every method):
        ResourceError: the folder cannot be made, written or locked, or the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(
        self, name: str, parts: Mapping[str, Any], build: Callable[[Callable[[int], StoreWriter]], None]
    ) -> TokenStore:
        """The store for `parts`, built if it is not there.

        Args:
            name: leads the folder's name, for people who look into the cache.
            parts: everything the content depends on; JSON values.
            build: called with a function that, given the vocabulary's size, opens the writer; must `finish` it.
        """
        text, folder = self._place(name, parts)
        store = self._read(folder)
        if store is not None:
            return store
        with self._locked(folder.name):
            store = self._read(folder)  # another run may have built it while this one waited
            if store is None:
                self._remove_leftovers(folder.name)
                self._build(folder, text, build)
                store = TokenStore(folder)
        return store

    def find(self, name: str, parts: Callable[[], Mapping[str, Any]]) -> TokenStore | None:
        """The store that `get` would return, if it is there; its checksums are not verified.

        parts: called only where the cache has a store of this name, for they take as long as the rows are large.
        """
        if not has_stores(self.folder, name):
            return None
        try:
            return TokenStore(self._place(name, parts())[1])
        except (DamagedStore, OSError, ValueError, KeyError):
            return None

    def _place(self, name: str, parts: Mapping[str, Any]) -> tuple[str, Path]:
        """Returns (the key of a store as text, its folder)."""
        text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, ensure_ascii=False)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]
        return text, self.folder / f"{leading(name)}-{key}"

    def _build(self, folder: Path, key: str, build: Callable[[Callable[[int], StoreWriter]], None]) -> None:
        unfinished = self._unfinished(folder.name)
        with ExitStack() as stack:
            stack.callback(self._remove_leftovers, folder.name)

            def open_writer(vocabulary: int) -> StoreWriter:
                with _writing(self.folder):
                    writer = StoreWriter(unfinished, key, vocabulary)
                stack.callback(writer.close)
                return writer

            with _writing(self.folder):
                unfinished.mkdir()
            build(open_writer)
            with _writing(self.folder):
                if folder.exists():  # a damaged one: a rename cannot replace a folder that is not empty
                    folder.rename(self._unfinished(folder.name))
                unfinished.rename(folder)
                sync_folder(self.folder)

    def _unfinished(self, name: str) -> Path:
        return self.folder / f"{name}.{os.getpid()}-{secrets.token_hex(4)}{UNFINISHED}"

    def _read(self, folder: Path) -> TokenStore | None:
        if not (folder / MARKER).is_file():
            return None
        try:
            _verify(folder)
            return TokenStore(folder)
        except (DamagedStore, OSError, ValueError, KeyError) as error:
            log.warning("cached tokens in %s are damaged (%s): tokenising again", folder, error)
            return None

    @contextmanager
    def _locked(self, name: str, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of one store; gives False when it is taken and `wait` is false."""
        locks = self.folder / "locks"
        lock = FileLock(locks / name)
        with _writing(self.folder):
            locks.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
                free = True
            except AlreadyLocked:
                free = wait
                if wait:
                    log.warning("another run is tokenising the same data: waiting for it (%s)", self.folder / name)
                    lock.acquire(wait=True)
        try:
            yield free
        finally:
            lock.release()

    def _remove_leftovers(self, locked: str) -> None:
        """Removes the folders that killed runs left. The caller holds the lock of the store `locked`.

        A live writer holds the lock of its store, so an unfinished folder with a free lock (or ours) belongs to nobody.
        """
        for unfinished in self.folder.glob(f"*{UNFINISHED}"):
            name = unfinished.name.removesuffix(UNFINISHED).rpartition(".")[0]
            with nullcontext(True) if name == locked else self._locked(name, wait=False) as free:
                if free:
                    shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises ResourceError with a remedy when the cache cannot be written."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ResourceError(
                f"the disk is full: {shutil.disk_usage(folder).free / 2**20:.0f} MiB are left for the token cache "
                f"{folder}. Free some space, or set data.cache to a folder on a larger disk"
            ) from error
        raise ResourceError(
            f"the token cache {folder} cannot be written ({error.strerror or error}): "
            "set data.cache to a folder you may write"
        ) from error


class _SummedFile:
    """A file that sums the bytes written to it: its size, and a CRC-32 for every CHECK_BYTES of it."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb")
        self._bytes = 0
        self._sums = [0]

    def write(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).view(np.uint8).data.cast("B") if array.size else memoryview(b"")
        self._file.write(data)
        while data:
            room = CHECK_BYTES - self._bytes % CHECK_BYTES
            self._sums[-1] = zlib.crc32(data[:room], self._sums[-1])
            self._bytes += min(room, len(data))
            if len(data) >= room:
                self._sums.append(0)
            data = data[room:]

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._bytes, "crc32": self._sums}

    def abandon(self) -> None:
        with suppress(OSError):  # on a full disk even closing fails; the file is thrown away in any case
            self._file.close()


def _read_marker(folder: Path) -> dict[str, Any]:
    marker: dict[str, Any] = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    if marker["format"] != FORMAT:
        raise DamagedStore(f"format {marker['format']}, expected {FORMAT}")
    return marker


def _verify(folder: Path) -> None:
    """Compare sizes and checksums with the marker's."""
    files = _read_marker(folder)["files"]
    blocks = []
    for name, expected in files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != expected["bytes"]:
            raise DamagedStore(
                f"{name}: {'missing' if size is None else f'{size} bytes'}, expected {expected['bytes']} bytes"
            )
        blocks += [(name, number, crc) for number, crc in enumerate(expected["crc32"])]
    stride = -(-len(blocks) // CHECKED_AT_MOST)
    for name, number, crc in blocks[::stride]:
        with (folder / name).open("rb") as file:
            file.seek(number * CHECK_BYTES)
            if zlib.crc32(file.read(CHECK_BYTES)) != crc:
                raise DamagedStore(f"{name}: wrong checksum from byte {number * CHECK_BYTES}")


def _map(path: Path, dtype: str | np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:  # mmap refuses empty files
        return np.empty(0, dtype)
    return np.memmap(path, dtype, mode="r")
