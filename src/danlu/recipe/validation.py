"""A tree of values checked against the types of `Recipe`: every problem at once, with its place and a remedy."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ValidationError

from danlu.core.spelling import did_you_mean
from danlu.recipe.default_mappings import with_default_mappings
from danlu.recipe.messages import describe_type, first_sentence, format_value
from danlu.recipe.sections import Recipe, Section
from danlu.recipe.short_forms import type_at
from danlu.recipe.stage_names import OBJECTIVE_NAMES
from danlu.recipe.type_hints import (
    fields_at,
    fields_of,
    literal_values,
    section_types,
    union_members,
    variants_of,
    walk_fields,
)
from danlu.recipe.yaml_tree import Node, Problem
from danlu.registry import STAGE_WORDS

AnySection = TypeVar("AnySection", bound=Section)


def validate(tree: Node) -> tuple[Recipe | None, list[Problem]]:
    """The recipe of a tree in full form and no problems, or None and all that do not fit the types."""
    return validate_section(tree, Recipe)


def validate_section(tree: Node, root: type[AnySection]) -> tuple[AnySection | None, list[Problem]]:
    """The same for a tree of another kind of recipe."""
    try:
        # Checked as JSON, where a list may fill a tuple although the sections are strict.
        return root.model_validate_json(json.dumps(with_default_mappings(tree.plain, root))), []
    except ValidationError as error:
        kinds: dict[str, str] = {}  # of pydantic's errors, by dotted key
        for detail in error.errors(include_url=False, include_input=False, include_context=False):
            # A missing entry of a list means that the list is too short; a missing key, that a key is missing.
            kind = "too_short" if isinstance(detail["loc"][-1], int) and detail["type"] == "missing" else detail["type"]
            kinds.setdefault(_key(detail["loc"], kind, tree), kind)
        # A value that fails every branch of a union is named once, and where it fails deepest.
        keys = [key for key in kinds if not any(deeper.startswith(f"{key}.") for deeper in kinds)]
        if root is not Recipe:
            return None, [_problem(key, kinds[key], tree, root) for key in keys]
        unknown = [key for key in keys if kinds[key] == "extra_forbidden"]
        targets = _targets(unknown, _stage(tree)) if unknown else set()
        keys = [key for key in keys if kinds[key] != "missing" or not _is_given(key, targets)]
        return None, [_problem(key, kinds[key], tree) for key in keys]


def _key(location: tuple[int | str, ...], kind: str, tree: Node) -> str:
    """The dotted key of an error: its location without the names of union branches, which are not in the tree."""
    node, parts, branch_passed = tree, list[str](), False
    *parents, last = location or ("",)
    for part in parents:
        kind_node = node.child("kind")
        if kind_node is not None and kind_node.value == part and not branch_passed:
            branch_passed = True  # the branch comes first, and a wrong key of the user's may have its name
        elif (child := node.child(str(part))) is not None:
            node, branch_passed = child, False
            parts.append(str(part))
    if kind in ("missing", "extra_forbidden") or node.child(str(last)) is not None:
        parts.append(str(last))
    return ".".join(part for part in parts if part)


def _problem(key: str, kind: str, tree: Node, root: type[Section] = Recipe) -> Problem:
    """The message for one of pydantic's errors, with the place that the user has to change."""
    node, exact = tree.nearest(key)
    hint, section = type_at(root, tree, key) if key else (root, None)
    name = key.rpartition(".")[2]
    if kind == "missing":
        assert hint is not None
        return Problem(key, _missing(key, name, hint, section), node.origin)
    if kind == "extra_forbidden" or hint is None:
        origin = node.key_origin if exact and node.key_origin is not None else node.origin
        if root is not Recipe:
            known = list((section or root).model_fields)
            return Problem(key, f"unknown key.{did_you_mean(name, known)} Known: {', '.join(known)}", origin)
        return Problem(key, _unknown(key, section, node.plain if exact else None, tree), origin)
    kind_node = node.child("kind") if variants_of(hint) else None
    if kind_node is not None and root is not Recipe:
        return Problem(f"{key}.kind", unexpected(node.plain, hint), kind_node.origin)
    if kind_node is not None:
        kind = kind_node.plain
        is_unknown = isinstance(kind, str | int) and kind not in variants_of(hint)
        written = _lines_for(key, kind, hint) if is_unknown else None
        message = f"unknown kind {format_value(kind)}. Write {written}" if written else unexpected(node.plain, hint)
        return Problem(f"{key}.kind", message, kind_node.origin)
    message, value = unexpected(node.plain, hint), node.plain
    if root is not Recipe:
        return Problem(key, message, node.origin)
    if key == "stage":
        message += _stage_that_is_meant(value, message)
    elif isinstance(value, str | int) and literal_values(hint) and "Did you mean" not in message:
        written = _lines_for(key, value, hint)
        message = f"{message.removesuffix('.')}. Write {written}" if written else message
    return Problem(key, message, node.origin)


def _lines_for(key: str, value: str | int, hint: Any) -> str | None:
    """The lines for a value that other tools take; for `none`, where a key may have no value, that it has none."""
    from danlu.recipe import other_tools  # here: see `_unknown`

    members = [member for member, _ in union_members(hint)]
    if type(None) in members and str(value).lower() in ("none", "off", "false"):
        return f"{key}: null, or leave it out"
    section = ".".join(part for part in key.split(".") if not part.isdecimal())
    if section == "objective" and value in OBJECTIVE_NAMES:  # a stage with this objective: dpo
        return f"{section}: {OBJECTIVE_NAMES[str(value)][1]}"
    return other_tools.value_lines(section, value)


def _stage_that_is_meant(value: Any, said: str) -> str:
    """The stage that another tool calls so, or that is written in capitals (`rm`, `GRPO`); else the nearest."""
    stage, _ = STAGE_WORDS.get(str(value).lower().replace("_", "-"), ("", ""))
    if stage:
        return f" Write stage: {stage}"
    return "" if "Did you mean" in said or not isinstance(value, str) else did_you_mean(value, list(OBJECTIVE_NAMES))


def _missing(key: str, name: str, hint: Any, section: type[Section] | None) -> str:
    from danlu.recipe.field_docs import field_docs

    parent = key.rpartition(".")[0]
    where = f"under '{parent}'" if parent else "at the top level"
    doc = first_sentence(field_docs(section)[name]) if section is not None else ""
    return f"missing: add '{name}: ...' {where} ({describe_type(hint)}){f': {doc}' if doc else ''}."


def _unknown(key: str, section: type[Section] | None, value: Any, tree: Node) -> str:
    """Suggests the key that was meant: a field of this section, another tool's name, or a field of another section."""
    from danlu.recipe import other_tools  # here: its tables are read for a recipe with an unknown key alone

    section, stage = section or Recipe, _stage(tree)
    message = "unknown key" if section is Recipe else f"unknown key in {section.__name__}"
    known, name = list(section.model_fields), key.rpartition(".")[2]
    if name in section.old_names:
        return f"{message}: it is the earlier name of {section.old_names[name]}, which is given too. Leave it out"
    advice = other_tools.advice(key, value, stage, tree.plain)
    hint = did_you_mean(name, known)
    if advice is not None and not any(row.target == key for row in other_tools.find(key, stage)):
        return f"{message}. {advice}"
    if hint:
        return f"{message}.{hint}"
    if name in Recipe.model_fields and section is not Recipe:
        return f"{message}. {name} is a key of the recipe itself, not of {key.rpartition('.')[0]}"
    below = (field.key for field in walk_fields() if field.key.startswith(f"{key.rpartition('.')[0]}."))
    inner = (field for top in fields_of(Recipe) if section_types(top.hint) for field in fields_of(top.hint, top.key))
    deeper = (inside for inside in below if inside.endswith(f".{name}") and inside.count(".") > key.count("."))
    elsewhere = next(deeper, None) if section is not Recipe else None
    elsewhere = elsewhere or next((field.key for field in inner if field.name == name and field.key != key), None)
    if elsewhere is not None:
        return f"{message}. danlu's key for it is {elsewhere}"
    return f"{message}. Known: {', '.join(known)}"


def _targets(unknown: list[str], stage: str) -> set[str]:
    """danlu's keys for those that other tools have."""
    from danlu.recipe import other_tools  # here: see above

    return {row.target for key in unknown for row in other_tools.find(key, stage) if row.is_key}


def _is_given(key: str, targets: set[str]) -> bool:
    """Whether a missing key, or the key that a bare value of its section fills, is among danlu's keys for others."""
    shorts = {section.short for field in fields_at(key) for section in section_types(field.hint) if section.short}
    return not targets.isdisjoint({key, *(f"{key}.{short}" for short in shorts)})


def _stage(tree: Node) -> str:
    """The stage that a recipe names, if it names one."""
    stage = tree.child("stage")
    return stage.value if stage is not None and isinstance(stage.value, str) else ""


def unexpected(value: Any, hint: Any) -> str:
    """Says why a value does not fit a type: the expected type, the value, and the nearest that would fit."""
    variants = variants_of(hint)
    if variants and isinstance(value, dict | str):
        return _unknown_kind(value, sorted(variants))
    expected, written = describe_type(hint), format_value(value)
    options = [option for option in literal_values(hint) if isinstance(option, str)]
    if isinstance(value, str) and options:
        return f"expected {expected}, not {written}.{did_you_mean(value, options)}"
    if isinstance(value, str) and _reads_as_number(value):
        return f"expected {expected}, not the text {written}. Write it without quotes"
    if isinstance(value, dict) and value and "a text" in expected and not any(value.values()):
        text = "{" + ", ".join(map(str, value)) + "}"
        return f'expected {expected}, not {written}. YAML reads braces so: write "{text}", in double quotes'
    if isinstance(value, float) and value.is_integer() and "whole number" in expected:
        return f"expected {expected}, not {written}. Write {int(value)}"
    if isinstance(value, str) and value.lower() in ("yes", "no", "on", "off") and "true or false" in expected:
        return f"expected true or false, not {written}. Write {str(value.lower() in ('yes', 'on')).lower()}"
    return f"expected {expected}, not {written}"


def _unknown_kind(value: dict[str, Any] | str, variants: list[str]) -> str:
    """The message for a `kind` that is missing or that no variant has, with the nearest."""
    kind = value.get("kind") if isinstance(value, dict) else value
    if kind is None:
        return f"missing 'kind'. One of: {', '.join(variants)}"
    if not isinstance(kind, str):
        return f"expected one of {', '.join(variants)}, not {format_value(kind)}"
    return f"unknown kind {format_value(kind)}.{did_you_mean(kind, variants)} One of: {', '.join(variants)}"


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
