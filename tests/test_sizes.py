"""Classes and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "danlu"
MOST_METHODS = 30
"""Of a class; properties and the methods of protocols do not count."""
MOST_LINES = 90
"""Of a function from `def` to its last line, with its docstring."""

TOO_LONG: set[str] = set()
"""("room/file.py name"): classes and functions that are longer. None is added; one that has been split is removed."""


def is_property(method: ast.AST) -> bool:
    """Whether a method is read, set or deleted as an attribute."""
    decorators = [ast.unparse(each) for each in getattr(method, "decorator_list", ())]
    return any(
        each in ("property", "cached_property", "functools.cached_property") or each.endswith((".setter", ".deleter"))
        for each in decorators
    )


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those of expressions, which hold no class and no function."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield node
            yield from statements(node)


def too_long(source: str) -> Iterator[str]:
    """The names of the classes and functions of a file that are longer than they may be."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            is_protocol = any(ast.unparse(base).partition("[")[0] == "Protocol" for base in node.bases)
            if not is_protocol and sum(not is_property(method) for method in methods) > MOST_METHODS:
                yield node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            if node.end_lineno - node.lineno + 1 > MOST_LINES:
                yield node.name


def test_classes_and_functions_are_short() -> None:
    longer = {
        f"{file.relative_to(SOURCE)} {name}" for file in SOURCE.rglob("*.py") for name in too_long(file.read_text())
    }
    assert not longer - TOO_LONG, "split these, or have fewer methods"
    assert not TOO_LONG - longer, "remove these from the list: they are short now"


def test_long_ones_are_found() -> None:
    def of(methods: int, base: str = "", decorator: str = "") -> list[str]:
        body = "".join(f"    {decorator}\n    def f{number}(self): ...\n" for number in range(methods))
        return list(too_long(f"class Long{base}:\n{body}"))

    assert of(MOST_METHODS + 1) == ["Long"]
    assert of(MOST_METHODS) == of(MOST_METHODS + 1, "(Protocol)") == of(MOST_METHODS + 1, "", "@property") == []
    assert list(too_long("def long():\n" + "    pass\n" * MOST_LINES)) == ["long"]
    assert list(too_long("def short():\n" + "    pass\n" * (MOST_LINES - 1))) == []
