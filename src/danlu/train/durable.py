"""Getting bytes onto the disk for certain."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def sync_file(path: Path) -> None:
    """Return when the content of `path` is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        _sync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Return when the names in `path` (created, renamed, removed) are on the disk."""
    sync_file(path)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file that, after a crash at any instant, has all of `content` or does not exist."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_bytes(content)
    sync_file(unfinished)
    unfinished.rename(path)
    sync_folder(path.parent)


def _sync(fd: int) -> None:
    # macOS: fsync leaves the data in the drive's own cache; F_FULLFSYNC does not.
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(fd)
    else:
        fcntl.fcntl(fd, full)
