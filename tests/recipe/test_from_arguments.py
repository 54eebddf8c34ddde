"""Recipes that a verb makes of its own arguments."""

from __future__ import annotations

from typing import Any

import pytest

from danlu.core.errors import RecipeError
from danlu.recipe.from_arguments import recipe_from_arguments

VALUES: dict[str, Any] = {
    "stage": "sft",
    "model": "somewhere",
    "data": {"train": "rows.jsonl", "max_length": 64, "append_eos": False},
    "output": ".",
}
OPEN = ("data.max_length", "data.train_on", "data.system")


def composed(*overrides: str) -> Any:
    return recipe_from_arguments(VALUES, overrides, verb="danlu eval", open_keys=OPEN)


def test_values_short_forms_and_overrides() -> None:
    recipe = composed("data.max_length=8", "data.train_on=last", 'data.system="Be kind: always"')
    assert recipe.model.path == "somewhere" and [source.path for source in recipe.data.train] == ["rows.jsonl"]
    assert (recipe.data.max_length, recipe.data.train_on, recipe.data.append_eos) == (8, "last", False)
    assert recipe.data.system == "Be kind: always"
    assert composed().data.max_length == 64


def test_every_problem_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        composed("data.max_lenght=8", "data.train_on=first", "steps=3", "data.system")
    known = "It takes data.max_length, data.train_on, data.system"
    assert caught.value.problems == [
        f"override 'data.max_lenght=8': danlu eval takes no 'data.max_lenght'. Did you mean 'data.max_length'? {known}",
        f"override 'steps=3': danlu eval takes no 'steps'. {known}",
        "override 'data.system': write it as section.key=value, for example steps=100",
        "override 'data.train_on=first' data.train_on: expected one of all, assistant, last, not 'first'.",
    ]
