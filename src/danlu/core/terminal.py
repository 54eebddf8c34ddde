"""Text as a terminal may show it: nothing that danlu writes moves a cursor, sets a title or hides a line.

Rows, recipes, file names, templates and models are other people's text. Text that goes to a terminal goes through
`printable` first; text that goes to a pipe or a file as a result (`danlu generate ... > out.txt`) stays as it is.

A terminal that was closed, a pipe without a reader or a log on a full disk ends no training: see `drop_failed_writes`.
"""

from __future__ import annotations

import io
import os
import re
import select
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# C0 without tab and newline, DEL, C1 (U+009B begins a sequence as ESC [ does), what turns the direction of writing
# round (Trojan Source, CVE-2021-42574), line separators, and halves of surrogate pairs, which no encoding takes.
# Joiners and left-to-right marks stay: emoji and several scripts are written with them.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters as escapes that can be read: ``\\x1b``, ``\\u009b``.

    Tabs and newlines stay. The escapes from U+007F on are those of JSON, in which such characters may stand as they
    are (JSON itself escapes the ones below), so printable JSON is the same JSON.
    """
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x20 else f"\\u{code:04x}"


_relay: Callable[[str], None] | None = None


def relay_status(log: Callable[[str], None]) -> None:
    """Passes this process's status lines to `say` from now on, since nobody reads its stderr."""
    global _relay
    _relay = log


def print_status(text: str, *, end: str = "\n") -> None:
    """Prints a remark to stderr; on a terminal, in lines that break between words."""
    if _relay is not None:
        _relay(text)
        return
    text = printable(text)
    _write(sys.stderr, (wrap_to_terminal(text, sys.stderr) if end == "\n" else text) + end)


def print_status_early(text: str) -> None:
    """Prints the task of a verb where torch is still to be imported: seconds in which nothing shows."""
    if "torch" not in sys.modules:
        print_status(text)


def echo(text: str, *, end: str = "\n") -> None:
    """Prints a result to stdout: byte for byte in a pipe or a file, without control characters on a terminal."""
    _write(sys.stdout, (printable(text) if sys.stdout.isatty() else text) + end)


def escape_unencodable() -> None:
    """Makes stdout print characters that its encoding lacks as \\u escapes, where Python would raise an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def write_to_stderr(text: str) -> None:
    """Writes a line by write(2): in a signal handler, or next to a progress bar that holds Python's own stderr."""
    write_to_descriptor(2, f"\n{text}\n")


def write_to_descriptor(descriptor: int, text: str) -> None:
    """Writes a text by write(2); one that cannot be written is dropped."""
    with suppress(OSError):
        os.write(descriptor, text.encode())


def drop_failed_writes(*names: str) -> None:
    """Makes `sys.stderr` or `sys.stdout` drop text that cannot be written, where Python would raise an OSError.

    names: "stderr", "stdout". Everything that this process prints through Python is covered, that of libraries too. A
    stream that stands for another file than the system's own stays as it is; one that is closed becomes os.devnull.
    """
    for name in names:
        stream, descriptor = getattr(sys, name), {"stdout": 1, "stderr": 2}[name]
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # as long as the process
            continue
        raw = getattr(getattr(stream, "buffer", None), "raw", getattr(stream, "buffer", None))
        if type(raw) is not io.FileIO or raw.fileno() != descriptor:
            continue
        with suppress(OSError):
            stream.flush()
        kept = io.TextIOWrapper(
            io.BufferedWriter(_UnfailingFile(descriptor, "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, kept)


class _UnfailingFile(io.FileIO):
    """A descriptor in which every write succeeds: bytes that the system does not take are dropped.

    Where it takes none for the moment (O_NONBLOCK, which a shell may set on its terminal), a write waits as it does
    elsewhere.
    """

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            while (written := super().write(data)) is None:
                select.select([], [self.fileno()], [])
        except (OSError, ValueError):  # ValueError: select takes no descriptor above 1023
            return memoryview(data).nbytes
        return written


def wrap_to_terminal(text: str, stream: TextIO) -> str:
    """The text in lines no wider than the terminal; unchanged where the stream is not a terminal."""
    if not stream.isatty():
        return text
    try:
        width = int(os.environ.get("COLUMNS") or os.get_terminal_size(stream.fileno()).columns)
    except (OSError, ValueError):
        width = 80
    return "\n".join(line for whole in text.split("\n") for line in wrap_line(whole, max(width, 20)))


def wrap_line(line: str, width: int) -> list[str]:
    """A line broken into several of at most `width` columns; all but the first are indented by two more.

    A longer word stays whole, and so does a command in backticks, which can then be copied.
    """
    if _columns(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" ")) + 2)
    lines = [""]
    for word in _WORD.findall(line):
        if lines[-1].strip() and _columns(lines[-1] + word) > width:
            lines.append(indent + word.lstrip())
        else:
            lines[-1] += word
    return lines


_WORD = re.compile(r"\s*(?:`[^`]*`|\S)+")


def _columns(text: str) -> int:
    """Columns that a text takes: two for a wide character (Unicode Standard Annex 11)."""
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
