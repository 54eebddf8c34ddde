"""Short forms and full forms: what the type of a field says about how its value may be written.

`model: folder` means `model: {path: folder}`, `data: [a, b]` means `data: {train: [{path: a}, {path: b}]}`,
`packing: false` means `packing: {kind: none}`. Everything here is read off the section classes, so a new section has
its short form by naming one field.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from danlu.recipe.sections import Section
from danlu.recipe.yaml_tree import Node

Hint = Any  # a type annotation


def generic_origin(hint: Hint) -> Any:
    """`typing.get_origin`, whose declared result type leaves out most of what it returns."""
    return get_origin(hint)


@cache
def field_types(section: type[Section]) -> dict[str, Hint]:
    """The annotations of a section's fields, in order, with their bounds."""
    hints = get_type_hints(section, include_extras=True)
    return {name: hints[name] for name in section.model_fields}


def union_members(hint: Hint) -> list[tuple[Hint, tuple[FieldInfo, ...]]]:
    """A type as the list of what it may be: unions opened, each branch with the bounds that apply to it."""
    if generic_origin(hint) is Annotated:
        inner, *extras = get_args(hint)
        bounds = tuple(extra for extra in extras if isinstance(extra, FieldInfo) and extra.discriminator is None)
        return [(branch, (*more, *bounds)) for branch, more in union_members(inner)]
    if generic_origin(hint) in (Union, types.UnionType):
        return [branch for arg in get_args(hint) for branch in union_members(arg)]
    return [(hint, ())]


def section_types(hint: Hint) -> list[type[Section]]:
    """The section classes a type admits; more than one when they are variants told apart by `kind`."""
    return [branch for branch, _ in union_members(hint) if isinstance(branch, type) and issubclass(branch, Section)]


def variants_of(hint: Hint) -> dict[str, type[Section]]:
    """Variants by the `kind` that names them; empty if the type has none."""
    found = section_types(hint)
    return {get_args(field_types(section)["kind"])[0]: section for section in found} if len(found) > 1 else {}


def list_item_type(hint: Hint) -> Hint | None:
    """What a list holds, for a type that admits a list; None for one that does not."""
    for branch, _ in union_members(hint):
        if generic_origin(branch) is list:
            return get_args(branch)[0]
    return None


def matching_variant(hint: Hint, node: Node | None) -> type[Section] | None:
    """The section class that a value is (or would be) checked against."""
    found = section_types(hint)
    if len(found) < 2:
        return found[0] if found else None
    kind = node.child("kind") if node is not None else None
    return variants_of(hint).get(kind.value) if kind is not None and isinstance(kind.value, str) else None


def expand(node: Node, hint: Hint, default: Any = None) -> Node:
    """Write a value in full. A value that has no sense there is left as it is, for the check to name.

    Args: `default` is the field's own default, which says which `kind` a mapping without one means.
    """
    value = node.value
    if section_types(hint) and value is not None:
        return _full_section(node, hint, default)
    inside = list_item_type(hint)
    if inside is None or value is None:
        return node
    if isinstance(value, list):
        return Node([expand(entry, inside) for entry in value], node.origin, node.key_origin)
    admits = {branch for branch, _ in union_members(hint)}
    if isinstance(value, str) or (isinstance(value, dict) and section_types(inside)) or len(admits) == 1:
        return Node([expand(Node(value, node.origin), inside)], node.origin, node.key_origin)
    return node


def _full_section(node: Node, hint: Hint, default: Any) -> Node:
    section = section_types(hint)[0]
    if not isinstance(node.value, dict):
        if section.short is None:
            return node
        inner = Node(node.value, node.origin)
        if isinstance(node.value, bool) and section.switch is not None:
            inner.value = section.switch[0 if node.value else 1]
        node = Node({section.short: inner}, node.origin, node.key_origin)
    assert isinstance(node.value, dict)
    entries = dict(node.value)
    if len(section_types(hint)) > 1:
        if "kind" not in entries and isinstance(default, Section):
            entries = {"kind": Node(vars(default)["kind"], node.origin), **entries}
        section = matching_variant(hint, Node(entries, node.origin)) or section
    known = field_types(section)
    for key, child in entries.items():
        if key in known:
            entries[key] = expand(child, known[key], section.model_fields[key].default)
    return Node(entries, node.origin, node.key_origin)


def type_at(root: type[Section], tree: Node, key: str) -> tuple[Hint, type[Section] | None]:
    """The type at a dotted key and the section it is a field of; (None, section) for a key no field has."""
    hint: Hint = root
    section: type[Section] | None = None
    node: Node | None = tree
    for part in key.split("."):
        inside = list_item_type(hint) or _of_tuple(hint)
        if inside is not None and part.isdecimal():
            hint, section = inside, None
        else:
            section = matching_variant(hint, node)
            if section is None or part not in field_types(section):
                return None, section
            hint = field_types(section)[part]
        node = node.child(part) if node is not None else None
    return hint, section


def _of_tuple(hint: Hint) -> Hint | None:
    """What a tuple of equal entries, such as an optimizer's betas, holds."""
    return next((get_args(branch)[0] for branch, _ in union_members(hint) if generic_origin(branch) is tuple), None)


def literal_values(hint: Hint) -> list[Any]:
    """Every literal value that a type admits."""
    return [
        choice for branch, _ in union_members(hint) if generic_origin(branch) is Literal for choice in get_args(branch)
    ]
