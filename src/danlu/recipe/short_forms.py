"""Short forms of a recipe's values expanded to full ones.

`model: folder` means `model: {path: folder}`, `data: [a, b]` means `data: {train: [{path: a}, {path: b}]}`,
`packing: false` means `packing: {kind: none}`. Everything here is read off the section classes, so a new section has
its short form by naming one field.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from danlu.recipe.sections import Section
from danlu.recipe.type_hints import (
    Hint,
    entry_type,
    field_types,
    literal_values,
    section_types,
    union_members,
    variants_of,
)
from danlu.recipe.yaml_tree import Node


def matching_variant(hint: Hint, node: Node | None) -> type[Section] | None:
    """The section class that a value is (or would be) checked against; None if its `kind` decides that and has none."""
    classes = section_types(hint)
    if len(classes) < 2:
        return classes[0] if classes else None
    kind = node.child("kind") if node is not None else None
    return variants_of(hint).get(kind.value) if kind is not None and isinstance(kind.value, str) else None


def expand(node: Node, hint: Hint, default: Any = None) -> Node:
    """Writes a value in its full form. A value that makes no sense there is left as it is, for validation to report.

    Args:
        hint: the type of the field that the value is of.
        default: the field's own default, which says which `kind` a mapping without one means.
    """
    value = node.value
    if section_types(hint) and value is not None and not _is_literal_or_unknown(value, hint):
        return _expand_section(node, hint, default)
    item_type = entry_type(hint)
    if item_type is None or value is None or (_is_literal(value, hint)):
        return node
    if isinstance(value, list):
        return Node([expand(entry, item_type) for entry in value], node.origin, node.key_origin)
    admits_only_list = len({member for member, _ in union_members(hint)}) == 1
    if isinstance(value, str) or (isinstance(value, dict) and section_types(item_type)) or admits_only_list:
        return Node([expand(Node(value, node.origin), item_type)], node.origin, node.key_origin)
    return node


def _is_literal(value: Any, hint: Hint) -> bool:
    """Whether a text is a value of its own of a field that also takes a section or a list."""
    return isinstance(value, str) and value in literal_values(hint)


def _is_literal_or_unknown(value: Any, hint: Hint) -> bool:
    """Whether a value is one of its own of a field that also takes a section, or no section's `kind` either."""
    if isinstance(value, dict) or not literal_values(hint):
        return False
    kinds = [kind for each in section_types(hint) for kind in literal_values(field_types(each).get("kind", str))]
    return value in literal_values(hint) or value not in kinds


def _expand_section(node: Node, hint: Hint, default: Any) -> Node:
    """A section's value in full: a bare value becomes the section's main field, a missing `kind` the default's.

    The fields inside are expanded too.
    """
    section = section_types(hint)[0]
    if not isinstance(node.value, dict):
        if section.short is None:
            return node
        bare = Node(node.value, node.origin)
        if (variant := _variant_of_text(hint, node.value)) is not None:
            assert variant.short is not None, "short_pattern says what fills it"
            (kind,) = literal_values(field_types(variant)["kind"])
            entries = {"kind": Node(kind, node.origin), variant.short: bare}
            return _expand_section(Node(entries, node.origin, node.key_origin), hint, default)
        if isinstance(node.value, bool) and section.switch is not None:
            bare.value = section.switch[0 if node.value else 1]
        node = Node({section.short: bare}, node.origin, node.key_origin)
    assert isinstance(node.value, dict)
    entries = dict(node.value)
    if len(section_types(hint)) > 1:
        if "kind" not in entries and isinstance(default, Section):
            entries = {"kind": Node(vars(default)["kind"], node.origin), **entries}
        section = matching_variant(hint, Node(entries, node.origin)) or section
    known = field_types(section)
    entries = {_present_name(key, section, entries): child for key, child in entries.items()}
    for key, child in entries.items():
        if key in known:
            entries[key] = expand(child, known[key], section.model_fields[key].default)
    return Node(entries, node.origin, node.key_origin)


def _present_name(key: str, section: type[Section], entries: Mapping[str, Node]) -> str:
    """The name of a field now; where the section has both, the old one stays for validation to report."""
    name = section.old_names.get(key, key)
    return key if name in entries else name


def _variant_of_text(hint: Hint, value: Any) -> type[Section] | None:
    """The variant that a bare text belongs to by its `short_pattern`; None for any other value."""
    if not isinstance(value, str):
        return None
    patterns = ((variant, getattr(variant, "short_pattern", None)) for variant in variants_of(hint).values())
    return next((variant for variant, pattern in patterns if pattern is not None and re.search(pattern, value)), None)


def type_at(root: type[Section], tree: Node, key: str) -> tuple[Hint, type[Section] | None]:
    """The type at a dotted key and the section it is a field of; (None, section) for a key that no field has."""
    hint: Hint = root
    section: type[Section] | None = None
    node: Node | None = tree
    for part in key.split("."):
        item_type = entry_type(hint) or entry_type(hint, tuple)
        if item_type is not None and part.isdecimal():
            hint, section = item_type, None
        else:
            section = matching_variant(hint, node)
            if section is None or part not in field_types(section):
                return None, section
            hint = field_types(section)[part]
        node = node.child(part) if node is not None else None
    return hint, section
