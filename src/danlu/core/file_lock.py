"""One process at a time, through a file: by flock(2), or by files that name their holder where a disk knows no locks.

The kernel drops a flock when the process ends, however it ends. Some network and user-space file systems refuse it
(ENOSYS, EOPNOTSUPP, ENOLCK). There a holder makes `NAME.1`, `NAME.2`, ..., one above the highest that is there: to
create a file that must not exist yet is a single act on any file system, so of several only one succeeds. The highest
names the holder: a host, a process, and the start of that; "released" once the lock is released. It is stale when its
process is gone; on another host that cannot be seen from here, and a person has to delete the file.

The package filelock (4.2) does not replace this. Its lock falls back to a soft one for ENOSYS alone, a soft lock of a
dead process stays where the disk cannot exchange two names (NFS), and the holder of a flock is shown to nobody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from danlu.core.machine import pid_is_alive, process_start_ticks

# ENOLCK: NFS without its lock service. EINVAL: what some FUSE file systems say.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_RELEASED = "released"
_POLL_S = 0.05
_TRIES, _BETWEEN_TRIES_S = 3, 0.01  # whoever only looks (`holder_of`) has it for some microseconds
_WRITING_S = 2.0  # an empty file for so long: its process ended between creating it and writing its name


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. `file` is the one to delete if that process is gone and cannot be seen from here,
    else None.
    """

    pid: int | None
    host: str
    file: Path | None = None

    def __str__(self) -> str:
        pid = "unknown" if self.pid is None else str(self.pid)
        return f"pid {pid}" if self.host == socket.gethostname() else f"pid {pid} on {self.host}"


class AlreadyLocked(Exception):
    """Another process holds the lock. The caller that locks catches it and adds a remedy."""

    def __init__(self, holder: Holder) -> None:
        self.holder = holder
        super().__init__(str(holder))


class FileLock:
    """Holds a file for this process, from `acquire` to `release` or the end of the process.

    Forked children give up their share at birth: one that outlives a killed parent does not hold its locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._own: Path | None = None  # the file that stands in for the lock where there is no flock
        self._pid = 0

    def acquire(self, *, wait: bool = False) -> None:
        """Raises AlreadyLocked if another process holds it and not `wait`; OSError if the file cannot be written."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _flock(fd, wait)
        except BlockingIOError:
            holder = _named_in(fd)
            os.close(fd)
            raise AlreadyLocked(holder) from None
        except OSError as error:
            os.close(fd)
            if error.errno not in _NO_LOCKS:
                raise
            self._own = _take(self.path, wait)
        else:
            try:
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            except OSError:  # a full disk
                os.close(fd)
                raise
            self._fd = fd
        self._pid = os.getpid()
        # Closing a copy of the descriptor keeps the parent's lock; unlocking it would not.
        os.register_at_fork(after_in_child=self.release)

    def release(self) -> None:
        """Let others in. The files stay: deleting one would let two processes lock two files of one name."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if self._own is not None:
            if self._pid == os.getpid():
                with suppress(OSError):  # a full disk: it is stale once this process has ended
                    self._own.write_text(_RELEASED)
            self._own = None


def _flock(fd: int, wait: bool) -> None:
    """Locks an open file. Raises BlockingIOError if another process holds it, except to `wait`."""
    if not wait:
        for _ in range(_TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(_BETWEEN_TRIES_S)
    fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def holder_of(path: Path) -> Holder | None:
    """Returns the holder of `path` at this moment, None where nobody holds it; nothing is written, and nobody is kept
    waiting.
    """
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        # A shared lock for an instant: `acquire` tries again before it gives up.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named_in(fd)
    except OSError:
        newest = _newest(path)[1]
        return None if newest is None else _holder(newest)
    finally:
        os.close(fd)
    return None


def is_lock_of(name: str, lock: str) -> bool:
    """Whether a file of this name is the lock `lock`, or stands in for it."""
    return re.fullmatch(rf"{re.escape(lock)}(\.\d+)?", name) is not None


def _named_in(fd: int) -> Holder:
    holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return Holder(int(holder) if holder.isdecimal() else None, socket.gethostname())


def _take(path: Path, wait: bool) -> Path:
    """The file that says this process holds `path`. Raises AlreadyLocked."""
    while True:
        number, newest = _newest(path)
        if newest is not None and (holder := _holder(newest)) is not None:
            if not wait:
                raise AlreadyLocked(holder)
            time.sleep(_POLL_S)
            continue
        own = path.with_name(f"{path.name}.{number + 1}")
        try:
            with open(own, "x", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {process_start_ticks(os.getpid()) or '-'} {socket.gethostname()}\n")
        except FileExistsError:
            continue  # another was first
        if _newest(path)[0] != number + 1:  # this was slow: another has held it and cleared away what was below
            own.unlink(missing_ok=True)
            continue
        for lower, file_below in _numbered(path).items():
            if lower <= number:
                file_below.unlink(missing_ok=True)
        return own


def _newest(path: Path) -> tuple[int, Path | None]:
    """The highest number of the files that stand in for a lock, and that file; 0 and None where there is none."""
    return max(_numbered(path).items(), default=(0, None))


def _numbered(path: Path) -> dict[int, Path]:
    """Returns the files `NAME.1`, `NAME.2`, ... next to a lock, by number."""
    names = ((entry, *entry.name.rpartition(".")) for entry in path.parent.iterdir())
    return {int(number): entry for entry, name, _, number in names if name == path.name and number.isdecimal()}


def _holder(file: Path) -> Holder | None:
    """Returns the holder of the lock that `file` stands for; None where nobody holds it any more."""
    until = time.monotonic() + _WRITING_S
    while True:
        try:
            text = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:  # there is a higher one by now
            return None
        if text or time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    if text in ("", _RELEASED):
        return None
    pid, started, host = text.split(maxsplit=2)
    if host != socket.gethostname():
        return Holder(int(pid), host, file)
    alive = pid_is_alive(int(pid)) and (started == "-" or process_start_ticks(int(pid)) in ("", started))
    return Holder(int(pid), host) if alive else None
