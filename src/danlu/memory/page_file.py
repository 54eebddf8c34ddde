"""A file mapped into memory (mmap(2)), of which the system may take pages that are not in use and bring them back.

Other memory of a process can only go to swap, or end the run when there is none left. The file has no name: when the
process ends, however it does, nothing of it is left, and nobody else can find it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from danlu.core.errors import ResourceError

# Linux 5.14 and later: make pages present, to be read or to be written, at once. Without them each page of 4 KiB is a
# fault of its own.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_ALIGNMENT = 64  # of a tensor, in bytes: what torch gives its own


class Extent(NamedTuple):
    """The place of a tensor's bytes in a file: whole pages, so that they can be released alone."""

    start: int
    size: int


class PageFile:
    """A mapped file of `size` bytes, all of them reserved at once, so that it does not fail halfway.

    Args:
        folder: where the file is; None for the host's memory instead, which does not come and go.
        what, field: for messages: the content, and the field of the recipe that names the folder.
    Raises ResourceError when the file cannot be made there.
    """

    def __init__(self, size: int, folder: Path | None, *, what: str, field: str) -> None:
        self.in_file = folder is not None
        size = max(size, 1)
        self._map = mmap.mmap(-1, size) if folder is None else _mapped_file(folder, size, what, field)

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor on the bytes from an aligned offset on, whatever they hold; pages never written hold zeros."""
        count = shape.numel()
        if not count:  # torch takes no buffer for nothing
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def fetch(self, start: int, size: int, *, to_write: bool) -> None:
        """Brings pages into memory; they are there when this returns. to_write: they are about to be changed."""
        if not self.in_file or not size:
            return
        try:
            self._map.madvise(_POPULATE_WRITE if to_write else _POPULATE_READ, start, size)
        except OSError:  # an older kernel: pages come one by one, as they are touched
            self._map.madvise(mmap.MADV_WILLNEED, start, size)

    def prefetch(self, start: int, size: int) -> None:
        """Begins to read pages from the disk, if they are no longer in the system's cache; does not wait."""
        if self.in_file and size:
            self._map.madvise(mmap.MADV_WILLNEED, start, size)

    def release(self, start: int, size: int) -> None:
        """Takes pages from this process's memory; the file keeps them, in the system's cache or on the disk."""
        if self.in_file and size:
            self._map.madvise(mmap.MADV_DONTNEED, start, size)


def aligned(size: int) -> int:
    """Bytes that a tensor of `size` takes, so that the next begins where torch's own would."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def whole_pages(size: int) -> int:
    """Returns the bytes of the pages that `size` touches: tensors that share no page can be released alone."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def default_folder() -> Path:
    """TMPDIR, or the system's folder for large temporary files: /tmp is often memory, which would be no page file."""
    if (tmpdir := os.environ.get("TMPDIR")) is not None:
        return Path(tmpdir)
    large = Path("/var/tmp")
    return large if os.access(large, os.W_OK) else Path(tempfile.gettempdir())


def _mapped_file(folder: Path, size: int, what: str, field: str) -> mmap.mmap:
    """A new file without a name in `folder`, which is made where it is missing, mapped to be read and written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserved now: a disk that fills up later would end the process by a signal, in the middle of a step.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS cannot reserve
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        amount = f"{size / 2**30:.2f} GiB" if size >= 2**24 else f"{size:,} bytes"
        raise ResourceError(
            f"{field}: {folder} cannot hold {amount} of {what}: {error.strerror or error}. Name a folder "
            "on a disk with that much room."
        ) from error
