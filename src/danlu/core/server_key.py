"""The API key that `danlu serve --rollouts` makes for itself, in a file that a trainer of the same user reads.

No torch here.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from danlu.core.errors import ResourceError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def key_file(port: int) -> Path:
    """Returns the file of the key of the server at a port of this machine. Home folders may be shared by machines."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return folder / "danlu" / "server-keys" / f"{socket.gethostname()}-{port}"


def write_key(port: int, key: str) -> Path:
    """Writes the key of a server that is about to begin, for this user alone. Returns the file.

    Raises ResourceError where it cannot be written.
    """
    file = key_file(port)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One of its own, so that nobody who has the old file open reads the new key.
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as written:
            written.write(key)
    except OSError as error:
        raise ResourceError(
            f"{file}: the server's key cannot be written: {error.strerror}. Give one with --api-key (in DANLU_API_KEY)"
        ) from None
    return file


def remove_key(port: int, key: str) -> None:
    """Deletes the file of a server that has ended, unless it is another one's by now."""
    with suppress(OSError, ResourceError):
        if _content(key_file(port)) == key:
            key_file(port).unlink()


def read_key(url: str) -> str | None:
    """The key of the server at a url, where it is on this machine and has left one.

    Raises ResourceError for a file that others can read or write, or that is somebody else's.
    """
    parts = urlsplit(url)
    # Names of machines have no capitals in a URL that is split.
    if parts.hostname not in (*LOOPBACK_NAMES, socket.gethostname().lower()) or parts.port is None:
        return None
    return _content(key_file(parts.port))


def _content(file: Path) -> str | None:
    try:
        with file.open(encoding="utf-8") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ResourceError(
                    f"{file}: others can read or write the server's key, or it is another user's: delete the file, "
                    "and start the server again"
                )
            return opened.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResourceError(f"{file}: the server's key cannot be read: {error.strerror}") from None
