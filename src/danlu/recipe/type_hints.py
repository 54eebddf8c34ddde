"""The fields of a recipe with their keys, and the types that they admit: sections, variants, lists, literal values.

Short forms, messages, `danlu explain`, the JSON schema and shell completion all read the section classes through these
functions, so that a new section needs no further declaration.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from danlu.recipe.sections import Recipe, Section

T = TypeVar("T")
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


def _by_identity(read: Callable[[Hint], T]) -> Callable[[Hint], T]:
    """A function of a type that reads each type once. A type with bounds has no hash, so types are told by identity,
    and those that were read are held.
    """
    known: dict[int, tuple[Hint, T]] = {}

    @wraps(read)
    def read_once(hint: Hint) -> T:
        if id(hint) not in known:
            known[id(hint)] = hint, read(hint)
        return known[id(hint)][1]

    return read_once


@_by_identity
def union_members(hint: Hint) -> Sequence[tuple[Hint, tuple[FieldInfo, ...]]]:
    """The alternatives of a type, unions flattened, each with the bounds that apply to it."""
    if generic_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        bounds = tuple(extra for extra in extras if isinstance(extra, FieldInfo) and extra.discriminator is None)
        return tuple((member, (*inner_bounds, *bounds)) for member, inner_bounds in union_members(inner))
    if generic_origin(hint) in (Union, types.UnionType):
        return tuple(member for alternative in get_args(hint) for member in union_members(alternative))
    return ((hint, ()),)


@_by_identity
def section_types(hint: Hint) -> Sequence[type[Section]]:
    """Returns the section classes that a type admits; more than one when they are variants distinguished by `kind`."""
    return tuple(
        member for member, _ in union_members(hint) if isinstance(member, type) and issubclass(member, Section)
    )


def subsection_types(hint: Hint) -> Sequence[type[Section]]:
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


@_by_identity
def literal_values(hint: Hint) -> Sequence[Any]:
    """Every value that the `Literal`s of a type admit."""
    literals = [member for member, _ in union_members(hint) if generic_origin(member) is Literal]
    return tuple(value for literal in literals for value in get_args(literal))


@dataclass(frozen=True)
class RecipeField:
    """A field of a section class, at its place in a recipe."""

    key: str  # dotted, entries of lists without their index
    section: type[Section]
    name: str
    variant: str  # the `kind` that chooses the section; "" where there is no choice

    @property
    def hint(self) -> Hint:
        """The field's annotation."""
        return field_types(self.section)[self.name]

    @property
    def info(self) -> FieldInfo:
        """Pydantic's field, with the default."""
        return self.section.model_fields[self.name]

    @property
    def about(self) -> str:
        """The field's documentation on one line."""
        from danlu.recipe.field_docs import field_docs  # a run shows none of it

        return " ".join(field_docs(self.section)[self.name].split())


def fields_of(hint: Hint, key: str = "") -> Iterator[RecipeField]:
    """The fields of each section class that a type admits, or that the entries of its list are.

    key: the dotted key of the field with this type; "" for the recipe itself.
    """
    kinds = {section: kind for kind, section in variants_of(entry_type(hint) or hint).items()}
    for section in subsection_types(hint):
        for name in section.model_fields:
            yield RecipeField(f"{key}.{name}" if key else name, section, name, kinds.get(section, ""))


def walk_fields(hint: Hint = Recipe, key: str = "") -> Iterator[RecipeField]:
    """Every field below a type, parents before the fields inside them; one key has several fields where variants do."""
    for field in fields_of(hint, key):
        yield field
        yield from walk_fields(field.hint, field.key)


def fields_at(key: str, *, through_lists: bool = True, root: type[Section] = Recipe) -> list[RecipeField]:
    """The fields with a dotted key, several where a `kind` chooses between sections that all have it.

    root: the recipe, or one of another verb.
    """
    parent, _, name = key.rpartition(".")
    return [field for field in fields_below(parent, through_lists=through_lists, root=root) if field.name == name]


def present_name(key: str) -> str:
    """A dotted key with the name that its field has now, where an earlier version called it otherwise."""
    parent, _, name = key.rpartition(".")
    names = {field.section.old_names[name] for field in fields_below(parent) if name in field.section.old_names}
    return f"{parent}.{names.pop()}" if names else key


@cache
def fields_below(key: str, *, through_lists: bool = True, root: type[Section] = Recipe) -> tuple[RecipeField, ...]:
    """The fields directly below a dotted key; those of the recipe itself below "".

    through_lists: also below a list of sections, and below the entries of one. root: as `fields_at` has it.
    """
    hints = [field.hint for field in fields_at(key, through_lists=through_lists, root=root)] if key else [root]
    return tuple(field for hint in hints if through_lists or section_types(hint) for field in fields_of(hint, key))
