"""A resolved recipe says everything, and loads again to the same recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from danlu.recipe import Recipe, load, resolved_yaml
from danlu.recipe.short_forms import expand
from danlu.recipe.validation import validate
from danlu.recipe.yaml_reader import parse
from tests.recipe.strategies import RECIPES

Write = Callable[..., str]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipe=RECIPES)
def test_loads_again_to_an_equal_recipe(recipe: Recipe) -> None:
    assert_loads_again(recipe)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(recipe=RECIPES)
def test_many_load_again_to_equal_recipes(recipe: Recipe) -> None:
    assert_loads_again(recipe)


def assert_loads_again(recipe: Recipe) -> None:
    text = resolved_yaml(recipe)
    tree = parse(text, "recipe.yaml", problems := [])
    assert tree is not None
    again, found = validate(expand(tree, Recipe))
    assert (problems, found) == ([], [])
    assert again == recipe
    assert resolved_yaml(again) == text  # type: ignore[arg-type]


def test_every_key_is_written(write: Write) -> None:
    path = write("stage: sft\nmodel: base\ndata: rows.json\noutput: runs/$${x}\nseed: 3\n")
    recipe = load(path).recipe
    text = resolved_yaml(recipe)
    Path("resolved.yaml").write_text(text, encoding="utf-8")
    assert load("resolved.yaml").recipe == recipe
    assert load("resolved.yaml", ["seed=4"]).recipe != recipe
    assert text.splitlines()[:3] == ["stage: sft", "model:", "  path: base"]
    for key in Recipe.model_fields:
        assert f"\n{key}:" in f"\n{text}"
    assert "learning_rate: 2.0e-05" in text
    assert "output: runs/$${x}" in text
