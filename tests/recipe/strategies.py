"""Recipes at random, made from the section classes themselves, so that a new section needs nothing here."""

from __future__ import annotations

from typing import Any, Literal, get_args

import annotated_types
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from danlu.recipe.sections import Recipe, Section
from danlu.recipe.type_hints import field_types, generic_origin, union_members

TEXTS = st.text(max_size=12) | st.sampled_from(
    ["${HOME}", "$${x}", "2e-4", "no", "null", "~", "1:30", "a: b", " x ", "#", "\x85", "a\u2028\n"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(TEXTS, inside, max_size=3),
    max_leaves=6,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    return st.one_of([_branch(branch, bounds) for branch, bounds in union_members(hint)])


def _branch(branch: Any, bounds: tuple[FieldInfo, ...]) -> st.SearchStrategy[Any]:
    form = generic_origin(branch)
    if branch is type(None):
        return st.none()
    if form is Literal:
        return st.sampled_from(get_args(branch))
    if form is list:
        return st.lists(values(get_args(branch)[0]), max_size=3)
    if form is tuple:
        return st.tuples(*(values(arg) for arg in get_args(branch)))
    if form is dict:
        inside = get_args(branch)[1]
        return st.dictionaries(TEXTS, JSON if inside is Any else values(inside), max_size=3)
    if branch is bool:
        return st.booleans()
    if branch is str:
        return TEXTS
    if isinstance(branch, type) and issubclass(branch, Section):
        return section_types(branch)
    return _numbers(branch, {type(limit): limit for bound in bounds for limit in bound.metadata})


def _numbers(kind: type, limits: dict[type, Any]) -> st.SearchStrategy[Any]:
    low, high = limits.get(annotated_types.Ge), limits.get(annotated_types.Le)
    above, below = limits.get(annotated_types.Gt), limits.get(annotated_types.Lt)
    if kind is int:
        least = low.ge if low else above.gt + 1 if above else None
        return st.integers(min_value=least, max_value=below.lt - 1 if below else high.le if high else None)
    return st.floats(
        min_value=low.ge if low else above.gt if above else None,
        max_value=high.le if high else below.lt if below else None,
        exclude_min=above is not None,
        exclude_max=below is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def section_types(section: type[Section]) -> st.SearchStrategy[Any]:
    return st.builds(section, **{name: values(hint) for name, hint in field_types(section).items()})


RECIPES = section_types(Recipe)
