"""`danlu data`: data sets before training: cleaned by a recipe or by one step, explained, and shown on a page."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danlu.core.errors import Stopped
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
Files = Annotated[list[str], typer.Argument(metavar="FILES", help="Files, folders or hub data sets of rows.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="The folder of the data set to write, empty or new.")]


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
    try:
        result = curate(settings, log=print_status)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        message = f"stopped at once; what is done is kept in {settings.folder}, and the same command goes on from there"
        raise Stopped(number, message) from None
    _print_outcome(result)


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


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A data set that danlu has written.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; by default report.html in the folder.")
    ] = None,
) -> None:
    """Write a page about a data set: counts and examples by reason, sources, what was measured with its bounds."""
    from danlu.production.set_page import PAGE, page, report_lines
    from danlu.production.set_report import report_of_set

    target = out or folder / "report.html"
    PAGE.check_target(target)
    content = report_of_set(folder)
    for text in report_lines(content):
        echo(text)
    PAGE.write(target, page(content))
    print_status(f"written to {target}")


@app.command()
def stats(
    files: Files,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array on stdout, for scripts.")] = False,
) -> None:
    """Count rows by form, length, messages and repeats, before anything is done with them."""
    from danlu.production.set_statistics import statistics_lines, statistics_of
    from danlu.recipe.sections import Source

    results = statistics_of([Source(path=file) for file in files])
    if as_json:
        echo(json.dumps([each.as_json() for each in results], indent=2, ensure_ascii=False))
        return
    for each in results:
        for text in statistics_lines(each):
            echo(text)


@app.command()
def language(
    files: Files,
    out: Out,
    keep: Annotated[str, typer.Option(help="Codes of languages, such as en,zh.")],
    at_least: Annotated[float | None, typer.Option(help="Smallest probability of the language; 0.65.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Keep rows in some languages."""
    _step("language", files, out, overwrite, {"keep": _split(keep), "at_least": at_least})


@app.command()
def quality(
    files: Files,
    out: Out,
    rules: Annotated[str, typer.Option(help="Of c4, gopher, gopher-repetition, fineweb.")] = (
        "c4,gopher,gopher-repetition,fineweb"
    ),
    overwrite: Overwrite = False,
) -> None:
    """Drop rows by rules of quality. A recipe sets their thresholds."""
    _step("quality", files, out, overwrite, {"rules": _split(rules)})


@app.command()
def dedup(
    files: Files,
    out: Out,
    by: Annotated[str, typer.Option(help="Of exact, paragraph, minhash.")] = "exact,minhash",
    at_least: Annotated[
        float | None, typer.Option(help="minhash: the Jaccard index from which rows are duplicates; 0.75.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Remove duplicates: of each the first by file and row stays."""
    _step("deduplicate", files, out, overwrite, {"by": _split(by), "at_least": at_least})


@app.command()
def personal(
    files: Files,
    out: Out,
    action: Annotated[str, typer.Option(help="mask, or drop.")] = "mask",
    kinds: Annotated[str | None, typer.Option(help="Of email, key, ip, card, id, phone; all by default.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Mask personal data, or drop rows that have any."""
    settings = {"action": action, "kinds": None if kinds is None else _split(kinds)}
    _step("personal", files, out, overwrite, settings)


@app.command()
def decontaminate(
    files: Files,
    out: Out,
    against: Annotated[list[str], typer.Option(metavar="FILE", help="A benchmark; may be given several times.")],
    run: Annotated[int | None, typer.Option(help="The length of the runs of words; 13.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Drop rows that hold parts of a benchmark."""
    _step("decontaminate", files, out, overwrite, {"against": list(against), "words": run})


def _split(text: str) -> list[str]:
    """The entries of a list with commas."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _step(kind: str, files: Sequence[str], out: Path, overwrite: bool, settings: Mapping[str, Any]) -> None:
    """Curates files by one step, as a recipe with it alone does. settings: those that are None are not given."""
    from danlu.recipe.curate_recipe import curate_recipe_of

    step = {"kind": kind, **{name: value for name, value in settings.items() if value is not None}}
    values = {"data": list(files), "steps": [step], "output": str(out)}
    verb = "dedup" if kind == "deduplicate" else kind
    _curate(curate_recipe_of(values, f"danlu data {verb}:"), overwrite)
