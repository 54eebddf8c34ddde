"""One process at a time in a run folder."""

from __future__ import annotations

import errno
from pathlib import Path

from danlu.core.errors import ResourceError
from danlu.core.file_lock import AlreadyLocked, FileLock

LOCK_FILE = ".lock"


class RunLock:
    """The lock of a run folder, which one process holds at a time; a context manager.

    The system releases it when the process ends, however it does, so there is no stale lock to delete; data workers do
    not inherit it. A disk without locks (`danlu.core.file_lock`) may keep a file of a process of
    another machine, to be deleted by hand.

    Entering (and `acquire`) raises ResourceError, naming the process that holds the folder, or why the folder cannot be
    written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_FILE
        self._lock = FileLock(self.path)

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Make the folder if needed, and take its lock. Raises ResourceError, as entering does."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except AlreadyLocked as taken:
            in_use = f"{folder}: another danlu process ({taken.holder}) is using this run folder. "
            if taken.holder.file is not None:
                raise ResourceError(
                    f"{in_use}This disk has no locks (flock), so from here nobody can tell whether it still runs. Wait "
                    f"for it, or choose another `output`; if it is gone, delete {taken.holder.file}"
                ) from None
            raise ResourceError(f"{in_use}Wait for it, stop it, or choose another `output`.") from None
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "Free some space, or choose another `output`." if full else "Choose another `output`."
            raise ResourceError(f"{folder}: the run folder cannot be written: {error.strerror}. {advice}") from error

    def release(self) -> None:
        """Release the lock; another process may take it from now on."""
        self._lock.release()
