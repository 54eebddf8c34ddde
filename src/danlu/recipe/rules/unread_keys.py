"""Keys that nothing reads: the conditions that fields of sections have (`ReadWith`) do not hold."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from danlu.recipe.messages import format_value
from danlu.recipe.sections import ReadWith, Recipe, Section, value_at
from danlu.recipe.yaml_tree import Problem


def unread_keys(recipe: Recipe, section: Section | None = None, above: str = "") -> Iterator[Problem]:
    """Keys that are not read keep their defaults; inside a section that is not read nothing else is looked at.

    section: the recipe itself by default. above: its dotted key, with a full stop behind it.
    """
    section = recipe if section is None else section
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        conditions = _conditions(type(section), name)
        if conditions and value != field.get_default():
            problem = next(filter(None, (_problem(recipe, section, above, name, each) for each in conditions)), None)
            if problem is not None:
                yield problem
                continue
        entries = {f"{name}.{index}": entry for index, entry in enumerate(value)} if isinstance(value, list) else {}
        for key, entry in (entries or {name: value}).items():
            if isinstance(entry, Section):
                yield from unread_keys(recipe, entry, f"{above}{key}.")


@cache
def _conditions(section: type[Section], name: str) -> tuple[ReadWith, ...]:
    """The conditions of a field; a variant that only gives it another default has those of its base class."""
    fields = (base.model_fields.get(name) for base in section.__mro__ if issubclass(base, Section))
    of_classes = (tuple(each for each in field.metadata if isinstance(each, ReadWith)) for field in fields if field)
    return next(filter(None, of_classes), ())


def _problem(recipe: Recipe, section: Section, above: str, name: str, condition: ReadWith) -> Problem | None:
    """The problem of a key that has another value than its default and is not read; None where it is read."""
    is_sibling = condition.key.partition(".")[0] in type(section).model_fields
    value = value_at(section if is_sibling else recipe, condition.key)
    if condition.is_met(value) or (condition.or_with and value_at(recipe, condition.or_with)):
        return None
    choices = " or ".join(each if isinstance(each, str) else format_value(each) for each in condition.choices)
    message = condition.message.format(key=condition.key, value=value, values=choices)
    with_hint, hint = condition.hint
    if with_hint and value_at(recipe, with_hint) is not None:
        message += hint
    return Problem(f"{above}{name}", message, reads=(f"{above}{condition.key}" if is_sibling else condition.key,))
