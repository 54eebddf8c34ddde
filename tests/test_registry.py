"""Every line of the registry stands for something, and the help page shows every verb."""

from __future__ import annotations

import inspect
import re

import pytest
import typer

from danlu.cli.main import HEADINGS, command
from danlu.recipe.library import shipped
from danlu.recipe.stage_names import OBJECTIVE_NAMES
from danlu.registry import STAGE_WORDS, SUGGESTIONS, VERBS, resolve
from danlu.stages.table import STAGES


@pytest.mark.parametrize("name", VERBS)
def test_every_line_resolves(name: str) -> None:
    verb = VERBS[name]
    found = resolve(verb.target)
    assert isinstance(found, typer.Typer) or inspect.isfunction(found)
    assert callable(command(name, verb.target).make_context)
    assert verb.heading in HEADINGS


def test_the_table_is_sorted() -> None:
    assert list(VERBS) == sorted(VERBS)


def test_a_line_that_stands_for_nothing_is_noticed() -> None:
    with pytest.raises(AttributeError):
        resolve("danlu.core.errors:NoSuchName")
    with pytest.raises(ModuleNotFoundError):
        resolve("danlu.no_such_room:Name")


def test_every_stage_is_a_word_that_leads_to_itself() -> None:
    """People type `danlu dpo`: each stage and each of its short names is suggested, with a recipe that is shipped."""
    stages = {*STAGES, *OBJECTIVE_NAMES}
    assert {stage: STAGE_WORDS.get(stage, ("",))[0] for stage in stages} == {stage: stage for stage in stages}
    assert {stage for stage, _ in STAGE_WORDS.values()} <= stages
    assert {recipe for _, recipe in STAGE_WORDS.values()} <= set(shipped())
    assert SUGGESTIONS["grpo"] == "`danlu recipes copy grpo`, then `danlu train`; stage: grpo in a recipe"
    assert set(SUGGESTIONS) & set(VERBS) == set()


def test_every_verb_that_is_suggested_is_one() -> None:
    suggested = {word for text in SUGGESTIONS.values() for word in re.findall(r"`danlu ([a-z]+)", text)}
    assert {"train", "serve", "merge"} <= suggested
    assert suggested <= set(VERBS)
