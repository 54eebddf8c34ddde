"""Explaining a key of the recipe: its meaning, the values that it takes, and the origin of its value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic_core import PydanticUndefined

from danlu.core.errors import RecipeError
from danlu.core.spelling import closest_match
from danlu.recipe.chain import CHAIN_KEYS, STAGES
from danlu.recipe.loading import Loaded
from danlu.recipe.messages import KEYS_OF_OTHER_TOOLS, describe_type, first_sentence
from danlu.recipe.sections import Optimizer, Recipe, Section, value_at
from danlu.recipe.stage_defaults import STAGE_DEFAULTS, STAGE_KEYS, stage_values
from danlu.recipe.type_hints import Hint, field_types, literal_values, subsection_types, variants_of
from danlu.registry import suggested_verb


@dataclass(frozen=True)
class Explanation:
    """One key. `defaults` has one entry, or one for each variant of the section (`adamw`, `sgd`, ...) that has it."""

    key: str
    takes: str
    defaults: dict[str, str]  # variant, stage or "" -> default as YAML has it, or "required"
    allowed: tuple[str, ...]  # the literal values or kinds that it takes, if it takes such
    about: str
    short: str | None  # the key that a bare value fills, for a section
    children: tuple[tuple[str, str], ...]  # (key or kind, first sentence) of a section's keys or variants
    value: str | None  # at this key, where a recipe was given
    origin: str | None  # where that value was written, or "default"


def explain(key: str, loaded: Loaded | None = None) -> Explanation:
    """Explains a dotted key such as `data.max_length`, `optimizer` or `data.train.0.path`.

    Raises RecipeError for a key that no recipe has, with the nearest that one has.
    """
    if key in CHAIN_KEYS:
        return _of_chain(key)
    owners = _owners(key)
    if not owners:
        raise RecipeError(_unknown(key))
    section, name, _ = owners[0]
    hint = field_types(section)[name]
    classes = subsection_types(hint)
    literals = dict.fromkeys(str(value) for owner, _, _ in owners for value in literal_values(field_types(owner)[name]))
    allowed = tuple(literals) or tuple(sorted(variants_of(hint)))
    value = origin = None
    if loaded is not None:
        value, origin = _as_yaml(value_at(loaded.recipe, key)), loaded.origin(key)
    defaults = {variant: _default(owner, name) for owner, name, variant in owners}
    if key in STAGE_KEYS:
        defaults = _by_stage(key)
    return Explanation(
        key=key,
        takes=describe_type(hint) if len(owners) == 1 or not literal_values(hint) else f"one of {', '.join(allowed)}",
        defaults=defaults,
        allowed=allowed,
        about=" ".join((section.model_fields[name].description or "").split()),
        short=classes[0].short if classes else None,
        children=tuple((name, first_sentence(field.description)) for name, field in classes[0].model_fields.items())
        if len(classes) == 1
        else tuple((kind, _first_line(variant)) for kind, variant in sorted(variants_of(hint).items())),
        value=value,
        origin=origin,
    )


def _of_chain(key: str) -> Explanation:
    """A key that a chain has and no recipe."""
    takes = "a list of recipes, each with a name" if key == STAGES else "a text"
    below = [name for name in CHAIN_KEYS if name.startswith(f"{key}.")]
    children = tuple((name.removeprefix(f"{key}."), first_sentence(CHAIN_KEYS[name])) for name in below)
    default = "required" if key == STAGES else "null"
    return Explanation(key, takes, {"": default}, (), CHAIN_KEYS[key], None, children, value=None, origin=None)


def keys() -> list[str]:
    """Every dotted key a recipe can have, entries of lists without their index."""
    return list(dict.fromkeys(_keys("", Recipe)))


def _keys(parent: str, section: type[Section]) -> Iterator[str]:
    for name, hint in field_types(section).items():
        key = f"{parent}.{name}" if parent else name
        yield key
        for subsection in subsection_types(hint):
            yield from _keys(key, subsection)


@cache
def _owners(key: str) -> tuple[tuple[type[Section], str, str], ...]:
    """(section class that has the key, the key's last part, the variant that the class is) of every such class.

    Several where a `kind` chooses between variants that all have the key; none for an unknown key.
    """
    *parents, name = [part for part in key.split(".") if not part.isdecimal()] or [""]
    hints: list[Hint] = [Recipe]
    for part in parents:
        classes = [section for hint in hints for section in subsection_types(hint)]
        hints = [field_types(section)[part] for section in classes if part in field_types(section)]
    return tuple(
        (section, name, _variant_name(hint, section))
        for hint in hints
        for section in subsection_types(hint)
        if name in field_types(section)
    )


def _variant_name(hint: Hint, section: type[Section]) -> str:
    """The `kind` that chooses a section class among the variants of a type; "" for a type without variants."""
    return next((kind for kind, variant in variants_of(hint).items() if variant is section), "")


def _by_stage(key: str) -> dict[str, str]:
    """The default of a key in each stage, of the optimizer `adamw` or else the first that has the key."""
    name = key.rpartition(".")[2]
    kinds = [kind for kind, variant in variants_of(Optimizer).items() if name in variant.model_fields]
    defaults: dict[str, str] = {}
    for stage in STAGE_DEFAULTS:
        full, adapter = (
            dict(stage_values(stage, has_adapter=each, optimizer=kinds[0] if kinds else "adamw"))
            for each in (False, True)
        )
        if key in full:
            same = full[key] == adapter[key]
            defaults[stage] = (
                _as_yaml(full[key]) if same else f"{_as_yaml(full[key])}, of an adapter {_as_yaml(adapter[key])}"
            )
    return defaults


def _default(section: type[Section], name: str) -> str:
    """A field's default as YAML has it, or `required`."""
    default = section.model_fields[name].default
    return "required" if default is PydanticUndefined else _as_yaml(default)


def _as_yaml(value: Any) -> str:
    """A value on one line, as YAML's flow style writes it."""
    if isinstance(value, Section):
        names = type(value).model_fields
        return "{" + ", ".join(f"{name}: {_as_yaml(getattr(value, name))}" for name in names) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_as_yaml(entry) for entry in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _first_line(section: type[Section]) -> str:
    return (section.__doc__ or "").partition("\n")[0]


def _as_value(word: str) -> str | None:
    """Names the keys that take a word as their value, and the other keys of the section that it chooses."""
    variants: dict[str, type[Section] | None] = {}  # by key; None where the word is no `kind`
    for key in keys():
        for section, name, _ in _owners(key):
            hint = field_types(section)[name]
            if word in (*variants_of(hint), *literal_values(hint)):
                variants.setdefault(key.removesuffix(".kind"), variants_of(hint).get(word))
    if not variants:
        return None
    variants = dict(sorted(variants.items(), key=lambda item: item[0].count(".")))  # the recipe's own keys first
    key, variant = next(iter(variants.items()))
    fields = [name for name in field_types(variant) if name != "kind"] if variant is not None else []
    more = f" It has {', '.join(fields)}: `danlu explain {key}.{fields[0]}`" if fields else f" `danlu explain {key}`"
    return f"is a value of {' and of '.join(variants)}: set {key} to {word}.{more}"


def _unknown(key: str) -> str:
    """The message for a key that no recipe has: a value, a verb of danlu, a key of another tool, or a misspelling."""
    if (value := _as_value(key.lower())) is not None:
        return f"{key!r} {value}"
    if (verb := suggested_verb(key)) is not None:
        return f"{key!r} is no key of a recipe but a thing to do: {verb}"
    known = keys()
    name = key.rpartition(".")[2]
    same_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    guess = (
        KEYS_OF_OTHER_TOOLS.get(key.lower().replace("-", "_"))
        or (same_name[0] if same_name else closest_match(key, known))
        or closest_match(name, known)
    )
    return f"no recipe has the key {key!r}.{f' Did you mean {guess!r}?' if guess else ''} `danlu explain` lists them"
