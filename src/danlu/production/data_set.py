"""The folder of a data set that danlu has produced: rows, ledger and card. `data.train: FOLDER` trains on it.

rows/00000.jsonl ...    rows, a line each
ledger.jsonl.zst        the account of every row that came
data-card.json          counts, recipe, hashes; it is written last, so a folder with it is whole
README.md               the same to read, with a head by which `datasets` and the hub load the rows
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from danlu import __version__
from danlu.core.atomic_write import sync_file, sync_folder, write_atomically
from danlu.core.errors import DataError, ResourceError
from danlu.core.output_folder import refuse_foreign_files
from danlu.core.run_files import LOCK_FILE
from danlu.core.small_files import parse_json, read_small
from danlu.data.file_formats import DATA_CARD
from danlu.production.card_page import card_page
from danlu.production.ledger import LEDGER

ROWS = "rows"
PAGE = "README.md"
WORK = ".work"
"""The folder with kept work; a name that readers of data pass over."""
_NEW = ".new"
_OWN = (ROWS, LEDGER, DATA_CARD, PAGE, WORK, _NEW, "report.html")
_FILE_BYTES = 256 << 20


def read_card(folder: Path) -> dict[str, Any] | None:
    """The card of a folder; None where there is none. Raises DataError for one that is damaged."""
    try:
        card = parse_json(read_small(folder / DATA_CARD))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / DATA_CARD}: the card cannot be read: {error}") from error
    if not isinstance(card, dict):
        raise DataError(f"{folder / DATA_CARD}: no card of a data set")
    return card


def check_output(folder: Path) -> None:
    """Raises ResourceError for a path where no data set can be written: a file, or a folder with other things in it."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise ResourceError(f"{folder}: this is a file. Choose an empty or new folder")
    refuse_foreign_files(
        folder,
        lambda name: name in _OWN or name.startswith(LOCK_FILE),
        holds="holds something other than a data set of danlu",
        advice="Choose an empty or new folder",
    )


class DataSetWriter:
    """Writes a data set next to the one that a folder has, and puts it in its place when it is whole.

    Args:
        folder: the folder of the data set; it is made.
        file_bytes: the size that a file of rows does not exceed, unless what is added at once does.
    """

    def __init__(self, folder: Path, *, file_bytes: int = _FILE_BYTES) -> None:
        self._folder, self._new, self._file_bytes = folder, folder / _NEW, file_bytes
        if self._new.exists():  # of a process that was killed
            shutil.rmtree(self._new)
        (self._new / ROWS).mkdir(parents=True)
        self._ledger = (self._new / LEDGER).open("wb")
        self._file: BinaryIO | None = None
        self._files = dict[str, dict[str, int]]()
        self._hashes = {LEDGER: hashlib.blake2b(digest_size=32)}

    def add(self, rows: bytes, ledger: bytes) -> None:
        """Adds rows (whole lines of JSON) and the part of the ledger about them and those that were dropped."""
        self._ledger.write(ledger)
        self._hashes[LEDGER].update(ledger)
        if not rows:
            return
        name = self._file_for(len(rows))
        assert self._file is not None
        self._file.write(rows)
        self._hashes[name].update(rows)
        self._files[name]["rows"] += rows.count(b"\n")
        self._files[name]["bytes"] += len(rows)

    def finish(self, card: Mapping[str, Any]) -> None:
        """Puts the data set in its place. card: what is to be known of it, as JSON; danlu's version and the files with
        their hashes (blake2b of 256 bits) are added.
        """
        self._ledger.close()
        if self._file is not None:
            self._file.close()
        files: dict[str, Any] = {
            name: {**self._files.get(name, {}), "blake2b": digest.hexdigest()} for name, digest in self._hashes.items()
        }
        whole = {**card, "danlu": __version__, "files": dict(sorted(files.items()))}
        for name in files:
            sync_file(self._new / name)
        # Without its card a folder is not whole: a kill from here on leaves one that is written again.
        (self._folder / DATA_CARD).unlink(missing_ok=True)
        sync_folder(self._folder)
        if (self._folder / ROWS).exists():
            shutil.rmtree(self._folder / ROWS)
        for name in (ROWS, LEDGER):
            (self._new / name).rename(self._folder / name)
        self._new.rmdir()
        write_atomically(self._folder / PAGE, card_page(self._folder.name, whole).encode("utf-8", "backslashreplace"))
        write_atomically(self._folder / DATA_CARD, f"{json.dumps(whole, indent=2)}\n".encode())

    def _file_for(self, size: int) -> str:
        """The name of the file that takes so many more bytes; it is open then."""
        name = f"{ROWS}/{max(0, len(self._files) - 1):05}.jsonl"
        if self._file is None or self._files[name]["bytes"] + size > self._file_bytes:
            if self._file is not None:
                self._file.close()
            name = f"{ROWS}/{len(self._files):05}.jsonl"
            self._file = (self._new / name).open("wb")
            self._files[name] = {"rows": 0, "bytes": 0}
            self._hashes[name] = hashlib.blake2b(digest_size=32)
        return name
