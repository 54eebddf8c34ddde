"""Types and values as error messages and `danlu explain` write them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, get_args

from pydantic.fields import FieldInfo

from danlu.recipe.sections import Section
from danlu.recipe.sections.base import VariantSection
from danlu.recipe.type_hints import Hint, field_types, generic_origin, literal_values, union_members, variants_of

_NUMBERS = {int: "a whole number", float: "a number"}


def first_sentence(text: str | None) -> str:
    """The first sentence of a documentation, without its full stop."""
    return " ".join((text or "").split()).partition(". ")[0].rstrip(".")


def format_value(value: Any) -> str:
    """A value as the user may have written it, short enough for a message."""
    if isinstance(value, dict):
        return f"a mapping ({', '.join(value) or 'empty'})"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "...")
    return repr(value)


def _describe_number(noun: str, bounds: tuple[FieldInfo, ...]) -> str:
    """`a whole number, 1 or more`; `a number from 0 to below 1`."""
    # Each of a bound's limits is a dataclass of annotated_types with one field, named as the argument of Field.
    limits: dict[str, Any] = {}
    for bound in bounds:
        for limit in bound.metadata:
            limits |= asdict(limit)
    whole = noun == _NUMBERS[int]
    smallest, largest = limits.get("ge"), limits.get("le")
    if "lt" in limits:
        largest = "below 2^63" if limits["lt"] == 2**63 else f"below {limits['lt']}"
    if "gt" in limits and not whole:
        smallest = f"above {limits['gt']}"
        return f"{noun} {smallest}" if largest is None else f"{noun} {smallest} and {largest}"
    if "gt" in limits:
        smallest = limits["gt"] + 1
    if smallest is None:
        return noun if largest is None else f"{noun}, {largest} or less"
    return f"{noun}, {smallest} or more" if largest is None else f"{noun} from {smallest} to {largest}"


def describe_type(hint: Hint) -> str:
    """Describes the values that a field takes: `a whole number, 1 or more, or auto`."""
    if variants_of(hint):
        return f"one of {', '.join(sorted(variants_of(hint)))}, or a mapping with a 'kind'"
    parts: list[str] = []
    options: list[str] = []
    members = union_members(hint)
    for member, bounds in members:
        if generic_origin(member) is Literal:
            # A literal number next to a number type (`0` next to `int`) is covered by that type.
            values = get_args(member) if len(members) == 1 else [v for v in get_args(member) if isinstance(v, str)]
            options += [value if isinstance(value, str) else format_value(value) for value in values]
        elif member is type(None):
            options.append("null")
        elif isinstance(member, type) and issubclass(member, VariantSection) and len(members) > 1:
            options += literal_values(field_types(member)["kind"])  # its kind alone, next to other words
        else:
            parts.append(_describe_member(member, bounds))
    if options:
        parts.append(f"one of {', '.join(options)}" if len(options) > 1 else options[0])
    if len(parts) == 1 or (len(parts) == 2 and "," not in parts[0]):
        return " or ".join(parts)
    return f"{', '.join(parts[:-1])}, or {parts[-1]}"


def _describe_member(member: Hint, bounds: tuple[FieldInfo, ...]) -> str:
    """One alternative of a type: `a list of sources`, `a mapping of Lora keys (or its kind alone)`."""
    container = generic_origin(member)
    if member is bool:
        return "true or false"
    if member in _NUMBERS:
        return _describe_number(_NUMBERS[member], bounds)
    if member is str:
        return "a text"
    if container is list:
        (item_type,) = get_args(member)
        if isinstance(item_type, type) and issubclass(item_type, Section):
            return f"a list of {item_type.__name__.lower()}s"
        return "a list of texts" if item_type is str else "a list"
    if container is tuple:
        return f"a list of {len(get_args(member))}, each {describe_type(get_args(member)[0])}"
    if container is dict:
        return "a mapping"
    assert isinstance(member, type) and issubclass(member, Section), f"no description of {member}"
    if member.short is None:
        return f"a mapping of {member.__name__} keys"
    return f"a mapping of {member.__name__} keys (or its {member.short} alone)"
