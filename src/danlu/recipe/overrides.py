"""`section.key=value` on the command line: the same as writing it in the file, with the last word.

A bare value for a section sets its main key and leaves the others (`data=other.jsonl` keeps `max_length`); a mapping in
braces replaces the section. Changing an optimizer's `kind` empties that section, because the other keys mean something
else there. `steps=10` takes the place of the file's `epochs`, and likewise wherever keys exclude each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from danlu.recipe.sections import Recipe, Section
from danlu.recipe.short_forms import expand, matching_variant
from danlu.recipe.type_hints import Hint, entry_type, field_types, section_types, variants_of
from danlu.recipe.yaml_reader import parse
from danlu.recipe.yaml_tree import Node, Origin, Problem

MAX_SHOWN = 120
"""Characters of an override that a message repeats."""


@dataclass(frozen=True)
class Override:
    """One `section.key=value`: where its value goes, and the value."""

    parts: tuple[str, ...]  # of the dotted key
    value: Node

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.parts)


def apply(tree: Node, overrides: Sequence[str], problems: list[Problem]) -> None:
    """Writes overrides into a tree that is in full form; faults in them are added to `problems`."""
    put(tree, parse_overrides(overrides, problems), problems)


def parse_overrides(overrides: Sequence[str], problems: list[Problem]) -> list[Override]:
    """Reads overrides as they are typed; those that cannot be read are left out and added to `problems`."""
    parsed: list[Override] = []
    for index, text in enumerate(overrides):
        key, equals, written = text.partition("=")
        parts = key.strip().split(".")
        name = f"override {text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}...'!r}"
        origin = Origin(name, (1, index, 0))
        if not equals or not all(parts):
            problems.append(Problem("", "write it as section.key=value, for example steps=100", origin))
            continue
        if not written.strip():
            message = f"nothing stands after the '='. Write {key}=VALUE, or {key}=null to take the file's value away"
            problems.append(Problem(key.strip(), message, origin))
            continue
        value = parse(written, name, problems, override=index)
        if value is not None:
            parsed.append(Override(tuple(parts), value))
    return parsed


def put(tree: Node, overrides: Sequence[Override], problems: list[Problem], root: type[Section] = Recipe) -> None:
    """Writes overrides into a tree of `root` that is in full form; a key that leads nowhere is added to `problems`."""
    for override in overrides:
        try:
            _put(tree, root, override.parts, override.value)
        except _ListIndexError as error:
            problems.append(Problem(override.key, str(error), override.value.origin))


def merge(node: Node, over: Node, hint: Hint = Recipe, default: Any = None) -> None:
    """Lays the keys of a mapping over a tree that is in full form, section by section, in place.

    As with an override a bare value sets a section's main key, another `kind` empties the section, and a key takes the
    place of those that it excludes. A mapping leaves the section's other keys; a list takes the list's place. `hint`
    and `default` are those of the field with `node` as its value; None for a key that no section has.
    """
    if not isinstance(node.value, dict) or not isinstance(over.value, dict) or hint is None or not section_types(hint):
        _replace(node, hint, over, default)
        node.key_origin = over.key_origin or node.key_origin
        return
    if variants_of(hint) and (kind := over.child("kind")) is not None:
        _change_kind(node, kind.value)
    section = matching_variant(hint, over if over.child("kind") is not None else node) or _class_of(hint, default)
    fields = field_types(section) if section is not None else {}
    for name, child in over.value.items():
        key = section.old_names.get(name, name) if section is not None else name
        if section is not None and key in section.one_of and child.value is not None:
            _drop(node.value, [name for name in section.one_of if name != key])
        key_default = section.model_fields[key].default if section is not None and key in fields else None
        present = node.value.get(key)
        if present is None:
            expanded = child if fields.get(key) is None else expand(child, fields[key], key_default)
            node.value[key] = Node(expanded.value, expanded.origin, child.key_origin)
        else:
            merge(present, child, fields.get(key), key_default)


class _ListIndexError(Exception):
    """The key of an override leads through a list without saying which entry, or past its end."""


def _put(node: Node, hint: Hint, parts: Sequence[str], value: Node, default: Any = None) -> None:
    """Sets the value at the dotted key `parts` below `node`, creating the mappings on the way.

    `hint` and `default` are those of the field with `node` as its value; None for a key that no section has.
    """
    if not parts:
        _replace(node, hint, value, default)
        return
    part, rest = parts[0], parts[1:]
    item_type = entry_type(hint) if hint is not None else None
    if item_type is not None and part.isdecimal() and not isinstance(node.value, dict | list):
        node.value, node.origin = [], value.origin
    if isinstance(node.value, list):
        if not part.isdecimal() and len(node.value) == 1 and section_types(item_type):
            _put(node.value[0], item_type, parts, value)  # `objective.beta` of the only objective there is
            return
        _put(_entry(node.value, part, value.origin), item_type, rest, value)
        return
    if not isinstance(node.value, dict):
        node.value, node.origin = _from_default(default, value.origin), value.origin
    section = (matching_variant(hint, node) or _class_of(hint, default)) if hint is not None else None
    part = section.old_names.get(part, part) if section is not None else part
    if section is not None and part in section.one_of and (rest or value.value is not None):
        _drop(node.value, [name for name in section.one_of if name != part])
    if hint is not None and variants_of(hint) and part == "kind" and not rest:
        _change_kind(node, value.value)
    child_hint = field_types(section).get(part) if section is not None else None
    child_default = section.model_fields[part].default if section is not None and child_hint is not None else None
    child = node.value.setdefault(part, Node(None, value.origin))
    _put(child, child_hint, rest, value, child_default)


def _entry(entries: list[Node], part: str, origin: Origin) -> Node:
    """The entry of a list that a part of a key names; a new one where it is the index after the last."""
    if not part.isdecimal():
        raise _ListIndexError(
            f"this is a list: say which entry, from 0 to {max(len(entries) - 1, 0)}, instead of {part!r}"
        )
    index = int(part)
    if index > len(entries):
        raise _ListIndexError(f"the list has {len(entries)} entries, so the next one is {len(entries)}, not {index}")
    if index == len(entries):
        entries.append(Node(None, origin))
    return entries[index]


def _from_default(default: Any, origin: Origin) -> dict[str, Node]:
    """The entries that a section which the file leaves out begins with: its default's (`batch`: 8 sequences)."""
    values = default.model_dump(mode="json", exclude_unset=True) if isinstance(default, Section) else {}
    return {name: Node(value, origin) for name, value in values.items()}


def _class_of(hint: Hint, default: Any) -> type[Section] | None:
    """The class of a field's default, where that is one of the variants that the field admits."""
    return type(default) if isinstance(default, Section) and type(default) in section_types(hint) else None


def _replace(node: Node, hint: Hint, value: Node, default: Any) -> None:
    """Puts `value` in the place of a node; a bare value for a section only sets the section's main key."""
    expanded = expand(value, hint, default) if hint is not None else value
    was_bare = not isinstance(value.value, dict) and isinstance(expanded.value, dict)
    if not (was_bare and isinstance(node.value, dict) and isinstance(expanded.value, dict)):
        node.value, node.origin, node.key_origin = expanded.value, expanded.origin, None
        return
    section = matching_variant(hint, expanded)
    if variants_of(hint):
        _change_kind(node, value.value)
    for name, child in expanded.value.items():
        if section is not None and name in section.one_of:
            _drop(node.value, [alternative for alternative in section.one_of if alternative != name])
        node.value[name] = child


def _change_kind(node: Node, kind: Any) -> None:
    """Empties a section when its `kind` changes: its other keys mean something else for another variant."""
    assert isinstance(node.value, dict)
    present = node.value.get("kind")
    if present is not None and present.value != kind:
        _drop(node.value, list(node.value))


def _drop(entries: dict[str, Node], names: Sequence[str]) -> None:
    """Removes the file's values of these keys; those of another override stay, so that two can clash."""
    for name in names:
        if name in entries and not entries[name].origin.is_override:
            del entries[name]
