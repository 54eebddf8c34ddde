"""Files of lines that grow: a line reaches the system in one write, and a resumed run cuts off the lines behind its
checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from danlu.core.errors import ResourceError
from danlu.core.terminal import print_status


class LineLog:
    """Appends lines to a file; a kill leaves at most one torn line, which opening drops.

    Raises ResourceError when the file cannot be written.

    Attributes:
        lines  in the file
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ResourceError(f"{path}: cannot be written: {error.strerror}. Choose another `output`.") from error
        with path.open("rb") as file:
            lengths = [len(line) for line in file if line.endswith(b"\n")]
        self.lines = len(lengths)
        if sum(lengths) < os.fstat(self._fd).st_size:  # the last line is torn
            os.ftruncate(self._fd, sum(lengths))

    def truncate(self, lines: int) -> int:
        """Drops all but the first `lines`, for a run that resumes from a checkpoint with `lines` lines; returns the
        number dropped.
        """
        content = self.path.read_bytes().splitlines(keepends=True)
        os.ftruncate(self._fd, sum(map(len, content[:lines])))
        self.lines = min(lines, len(content))
        return len(content) - self.lines

    def sync(self) -> None:
        """Return when every line is on the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise ResourceError(f"{self.path}: cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def append(self, line: str) -> None:
        """Adds a line, given without its end; nothing is left of one that the disk has no room for."""
        data = (line + "\n").encode()
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            raise ResourceError(f"{self.path}: cannot be written: {error.strerror}.") from error
        if written < len(data):  # the disk filled up within this line
            os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            raise ResourceError(f"{self.path}: cannot be written: the disk is full. Free some space, then resume.")
        self.lines += 1


class OptionalLineLog(LineLog):
    """A file of lines that nothing depends on: a disk that takes no more of it ends no run.

    The first line that cannot be written is reported once, and from then on no line is added: the file stays without
    gaps.
    """

    def __init__(self, path: Path, log: Callable[[str], None] = print_status) -> None:
        super().__init__(path)
        self._log = log
        self._is_on = True

    def append(self, line: str) -> None:
        """Adds a line, given without its end, unless an earlier one could not be written."""
        self._attempt(lambda: super(OptionalLineLog, self).append(line))

    def sync(self) -> None:
        """Return when the lines are on the disk, as far as it takes them."""
        self._attempt(super().sync)

    def _attempt(self, write: Callable[[], None]) -> None:
        if not self._is_on:
            return
        try:
            write()
        except ResourceError as error:
            self._is_on = False
            self._log(f"{error} Nothing more is written there in this run, and training goes on")
