"""Every line of the registry stands for something, and the help page shows every verb."""

from __future__ import annotations

import inspect

import pytest
import typer

from danlu.cli.main import HEADINGS, command
from danlu.registry import VERBS, resolve


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
