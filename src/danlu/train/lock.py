"""One process at a time in a run folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from danlu.errors import ResourceError

LOCK_FILE = ".lock"


def pid_is_alive(pid: int) -> bool:
    """Whether a process with this number runs on this machine, whoever owns it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class RunLock:
    """Holds a run folder for this process; a context manager.

    The kernel releases the lock when the process ends, however it ends, so there is no stale lock to delete. Forked
    children (data workers) give up their share at birth: one that outlives a killed run does not block the next.

    Raises ResourceError, naming the process that holds the folder, or why the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._fd: int | None = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def acquire(self) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ResourceError(
                f"{folder}: the run folder cannot be written: {error.strerror}. Choose another `output`."
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode().strip() or "unknown"
            os.close(fd)
            raise ResourceError(
                f"{folder}: another danlu process (pid {holder}) is using this run folder. "
                "Wait for it, stop it, or choose another `output`."
            ) from error
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:  # a full disk
            os.close(fd)
            raise ResourceError(
                f"{folder}: the run folder cannot be written: {error.strerror}. Free some space, or choose another "
                "`output`."
            ) from error
        self._fd = fd
        os.register_at_fork(after_in_child=self._forget)

    def release(self) -> None:
        """Let others in. The file stays: deleting it would let two processes lock two files of one name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _forget(self) -> None:
        # Closing a copy of the descriptor keeps the parent's lock; unlocking it would not.
        self.release()
