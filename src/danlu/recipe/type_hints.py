"""The types that the annotation of a recipe's field admits: sections and their variants, lists, literal values.

Short forms, messages, `danlu explain`, the JSON schema and shell completion all read the section classes through these
functions, so that a new section needs no further declaration.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from danlu.recipe.sections import Section

Hint = Any
"""A type annotation."""


def generic_origin(hint: Hint) -> Any:
    """`typing.get_origin`; its declared result type leaves out most of the types that it returns."""
    return get_origin(hint)


@cache
def field_types(section: type[Section]) -> dict[str, Hint]:
    """The annotations of a section's fields, in order, with their bounds (`Annotated`)."""
    hints = get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.model_fields}


def union_members(hint: Hint) -> list[tuple[Hint, tuple[FieldInfo, ...]]]:
    """The alternatives of a type, unions flattened, each with the bounds that apply to it."""
    if generic_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        bounds = tuple(extra for extra in extras if isinstance(extra, FieldInfo) and extra.discriminator is None)
        return [(member, (*inner_bounds, *bounds)) for member, inner_bounds in union_members(inner)]
    if generic_origin(hint) in (Union, types.UnionType):
        return [member for alternative in get_args(hint) for member in union_members(alternative)]
    return [(hint, ())]


def section_types(hint: Hint) -> list[type[Section]]:
    """Returns the section classes that a type admits; more than one when they are variants distinguished by `kind`."""
    return [member for member, _ in union_members(hint) if isinstance(member, type) and issubclass(member, Section)]


def subsection_types(hint: Hint) -> list[type[Section]]:
    """The section classes that a type admits, or those that the entries of its list are."""
    return section_types(hint) or section_types(entry_type(hint) or str)


def variants_of(hint: Hint) -> dict[str, type[Section]]:
    """The variants of a section by the `kind` that names them; empty for a type without variants."""
    classes = section_types(hint)
    return {literal_values(field_types(each)["kind"])[0]: each for each in classes} if len(classes) > 1 else {}


def entry_type(hint: Hint, container: type = list) -> Hint | None:
    """Returns the type of the entries of a list, or of a tuple with entries of one type; None for a type that admits
    none.
    """
    return next((get_args(each)[0] for each, _ in union_members(hint) if generic_origin(each) is container), None)


def literal_values(hint: Hint) -> list[Any]:
    """Every value that the `Literal`s of a type admit."""
    literals = [member for member, _ in union_members(hint) if generic_origin(member) is Literal]
    return [value for literal in literals for value in get_args(literal)]
