"""`danlu data`: data sets before training: cleaned by a recipe or by one step, explained, and shown on a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.core.terminal import echo, print_status

if TYPE_CHECKING:
    from danlu.production.curate import Curated
    from danlu.recipe.sections.curating import CurateRecipe

app = typer.Typer(
    help="Data sets before training: clean rows, and the account of every one.",
    no_args_is_help=True,
    add_completion=False,
)
_SHOWN_DECISIONS = 20

Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a data set that was made of other rows or by other settings.")
]


@app.command()
def clean(
    recipe: Annotated[Path, typer.Argument(help="A recipe with stage: curate, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace the file's: steps.0.at_least=0.8.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Clean rows as a recipe says: repair, languages, quality, duplicates, personal data, benchmarks.

    The output is `data.train` of a recipe as it is, with a ledger of every row. The same command goes on after an
    interruption; with other thresholds and --overwrite nothing is measured again.
    """
    from danlu.recipe.curate_recipe import load_curate_recipe

    _curate(load_curate_recipe(recipe, overrides or []), overwrite)


def _curate(recipe: CurateRecipe, overwrite: bool) -> None:
    """Curates rows by a recipe, and prints what came of it."""
    # Here, not above: a wrong recipe is refused without numpy.
    from danlu.production.curate import CurateSettings, curate
    from danlu.production.recipe_steps import steps_of

    settings = CurateSettings(
        sources=recipe.data,
        steps=steps_of(recipe.steps),
        folder=Path(recipe.output).expanduser(),
        recipe=recipe.model_dump(mode="json", exclude_unset=True, exclude={"output", "workers", "keep_marks"}),
        workers=None if recipe.workers == "auto" else recipe.workers,
        skip_bad=recipe.on_bad_row == "skip",
        keep_marks=recipe.keep_marks,
        overwrite=overwrite,
    )
    _print_outcome(curate(settings, log=print_status))


def _print_outcome(result: Curated) -> None:
    if result.was_there:
        print_status(f"{result.folder} has this data set already: the same rows by the same steps")
    for step, outcome, reason, count in sorted(result.decisions, key=lambda each: -each[3])[:_SHOWN_DECISIONS]:
        print_status(f"  {count:>9,} {'dropped' if outcome == 'drop' else 'changed'} by {step}: {reason}")
    print_status(
        f"{result.remaining:,} of {sum(result.outcomes.values()):,} rows in {result.folder} "
        f"({result.outcomes['changed']:,} changed): `data: {result.folder}` in a recipe trains on them\n"
        f"try `danlu data report {result.folder}`"
    )


@app.command()
def explain(
    row: Annotated[str, typer.Argument(metavar="ID", help="An id of the ledger, its beginning, or crawl.jsonl:17.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A data set that danlu has written.")],
) -> None:
    """Show what became of a row, by which steps and why."""
    from danlu.production.explain_row import explain_row, find_rows

    for line in find_rows(folder, row):
        for text in explain_row(line):
            echo(text)
