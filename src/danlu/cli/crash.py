"""The message of an exception that danlu does not raise on purpose, and the file that its traceback goes to."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from danlu import __version__
from danlu.core.errors import DanluError, InternalError, RecipeError, ResourceError

FOLDERS = (Path("~/.cache/danlu/crashes"), Path(tempfile.gettempdir()))
"""The folders for a report: the first writable one is used. A cluster's home is seen from everywhere, its /tmp is
not."""

# A path or a disk that refuses is the machine's affair; any other errno of an operation that was not expected to fail
# says that danlu did it wrong.
_REFUSALS = frozenset(
    number
    for number, name in errno.errorcode.items()
    if name in ("EACCES", "EPERM", "EROFS", "ENOSPC", "EDQUOT", "EIO", "EMFILE", "ENFILE", "ENOMEM", "ESTALE", "EFBIG")
    or name in ("ENAMETOOLONG", "ELOOP", "ETIMEDOUT", "EAGAIN")
)
BUG = "This is a bug of danlu, not a mistake of yours"
TRACEBACK = "Traceback (most recent call last):"
_MOST_CHARACTERS = 500  # of the exception's own text in the message; the file has all of it


def as_danlu_error(error: BaseException, doing: str = "") -> DanluError:
    """The DanluError that describes an error best.

    doing: the action of the process, in words (``layers.3 (forward, step 2)``), where it is known.
    """
    said = f"{type(error).__name__}{f' at {doing}' if doing else ''}: {_first_line(error)}".rstrip(": ")
    # CUDA's error by its name: torch need not be loaded.
    of_cuda = type(error).__name__ == "OutOfMemoryError"
    of_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or of_cpu or of_cuda:
        return ResourceError(
            f"memory ran out ({said}). Lower batch.micro or data.max_length, set memory.recompute: full, train an "
            "adapter on a quantized model, or take a machine with more of it"
        )
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        file = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return ResourceError(f"{file}{error.strerror}. {_advice(error.errno)}")
    if isinstance(error, RuntimeError) and str(error) == "Could not determine home directory.":  # pathlib's own text
        return RecipeError("a path begins with '~' and the name of no user of this machine. Write it in full")
    if isinstance(error, ImportError) and not (error.name or "").startswith("danlu"):
        return ResourceError(
            f"the package {error.name or '?'} cannot be imported: {_first_line(error)}. "
            "Install danlu again with its dependencies, and look for a file of that name in the working directory"
        )
    if isinstance(error, RecursionError):
        return InternalError(
            f"{said}{_place(error)}. Something is nested too deeply to be read: look for brackets in brackets in a "
            "row, a JSON file or a chat template. If there are none, this is a bug of danlu"
        )
    return InternalError(f"{said}{_place(error)}. {BUG}")


def _advice(number: int | None) -> str:
    if number in (errno.ENAMETOOLONG, errno.ELOOP):
        return "Give a path that can be"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Change its permissions, or name another place"
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "Free some space, or name another place"
    return "Try again; if it stays so, ask whoever looks after this machine"


def crash_message(error: BaseException, arguments: Sequence[str]) -> tuple[str, int]:
    """The message for the terminal, and the exit code. The traceback goes to a file that the message names.

    arguments: of the command line, which the file repeats.
    """
    shown = as_danlu_error(error)
    if isinstance(shown, RecipeError):
        return str(shown), shown.exit_code
    kept = write_crash_file(
        "".join(traceback.format_exception(error)), arguments, report=isinstance(shown, InternalError)
    )
    return f"{shown}.\n{kept}", shown.exit_code


def without_traceback(text: str, arguments: Sequence[str]) -> str:
    """The message of another process's error: a traceback in it goes to a file, which is named instead."""
    said, mark, rest = text.partition(f"\n{TRACEBACK}")
    return f"{said}.\n{write_crash_file(TRACEBACK + rest, arguments, report=BUG in said)}" if mark else text


def write_crash_file(text: str, arguments: Sequence[str], *, report: bool) -> str:
    """Writes a traceback to a file. Returns a sentence that names it, or the text itself where nothing can be written.

    report: whether the sentence asks the user to report it.
    """
    content = f"{_versions_and_command(arguments)}\n{text}"
    name = f"danlu-crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for place in FOLDERS:
        try:
            folder = place.expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / name
            # Readable to this user alone: a traceback may show paths and rows.
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as handle:
                handle.write(content.encode(errors="backslashreplace"))
        except (OSError, RuntimeError):
            continue
        holds = f"{file}, which holds the traceback, the command and the versions"
        return f"Report it with {holds}" if report else f"More is in {holds}"
    begin = "Report it with what follows" if report else "What happened follows"
    return f"{begin} (no file could be written):\n{content.rstrip()}"


def _versions_and_command(arguments: Sequence[str]) -> str:
    torch = sys.modules.get("torch")
    return (
        f"danlu {__version__}, Python {platform.python_version()}, "
        f"torch {'not loaded' if torch is None else torch.__version__}, {platform.platform()}\n"
        f"command: danlu {shlex.join(arguments)}\nat {time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}\n"
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    line = lines[-1] if lines[0] == TRACEBACK else lines[0]  # a worker's exception comes as its traceback
    return line if len(line) <= _MOST_CHARACTERS else f"{line[:_MOST_CHARACTERS]}..."


def _place(error: BaseException) -> str:
    """` (danlu/data/rows.py:42)`: the innermost line of danlu's own that the exception came through."""
    package = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if package in file.parents and file.name not in ("main.py", "worker.py"):
            return f" ({Path('danlu', *file.relative_to(package).parts).as_posix()}:{frame.lineno})"
    return ""
