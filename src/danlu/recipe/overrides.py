"""`section.key=value` on the command line: the same as writing it in the file, with the last word.

A bare value for a section sets its main key and leaves the others (`data=other.jsonl` keeps `max_length`); a mapping
in braces replaces the section. Changing an optimizer's `kind` starts that section anew, because the other keys mean
something else there. `steps=10` takes the place of the file's `epochs`, and likewise wherever keys exclude each other.
"""

from __future__ import annotations

from danlu.recipe.forms import fields, full, item, kinds, sections, variant
from danlu.recipe.sections import Recipe, Section
from danlu.recipe.tree import Node, Problem, parse


def apply(tree: Node, overrides: tuple[str, ...], problems: list[Problem]) -> None:
    """Write overrides into a tree that is in full form; what is wrong with one is added to `problems`."""
    for index, text in enumerate(overrides):
        key, equals, written = text.partition("=")
        key = key.strip().removeprefix("--")
        parts = key.split(".")
        name = f"override {text!r}"
        if not equals or not all(parts):
            wrong = Node(None, _origin(name, index))
            problems.append(Problem("", "write it as section.key=value, for example steps=100", wrong.origin))
            continue
        value = parse(written, name, problems, override=index)
        if value is not None:
            _write(tree, parts, value, problems)


def _origin(name: str, index: int):  # noqa: ANN202
    raise NotImplementedError
