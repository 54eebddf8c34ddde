"""Writes docs/files.md, a line for each file of src/danlu from its docstring: `python docs/scripts/file_list.py`.

A test fails when the page and the files differ.
"""

from __future__ import annotations

import ast
import inspect
import tokenize
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
PACKAGE = TOP / "src" / "danlu"
PAGE = TOP / "docs" / "files.md"
HEAD = """# Files

Every file of `src/danlu` with the first sentence of its docstring, written by `python docs/scripts/file_list.py`.
[architecture.md](architecture.md) says what the rooms are for, and which files a change touches.
"""


def first_sentence(file: Path) -> str:
    """The first sentence of a module's docstring, on one line; "" where it has none."""
    paragraph = " ".join(inspect.cleandoc(docstring(file)).split("\n\n")[0].split())
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]


def docstring(file: Path) -> str:
    """The string that a module begins with; "" where there is none. The rest of the file is not read."""
    with tokenize.open(file) as lines:
        for token in tokenize.generate_tokens(lines.readline):
            if token.type == tokenize.STRING:
                return str(ast.literal_eval(token.string))
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                break
    return ""


def written() -> str:
    """The whole page."""
    rooms = sorted({file.parent for file in PACKAGE.rglob("*.py")})
    return "\n".join([HEAD, *(line for room in rooms for line in _lines(room))])


def _lines(room: Path) -> Iterator[str]:
    name = room.relative_to(PACKAGE.parent).as_posix()
    yield f"## {name}/\n"
    about = first_sentence(room / "__init__.py") if (room / "__init__.py").exists() else ""
    if about:
        yield f"{about}\n"
    for file in sorted(room.glob("*.py")):
        if file.name != "__init__.py":
            yield f"- `{file.name}`: {first_sentence(file)}"
    yield ""


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
