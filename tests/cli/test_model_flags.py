"""Flags that verbs share: one dataclass of them is one parameter of a verb, and an option for each field."""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from danlu.cli import main
from danlu.cli.model_flags import EngineFlags, ModelFlags, SamplingFlags, takes_flag_groups
from danlu.registry import VERBS

SRC = Path(__file__).resolve().parents[2] / "src" / "danlu"
GROUPS: dict[str, tuple[Any, ...]] = {
    "generate": (SamplingFlags, EngineFlags, ModelFlags),
    "chat": (SamplingFlags, ModelFlags, EngineFlags),
    "eval": (EngineFlags, ModelFlags),
    "serve": (ModelFlags,),
}


@pytest.mark.parametrize("verb", GROUPS)
def test_each_verb_has_the_options_of_its_groups_in_a_row(verb: str) -> None:
    options = {each.name: each.default for each in main.command(verb, VERBS[verb].target).params}
    names = list(options)
    for group in GROUPS[verb]:
        of_group = [field.name for field in fields(group)]
        start = names.index(of_group[0])
        assert names[start : start + len(of_group)] == of_group
        assert {name: options[name] for name in of_group} == {field.name: field.default for field in fields(group)}


@dataclass(frozen=True)
class Pair:
    left: Annotated[int, typer.Option(help="One.")] = 1
    right: Annotated[int, typer.Option(help="The other.")] = 2


def test_a_group_is_given_whole(capsys: pytest.CaptureFixture[str]) -> None:
    @takes_flag_groups
    def add(first: Annotated[int, typer.Argument()], *, pair: Pair, times: int = 1) -> None:
        print(first, pair, times)

    app = typer.Typer(add_completion=False)
    app.command()(add)
    app(["7", "--right", "5"], standalone_mode=False)
    assert capsys.readouterr().out == f"7 {Pair(1, 5)} 1\n"
    with pytest.raises(Exception, match="No such option: --pair"):
        app(["7", "--pair", "5"], standalone_mode=False)


def test_verbs_are_thin() -> None:
    """No function of `cli/` has more than 90 lines."""
    long = [
        f"{file.name}:{node.name}"
        for file in (SRC / "cli").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 90
    ]
    assert long == []
