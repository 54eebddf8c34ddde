"""Reading files that are small by nature: recipes, configs, chat templates, adapter descriptions.

A named pipe would be waited for without end, a device or a mistaken file of gigabytes would fill memory, and JSON that
is nested thousands deep ends Python's recursion. Each is an ordinary error here.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""The bound by default on a file that is read whole: tokenizer.json, the largest of them, has about 20 MiB."""


def read_small(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Reads the whole content of a regular file.

    Raises OSError as open() does; also, without reading more than the bound, for a file that has more than
    `max_bytes`, and for a pipe, a socket or a device.
    """
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        size = f"{max_bytes >> 20} MiB" if max_bytes >= 1 << 20 else f"{max_bytes >> 10} KiB"
        raise OSError(errno.EFBIG, f"larger than {size}, the most that such a file may have", str(path))
    return content


def check_regular(path: Path) -> None:
    """Raises OSError for a pipe, a socket or a device, which a reader might wait for; opens nothing."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))


def check_regular_entries(folder: Path) -> None:
    """`check_regular` for all that lies in a folder; a link that leads nowhere is left for whoever needs its file."""
    for entry in folder.iterdir():
        with suppress(FileNotFoundError):
            check_regular(entry)


def read_small_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """`read_small` as UTF-8 text. Raises UnicodeDecodeError too."""
    return read_small(path, max_bytes).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """`json.loads`, with json.JSONDecodeError for all that it cannot read: also for too deep a nesting and for a number
    of thousands of digits. Raises UnicodeDecodeError too."""
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError:
        raise json.JSONDecodeError("a number with too many digits", "", 0) from None
