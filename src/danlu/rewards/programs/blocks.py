"""The program in the text of an answer."""

from __future__ import annotations

import ast
import re
import textwrap

FENCE = re.compile(r"^(?P<indent>[ \t]*(?:>[ \t]?)*)(?P<marks>`{3,}|~{3,})[ \t]*\{?\.?(?P<language>[\w+#-]*)[^`]*$")
PYTHON = frozenset(("python", "py", "python3", "py3", "ipython", "ipython3"))


def code_of(text: str) -> str | None:
    """The last fenced block of Python in a text; the text itself where it has no fence and is Python; else None.

    Where no block names Python, it is one of those that name no language: the last that defines, imports or calls
    something, which the output of a program does not.
    """
    text = text.replace("\r\n", "\n")
    blocks = _blocks(text)
    of_python = [code for language, code in blocks if language in PYTHON]
    if of_python:
        return of_python[-1]
    if "```" not in text and not blocks:
        return text if _acts(text) is not None else None
    unnamed = [(code, _acts(code)) for language, code in blocks if not language]
    acting = [code for code, acts in unnamed if acts]
    return next(iter(acting[-1:] or [code for code, acts in unnamed if acts is not None][-1:]), None)


def _blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block that is closed, without the indentation of its fence."""
    blocks, lines = list[tuple[str, str]](), list[str]()
    opened: re.Match[str] | None = None
    for line in text.split("\n"):
        if opened is None:
            opened, lines = FENCE.match(line), []
            continue
        before, marks, behind = line.rpartition(opened["marks"])
        if marks and not behind.strip() and (not before.strip("`~ \t>") or "```" not in before):
            lines += [before] if before.strip("`~ \t>") else []
            blocks.append((opened["language"].lower(), _content(lines, len(opened["indent"]))))
            opened = None
        else:
            lines.append(line)
    return blocks


def _content(lines: list[str], indent: int) -> str:
    """The lines of a block, moved to the left."""
    moved = [line[indent:] if not line[:indent].strip(" \t>") else line for line in lines]
    return textwrap.dedent("".join(f"{line}\n" for line in moved))


def _acts(text: str) -> bool | None:
    """Whether a text is Python that does more than to name values; None where it is no Python, or nothing."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not statements:
        return None
    plain = [each for each in statements if isinstance(each, ast.Expr)]
    return len(plain) < len(statements) or any(isinstance(node, ast.Call) for each in plain for node in ast.walk(each))
