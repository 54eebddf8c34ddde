"""`danlu recipes`: the recipes that come with danlu, and the schema for editors."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from danlu.core import shipped_files
from danlu.core.terminal import echo, wrap_to_terminal
from danlu.recipe import library
from danlu.recipe.json_schema import schema

app = typer.Typer(help="Recipes that come with danlu.", no_args_is_help=True, add_completion=False)


@app.command("list")
def list_recipes() -> None:
    """Names of the recipes and what each is for."""
    _list(library.shipped())


def _list(described: Mapping[str, str]) -> None:
    """Prints names and what each is for."""
    width = max(map(len, described))
    for name, about in described.items():
        line = wrap_to_terminal(f"{name:{width}}  {about}", sys.stdout)
        echo(line.replace("\n  ", f"\n{'':{width}}  "))


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="A name from `danlu recipes list`.")],
    to: Annotated[Path, typer.Argument(help="A file, or a folder to put it in.")] = Path("."),
) -> None:
    """Copy a recipe here, to edit."""
    target = library.copy(name, to)
    echo(f"{target}: edit it, then danlu preview {target} and danlu train {target}")


@app.command()
def templates(
    name: Annotated[str | None, typer.Argument(help="A template to copy, to edit; without it all are listed.")] = None,
    to: Annotated[Path, typer.Argument(help="A file, or a folder to put it in.")] = Path("."),
) -> None:
    """Chat templates for `model.chat_template`, by name; with NAME, copy one here."""
    if name is None:
        _list(shipped_files.templates())
        return
    target = library.copy_template(name, to)
    echo(f"{target}: edit it, then name it in the recipe: model.chat_template: {target}")


@app.command("schema")
def print_schema() -> None:
    """JSON schema of a recipe, for completion and checks in an editor."""
    echo(json.dumps(schema(), indent=2))
