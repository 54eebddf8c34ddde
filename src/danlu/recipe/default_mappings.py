"""Keys that a mapping leaves out, where the field's own default is a mapping of other values than its class has.

`objective: {kind: ppo, kl: 0.02}` gives `kl` a coefficient: that the KL is in the reward remains ppo's default.
"""

from __future__ import annotations

from typing import Any

from danlu.recipe.sections import Section
from danlu.recipe.type_hints import Hint, entry_type, field_types, section_types, variants_of


def with_default_mappings(value: Any, hint: Hint, default: Any = None) -> Any:
    """A plain value in full form, in which each mapping has the keys that its field's default gives and it leaves out.

    Keys that exclude each other stay out (`Section.one_of`): the recipe's rules ask for one of them. A mapping of
    another `kind` than the default's has none of its keys.

    Args:
        hint: the type of the field that the value is of.
        default: the field's own default.
    """
    if isinstance(value, list):
        item_type = entry_type(hint)
        return value if item_type is None else [with_default_mappings(entry, item_type) for entry in value]
    section = _section_of(value, hint)
    if section is None:
        return value
    filled = dict(value)
    if isinstance(default, section):
        names = default.model_fields_set - {*section.one_of}
        given = default.model_dump(mode="json", include=names) if names else {}  # a dump builds the section's validator
        filled |= {name: own for name, own in given.items() if name not in value}
    hints = field_types(section)
    return {
        name: with_default_mappings(each, hints[name], section.model_fields[name].default) if name in hints else each
        for name, each in filled.items()
    }


def _section_of(value: Any, hint: Hint) -> type[Section] | None:
    """The section class of a mapping; None for any other value, and for an unknown `kind`."""
    classes = section_types(hint)
    if not isinstance(value, dict) or not classes:
        return None
    kind = value.get("kind")
    if len(classes) > 1 and not isinstance(kind, str):
        return None
    return classes[0] if len(classes) == 1 else variants_of(hint).get(str(kind))
