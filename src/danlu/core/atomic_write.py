"""Writing small files atomically and durably: written aside, flushed to the disk, then renamed into place."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from danlu.core.machine import pid_is_alive

UNFINISHED = re.compile(r"\.(.+)\.danlu-(\d+)\.tmp")
"""A file that `write_atomically` has begun: (name it will have), (pid of the writer). A kill may leave one."""


def sync_file(path: Path) -> None:
    """Return when the content of `path` is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # macOS: fsync leaves the data in the drive's own cache; F_FULLFSYNC does not.
        full = getattr(fcntl, "F_FULLFSYNC", None)
        if full is None:
            os.fsync(fd)
        else:
            fcntl.fcntl(fd, full)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Return when the names in `path` (created, renamed, removed) are on the disk."""
    sync_file(path)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a small file that, after a crash at any instant, has all of `content` or its old content.

    It is first written in the same folder, under a name of this process (`UNFINISHED`); such files of processes that
    have ended are deleted. Raises OSError, and then leaves nothing.
    """
    for entry in path.parent.iterdir():
        match = UNFINISHED.fullmatch(entry.name)
        if match and match[1] == path.name and (int(match[2]) == os.getpid() or not pid_is_alive(int(match[2]))):
            entry.unlink(missing_ok=True)
    unfinished = path.with_name(f".{path.name}.danlu-{os.getpid()}.tmp")
    try:
        with open(unfinished, "xb") as file:
            file.write(content)
        sync_file(unfinished)
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # the renaming itself is not on the disk before
