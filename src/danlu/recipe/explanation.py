"""Explaining a key of the recipe: its meaning, the values that it takes, and the origin of its value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from danlu.core.errors import RecipeError
from danlu.core.spelling import closest_match
from danlu.recipe import other_tools
from danlu.recipe.chain import CHAIN_KEYS, STAGES
from danlu.recipe.loading import LoadedSection
from danlu.recipe.messages import describe_type, first_sentence
from danlu.recipe.other_stages import other_stages
from danlu.recipe.sections import Optimizer, Section, value_at
from danlu.recipe.stage_defaults import STAGE_DEFAULTS, STAGE_KEYS, stage_values
from danlu.recipe.type_hints import (
    RecipeField,
    fields_at,
    fields_of,
    literal_values,
    present_name,
    subsection_types,
    variants_of,
    walk_fields,
)
from danlu.registry import suggested_verb

_NOT_KNOWN = "no recipe has the key"


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


def explain(key: str, loaded: LoadedSection | None = None) -> Explanation:
    """Explains a dotted key such as `data.max_length`, `optimizer` or `data.train.0.path`; also one that only recipes
    of a stage that does not train have (`danlu quantize`). loaded: a recipe, with the value and its origin to be shown.

    Raises RecipeError for a key that no recipe has, with the nearest that one has.
    """
    key = present_name(key)
    if key in CHAIN_KEYS:
        return _of_chain(key)
    plain = ".".join(part for part in key.split(".") if not part.isdecimal())
    own = next((each for each in other_stages() if loaded is not None and isinstance(loaded.recipe, each.root)), None)
    fields, other = [] if own is not None else fields_at(plain), None
    if not fields and (own is not None or "." in plain or _unknown(key).startswith(_NOT_KNOWN)):
        for other in other_stages() if own is None else (own,):
            if fields := fields_at(plain, root=other.root):
                break
    if not fields:
        raise RecipeError(_unknown(key))
    hint, variants = fields[0].hint, variants_of(fields[0].hint)
    classes = subsection_types(hint)
    literals = dict.fromkeys(str(value) for field in fields for value in literal_values(field.hint))
    allowed = tuple(literals) or tuple(sorted(variants))
    value = origin = None
    if loaded is not None:
        value, origin = _as_yaml(value_at(loaded.recipe, key)), loaded.origin(key)
    defaults = {
        field.variant: "required" if field.info.is_required() else _as_yaml(field.info.default) for field in fields
    }
    return Explanation(
        key=key,
        takes=describe_type(hint) if len(fields) == 1 or not literal_values(hint) else f"one of {', '.join(allowed)}",
        defaults=_by_stage(key) if key in STAGE_KEYS and other is None else defaults,
        allowed=allowed,
        about=_about(fields) + (f" (Of `{other.verb}`, stage: {other.stage}.)" if other else ""),
        short=classes[0].short if classes else None,
        children=tuple((field.name, first_sentence(field.about)) for field in fields_of(hint))
        if len(classes) == 1
        else tuple((kind, (variant.__doc__ or "").partition("\n")[0]) for kind, variant in sorted(variants.items())),
        value=value,
        origin=origin,
    )


def _about(fields: Sequence[RecipeField]) -> str:
    """The documentation of a key; that of each variant where they say different things."""
    if len({field.about for field in fields}) == 1 or not all(field.variant for field in fields):
        return fields[0].about
    return " ".join(f"{field.variant}: {field.about}" for field in fields)


def _of_chain(key: str) -> Explanation:
    """A key that a chain has and no recipe."""
    takes = "a list of recipes, each with a name" if key == STAGES else "a text"
    below = [name for name in CHAIN_KEYS if name.startswith(f"{key}.")]
    children = tuple((name.removeprefix(f"{key}."), first_sentence(CHAIN_KEYS[name])) for name in below)
    default = "required" if key == STAGES else "null"
    return Explanation(key, takes, {"": default}, (), CHAIN_KEYS[key], None, children, value=None, origin=None)


@cache
def keys() -> tuple[str, ...]:
    """Every dotted key a recipe can have, entries of lists without their index."""
    return tuple(dict.fromkeys(field.key for field in walk_fields()))


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


def _as_value(word: str) -> str | None:
    """Names the keys that take a word as their value, and the other keys of the section that it chooses."""
    if not (variants := _sections_by_value().get(word)):
        return None
    variants = dict(sorted(variants.items(), key=lambda item: item[0].count(".")))  # the recipe's own keys first
    key, variant = next(iter(variants.items()))
    inner = [field.name for field in fields_of(variant) if field.name != "kind"] if variant is not None else []
    more = f" It has {', '.join(inner)}: `danlu explain {key}.{inner[0]}`" if inner else f" `danlu explain {key}`"
    return f"is a value of {' and of '.join(variants)}: set {key} to {word}.{more}"


@cache
def _sections_by_value() -> dict[str, dict[str, type[Section] | None]]:
    """The keys that take a word as their value, by word; with the section that it chooses, None for no `kind`."""
    sections: dict[str, dict[str, type[Section] | None]] = {}
    for field in (field for key in keys() for field in fields_at(key)):
        variants = variants_of(field.hint)
        for word in (*variants, *literal_values(field.hint)):
            if isinstance(word, str):
                sections.setdefault(word, {}).setdefault(field.key.removesuffix(".kind"), variants.get(word))
    return sections


def _unknown(key: str) -> str:
    """The message for a key that no recipe has: a value, a verb of danlu, a key of another tool, or a misspelling."""
    if (value := _as_value(key.lower())) is not None:
        return f"{key!r} {value}"
    if (verb := suggested_verb(key)) is not None:
        return f"{key!r} is no key of a recipe but a thing to do: {verb}"
    of_others = (field.key for other in other_stages() for field in walk_fields(other.root))
    known = list(dict.fromkeys((*keys(), *of_others)))
    name = key.rpartition(".")[2]
    if (advice := other_tools.advice(key)) is not None:
        return f"{key!r} is a key of another tool: {advice}"
    same_name = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    guess = min(same_name, key=lambda each: each.count("."), default=closest_match(key, known))
    guess = guess or closest_match(name, known)
    return f"{_NOT_KNOWN} {key!r}.{f' Did you mean {guess!r}?' if guess else ''} `danlu explain` lists them"
