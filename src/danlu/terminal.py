"""Text as a terminal may show it: nothing that danlu writes moves a cursor, sets a title or hides a line.

Rows, recipes, file names, templates and models are other people's text. Whatever of it goes to a terminal goes through
`printable` first; what goes to a pipe or a file as a result (`danlu generate ... > out.txt`) stays as it is.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

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


def tell(text: str, *, end: str = "\n") -> None:
    """A remark, on stderr."""
    _write(sys.stderr, printable(text) + end)


def tell_early(text: str) -> None:
    """What a verb is about to do, told only where torch is not imported yet: that may take seconds of silence."""
    if "torch" not in sys.modules:
        tell(text)


def echo(text: str, *, end: str = "\n") -> None:
    """A result, on stdout: byte for byte in a pipe or a file, printable on a terminal."""
    _write(sys.stdout, (printable(text) if sys.stdout.isatty() else text) + end)


def _write(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()
