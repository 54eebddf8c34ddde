"""The documentation of the recipe's fields: the docstrings below them.

They are read from the source when they are asked for: most commands show none of them, and pydantic's own reading of
them (`use_attribute_docstrings`) takes a quarter of the time in which the sections are imported.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache

from danlu.recipe.sections.base import Section


@cache
def field_docs(section: type[Section]) -> Mapping[str, str]:
    """The documentation of each field of a section, "" where there is none: its `description`, else its docstring.

    A field that a variant only gives another default has the docstring of the nearest base class with one.
    """
    docs: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, Section):
            docs |= _docs_of_module(base.__module__).get(base.__qualname__, {})
    return {name: field.description or docs.get(name, "") for name, field in section.model_fields.items()}


@cache
def _docs_of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """The docstrings below the annotated names of each class of a module, by the class's qualified name."""
    try:
        source = inspect.getsource(sys.modules[name])
    except OSError:  # a program that is shipped without its source has no documentation of fields
        return {}
    return dict(_docs_of_classes(ast.parse(source), ""))


def _docs_of_classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yields (qualified name, docstring by field) of each class in a syntax tree, as `__qualname__` names it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}", dict(_docs_of_fields(child))
            yield from _docs_of_classes(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docs_of_classes(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _docs_of_classes(child, prefix)


def _docs_of_fields(section: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yields (field, docstring) where a string stands directly below an annotated name."""
    for field, below in zip(section.body, section.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str() as text)):
                    yield field.target.id, inspect.cleandoc(text)
