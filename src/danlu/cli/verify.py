"""`danlu verify`: checks that a recipe's layout computes the same as one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu import recipe as recipes
from danlu.core.errors import DanluError, RecipeError
from danlu.core.terminal import echo, print_status, print_status_early, printable

if TYPE_CHECKING:
    from danlu.parallel.collective_traffic import Row
    from danlu.report.verification import Verification


def verify(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace the file's: section.key=value.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes; by default the fewest that the layout needs.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="The recipe's own sizes and weights instead of small ones.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    precision: Annotated[
        str, typer.Option(metavar="fp32|recipe", help="fp32 tells mistakes from rounding; recipe: as it is trained.")
    ] = "fp32",
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a page; only an earlier one is overwritten.")
    ] = None,
    traffic: Annotated[
        bool, typer.Option("--traffic", help="Also count what a process sends, next to formulas.")
    ] = False,
    pretend: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Only --traffic, as one of a simulated world of this size.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which processes that wait have failed.")] = 300,
    inject: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Make a mistake on purpose, to see it found (docs/verify.md)."),
    ] = None,
) -> None:
    """Prove that a recipe's layout computes what one process does: loss, gradients, norms, weights, checkpoints.

    The model is shrunk, the layout runs on local processes. Exit code 1 where anything differs.
    """
    loaded = recipes.load(recipe, overrides or [])
    if precision not in ("fp32", "recipe"):
        raise RecipeError(
            f"--precision {precision}: use fp32, or recipe for the recipe's own ({loaded.recipe.precision_name})"
        )
    print_status_early(f"verifying {recipe}")
    # Here, not above: a wrong recipe is refused in a fraction of the second that torch takes to import.
    from danlu.report.verification_page import PAGE, page
    from danlu.verification import verification

    if html is not None:
        PAGE.check_target(html)
    for note in loaded.notes:
        print_status(note)
    options = verification.Options(
        processes=processes,
        full=full,
        steps=steps,
        precision="fp32" if precision == "fp32" else "recipe",
        traffic=traffic,
        fault=inject,
        timeout_s=timeout,
    )
    if pretend is not None:
        with loaded.naming_places():
            layout, rows = verification.predict_traffic(loaded.recipe, pretend, options)
        world = f"a simulated world size of {pretend} ({layout})"
        _show(f"one process of {world} sends in a step with two micro-batches:", rows)
        return
    with loaded.naming_places():
        result, rows = verification.verify(recipe.name, loaded.recipe, options)
    _print(result)
    if traffic:
        _show("one process sends in a step:", rows)
    if html is not None:
        PAGE.write(html, page(result, rows))
        print_status(f"written to {html}")
    if not result.holds:
        raise typer.Exit(DanluError.exit_code)


def _print(result: Verification) -> None:
    """Tables in colour at a terminal, plain elsewhere."""
    from rich.console import Console
    from rich.text import Text

    from danlu.report import verification as report

    if not sys.stdout.isatty():
        echo("\n".join(report.lines(result)))
        return
    console = Console(highlight=False)
    for part in report.parts(result):
        console.print(Text(printable(part)) if isinstance(part, str) else part)
    for line in report.verdict(result):
        console.print(Text(printable(line), style="green" if result.holds else "bold red"))


def _show(heading: str, rows: Sequence[Row]) -> None:
    from rich.console import Console

    from danlu.report import verification as report

    echo(f"\n{heading}")
    if sys.stdout.isatty():
        Console(highlight=False).print(report.traffic_table(rows))
    else:
        echo("\n".join(report.rendered(report.traffic_table(rows), width=160)))
