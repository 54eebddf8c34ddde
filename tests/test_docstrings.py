"""Docstrings are sentences, or name the thing: none begins with a preposition or "What"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "danlu"

_FRAGMENT = re.compile(
    r"""\s* (?:
        Of | In | For | With | By | From | To | At | On | As | Into | Onto | Over | Under | Without | Within | Between
        | Before | After | Per | Among | Across | Against | Along | Around | Behind | Below | Above | Besides? | Beyond
        | During | Except | Inside | Outside | Through | Throughout | Until | Till | Upon | Via | Since | Towards?
        | Like | Near | Off | What | Whatever | Whose | Which | Who
    ) \b (?!-)""",
    re.VERBOSE,
)
"""The first words of docstrings that begin in the middle: a reader must look elsewhere for the subject."""
_QUOTED = re.compile(rf"[\"']{_FRAGMENT.pattern}", re.VERBOSE)
"""The beginning of a string that may be such a docstring; few files have one and are parsed."""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every docstring: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def fragments(source: str, file: str = "") -> list[str]:
    """Returns a line for each docstring of a file that is a fragment."""
    if not _QUOTED.search(source):
        return []
    return [
        f'{file}:{line}: "{text.strip().splitlines()[0]}": begin with the thing, or with a verb ("Returns ...")'
        for line, text in docstrings(ast.parse(source))
        if _FRAGMENT.match(text)
    ]


@pytest.mark.parametrize("room", sorted({path.relative_to(SOURCE).parts[0] for path in SOURCE.rglob("*.py")}))
def test_docstrings_do_not_begin_in_the_middle(room: str) -> None:
    paths = sorted((SOURCE / room).rglob("*.py")) or [SOURCE / room]
    wrong = [line for path in paths for line in fragments(path.read_text(), str(path.relative_to(SOURCE)))]
    assert not wrong, "\n".join(wrong)


def test_fragments_are_found_wherever_they_stand() -> None:
    source = '''"""What a stage is."""
size: int
"""Of the world."""
class Stage:
    """In-place sums, by stage."""
    index: int
    """
    By which it is known.
    """
    def rank(self):
        """The global rank of a pipeline stage."""
        text = """On the first rank."""
        self.offset = 0
        """Whose rows come before."""
'''
    assert [line.split(":")[1] for line in fragments(source, "stage.py")] == ["1", "3", "7", "14"]
