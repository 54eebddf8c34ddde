"""`danlu synthesize`: a data set made by a model, from seed tasks or documents."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from danlu.core.terminal import print_status, print_status_early


def synthesize(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file with `stage: synthesize`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace the recipe's.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Read all files, look for the models, count the requests; ask and write nothing."
        ),
    ] = False,
) -> None:
    """Make a data set by a model: tasks, answers, marks and pairs, as the steps of a recipe say.

    The folder that it writes is `data.train` of a recipe as it is, with an account of every row. Each request is asked
    once: the same command goes on where a run was stopped, by a kill or by the end of its budget.
    """
    from danlu.recipe.synthesize_recipe import load_synthesize_recipe

    loaded, places = load_synthesize_recipe(recipe, overrides or [])
    print_status_early("reading seeds, looking for models")
    from danlu.production.synthesis.stage import expected_requests, prepare
    from danlu.production.synthesis.stage import synthesize as run
    from danlu.training.progress import RowProgress

    with places.naming_places():
        prepared = prepare(loaded)
    expected = expected_requests(prepared)
    if dry_run:
        for step, requests in expected:
            print_status(f"{step}: {f'{requests:,} requests at most' if requests else 'asks nothing'}")
        print_status(f"{sum(count for _, count in expected):,} requests in all; nothing was asked or written")
        return
    with closing(RowProgress(sys.stderr, doing="asking", units="answers")) as progress:
        result = run(prepared, progress)
    for note in result.notes:
        print_status(note)
    cost = f", {result.spent.cost:,.4g} of money" if result.spent.cost else ""
    print_status(
        f"{result.rows:,} rows by {result.spent.answers:,} answers ({result.asked:,} of them asked for now), "
        f"{result.spent.tokens:,} tokens{cost}\n"
        f"data set in {result.folder}: train on it with data.train: {result.folder}"
    )
