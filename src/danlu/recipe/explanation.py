"""What a key of the recipe means, what it takes, and where its value came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from danlu.errors import RecipeError
from danlu.recipe.loading import Loaded
from danlu.recipe.messages import KEYS_OF_OTHER_TOOLS, closest_match, describe_type
from danlu.recipe.sections import Recipe, Section
from danlu.recipe.type_hints import (
    Hint,
    field_types,
    literal_values,
    subsection_types,
    variants_of,
)
from danlu.registry import suggested_verb


@dataclass(frozen=True)
class Explanation:
    """One key. `defaults` has one entry, or one for each variant of the section (`adamw`, `sgd`, ...) that has it."""

    key: str
    takes: str
    defaults: dict[str, str]  # variant, or "" -> default as YAML has it, or "required"
    allowed: tuple[str, ...]  # the words it takes, if it takes words
    about: str
    short: str | None  # the key that a bare value fills, for a section
    below: tuple[tuple[str, str], ...]  # (key, first sentence) of a section's keys
    value: str | None  # with a recipe: the value there
    origin: str | None  # and where it came from


def explain(key: str, loaded: Loaded | None = None) -> Explanation:
    """Explain a dotted key such as `data.max_length`, `optimizer` or `data.train.0.path`.

    Raises RecipeError for a key that no recipe has, with the nearest that one has.
    """
    owners = _owners(key)
    if not owners:
        raise RecipeError(_unknown(key))
    section, name, _ = owners[0]
    hint = field_types(section)[name]
    found = subsection_types(hint)
    words = dict.fromkeys(str(choice) for owner, _, _ in owners for choice in literal_values(field_types(owner)[name]))
    allowed = tuple(words) or tuple(sorted(variants_of(hint)))
    value = origin = None
    if loaded is not None:
        value, origin = _as_yaml(value_at(loaded.recipe, key)), loaded.origin(key)
    return Explanation(
        key=key,
        takes=describe_type(hint) if len(owners) == 1 or not literal_values(hint) else f"one of {', '.join(allowed)}",
        defaults={variant: _default(owner, name) for owner, name, variant in owners},
        allowed=allowed,
        about=" ".join((section.model_fields[name].description or "").split()),
        short=found[0].short if found else None,
        below=tuple((entry, first_sentence(kind, entry)) for kind in found for entry in field_types(kind))
        if len(found) == 1
        else tuple((kind, _first_line(variant)) for kind, variant in sorted(variants_of(hint).items())),
        value=value,
        origin=origin,
    )


def keys() -> list[str]:
    """Every dotted key a recipe can have, entries of lists without their index."""
    return list(dict.fromkeys(_keys("", Recipe)))


def _keys(above: str, section: type[Section]) -> Iterator[str]:
    for name, hint in field_types(section).items():
        key = f"{above}.{name}" if above else name
        yield key
        for below in subsection_types(hint):
            yield from _keys(key, below)


def _owners(key: str) -> list[tuple[type[Section], str, str]]:
    """The section classes that have the key, its last part, and the variant each is; empty for an unknown key."""
    candidates: list[tuple[Hint, str]] = [(Recipe, "")]
    *above, name = [part for part in key.split(".") if not part.isdecimal()] or [""]
    for part in above:
        found = [
            (field_types(kind)[part], kind)
            for hint, _ in candidates
            for kind in _inside(hint)
            if part in field_types(kind)
        ]
        candidates = [(hint, "") for hint, _ in found]
    return [
        (kind, name, _variant_name(hint, kind))
        for hint, _ in candidates
        for kind in _inside(hint)
        if name in field_types(kind)
    ]


def _inside(hint: Hint) -> list[type[Section]]:
    return subsection_types(hint)


def _variant_name(hint: Hint, section: type[Section]) -> str:
    return next((kind for kind, variant in variants_of(hint).items() if variant is section), "")


def _default(section: type[Section], name: str) -> str:
    default = section.model_fields[name].default
    return "required" if default is PydanticUndefined else _as_yaml(default)


def value_at(recipe: Recipe, key: str) -> Any:
    """The value at a dotted key; None where there is none."""
    value: Any = recipe
    for part in key.split("."):
        if isinstance(value, list):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
        else:
            value = getattr(value, part, None)
    return value


def _as_yaml(value: Any) -> str:
    if isinstance(value, Section):
        given = {name: getattr(value, name) for name in type(value).model_fields}
        return "{" + ", ".join(f"{name}: {_as_yaml(entry)}" for name, entry in given.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_as_yaml(entry) for entry in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def first_sentence(section: type[Section], name: str) -> str:
    """The first sentence of a field's documentation, without its full stop."""
    text = " ".join((section.model_fields[name].description or "").split())
    return text.partition(". ")[0].rstrip(".")


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").partition("\n")[0]


def _as_verb(word: str) -> str | None:
    instead = suggested_verb(word)
    return None if instead is None else f"is no key of a recipe but a thing to do: {instead}"


def _as_value(word: str) -> str | None:
    """Which keys take a word as their value, and what else such a section has."""
    found: dict[str, type[Section] | None] = {}
    for key in keys():
        for section, name, _ in _owners(key):
            hint = field_types(section)[name]
            if word in (*variants_of(hint), *literal_values(hint)):
                found.setdefault(key.removesuffix(".kind"), variants_of(hint).get(word))
    if not found:
        return None
    key, variant = next(iter(found.items()))
    others = [name for name in field_types(variant) if name != "kind"] if variant is not None else []
    more = f" It has {', '.join(others)}: `danlu explain {key}.{others[0]}`" if others else f" `danlu explain {key}`"
    return f"is a value of {' and of '.join(found)}: set {key} to {word}.{more}"


def _unknown(key: str) -> str:
    known = keys()
    what = _as_value(key.lower()) or _as_verb(key)
    if what is not None:
        return f"{key!r} {what}"
    last = key.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == last]
    guess = (
        KEYS_OF_OTHER_TOOLS.get(key.lower().replace("-", "_"))
        or (same_name[0] if same_name else closest_match(key, known))
        or closest_match(last, known)
    )
    return f"no recipe has the key {key!r}.{f' Did you mean {guess!r}?' if guess else ''} `danlu explain` lists them"
