"""`danlu train`: a recipe becomes a run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from danlu import recipe as recipes
from danlu.adapters.description import is_adapter


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file (`danlu recipes copy sft` writes one).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace the file's: section.key=value.")
    ] = None,
    resume: Annotated[
        str, typer.Option(help="auto: go on where the output folder's run stopped; never; or a checkpoint folder.")
    ] = "auto",
) -> None:
    """Train a recipe. The output folder holds everything; the same command goes on after an interruption."""
    loaded = recipes.load(recipe, overrides or [])
    # Here, not above: a wrong recipe is told in a fraction of the second that torch takes to import.
    from danlu import run

    outcome = run.train(loaded, resume=resume, say=_say)
    if outcome.exit_code:
        _say(outcome.stopped)
        raise typer.Exit(outcome.exit_code)
    already = "was finished already, " if outcome.already else "finished "
    _say(f"{already}after step {outcome.steps}: {outcome.folder}")
    for folder in outcome.exported:
        _say(f"  {'adapter' if is_adapter(folder) else 'model'} in {folder}: {what_to_try(folder)}")


def what_to_try(folder: Path) -> str:
    """What can be done with a result, a model or an adapter."""
    if is_adapter(folder):
        return f"try `danlu chat {folder}` or `danlu merge {folder} MODEL_FOLDER`"
    return f"try `danlu generate {folder} --prompt ...` or `danlu chat {folder}`"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
