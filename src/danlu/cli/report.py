"""`danlu report`: a run as a page with its curves and samples, and in short on the terminal. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from danlu.core.errors import CheckpointError, RecipeError
from danlu.core.terminal import echo, print_status, printable
from danlu.report.plan_comparison import comparison_rows
from danlu.report.run_page import PAGE, page
from danlu.report.run_report import RunReport, as_json, report_of, table
from danlu.report.study_table import aligned
from danlu.training.runs import is_run, read_run, runs_of_chain

FILE = "report.html"


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run, which may be training still, or of a chain.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page; by default report.html in the run's folder."),
    ] = None,
    as_json_: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout, for scripts; a page only with --out.")
    ] = False,
) -> None:
    """Report on a run of any stage: curves, evaluations, the best and worst samples of reinforcement learning."""
    stages = [] if is_run(run) else runs_of_chain(run)
    if not is_run(run) and not stages:
        raise CheckpointError(
            f"{run}: no run is in this folder: it has no recipe.yaml or no environment.json. `danlu runs list` shows "
            "the runs that there are"
        )
    if stages and out is not None:
        names = ", ".join(str(info.folder) for info in stages)
        raise RecipeError(f"--out: a chain has a page for each of its stages. Name one of them: {names}")
    folders = [info.folder for info in stages] or [run]
    targets = [None if as_json_ and out is None else out or folder / FILE for folder in folders]
    for target in targets:
        if target is not None:
            PAGE.check_target(target)
    contents = [report_of(folder, read_run(folder).state) for folder in folders]
    if as_json_:
        reports = [as_json(content) for content in contents]
        echo(json.dumps(reports if stages else reports[0], indent=2, ensure_ascii=False))
    for content, target in zip(contents, targets, strict=True):
        if stages and not as_json_:
            echo(f"stage {printable(content.record.folder.name)}")
        if not as_json_:
            _print(content)
        if target is not None:
            PAGE.write(target, page(content))
            print_status(f"written to {target}")


def _print(content: RunReport) -> None:
    record, samples = content.record, content.samples
    stage = "" if record.recipe is None else f"stage {record.recipe.stage}, "
    echo(f"{printable(str(record.folder))}: {stage}{content.state}, step {record.last_step:,}")
    rows = table(content)
    if len(rows) > 1:
        echo(printable(aligned(rows)), end="")
    else:
        echo("no step has been logged yet")
    if content.comparison is not None:
        echo("expected when it began, and measured")
        echo(aligned(comparison_rows(content.comparison)), end="")
    if samples.prompts:
        failed = samples.failures.total()
        echo(f"{samples.prompts:,} prompts, {samples.answers:,} answers; {failed:,} rewards were not given")
    for reason, count in content.reasons[:3]:
        echo(f"  {count:,} x {printable(reason)}")
    for note in content.notes:
        print_status(f"note: {note}")
