"""`danlu study`: one recipe with some of its values varied, run by run, as a table and pictures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.core.errors import DanluError, ResourceError
from danlu.core.terminal import echo, print_status, printable

if TYPE_CHECKING:
    from rich.live import Live

    from danlu.report.study_results import Study
    from danlu.study.plan import Plan, PlannedRun


def study(
    recipe: Annotated[Path, typer.Argument(help="The recipe; its `output` is the study's folder.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that replace the file's in every run: section.key=value.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE,VALUE", help="A key and its values. Repeatable: every combination is run."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="0,1,2", help="Run everything with each seed; the table has mean and standard deviation."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what each run says, not only its last line.")
    ] = False,
) -> None:
    """Train a recipe with several values of a key, and compare: a table, and plots, in the recipe's output folder.

    The same command goes on after an interruption. Other values of the same keys, other keys and seeds join the study.
    """
    # A tenth of a second, which `danlu study --help` need not take.
    from danlu.recipe.parameter_grid import parse_vary_options
    from danlu.report.study_results import read_study
    from danlu.study.plan import make_plan, notes
    from danlu.study.runner import run

    plan = make_plan(recipe, parse_vary_options(vary or [], seeds), overrides or [])
    noun = "runs" if len(plan.runs) > 1 else "run"
    print_status(f"{len(plan.runs)} {noun} in {plan.folder}")
    for note in notes(plan):
        print_status(note)
    with _console(plan, verbose) as console:
        outcome = run(plan, console)
    if outcome.stopped:
        where = f" in {outcome.stopped_in}" if outcome.stopped_in is not None else ""
        finished = f"{outcome.finished} of {outcome.total} are finished"
        print_status(f"stopped{where}; {finished}, and the same command goes on from there")
        assert outcome.signal is not None
        raise typer.Exit(128 + outcome.signal)
    results = read_study(plan.folder)
    if results.finished:
        _report(results, plan.folder)
    if outcome.failed:
        print_status(f"failed: {', '.join(outcome.failed)}; the same command tries again")
        raise typer.Exit(DanluError.exit_code)


def _report(results: Study, folder: Path) -> None:
    """Prints the table, and writes it, every number and the plots to the study's folder."""
    # matplotlib takes a second, for which nobody should wait before a mistake in the recipe is reported.
    from danlu.core.atomic_write import write_atomically
    from danlu.report import study_page
    from danlu.report.study_plots import draw
    from danlu.report.study_table import aligned, as_csv, markdown, remarks, table

    echo(aligned(table(results)), end="")
    for remark in remarks(results):
        echo(remark)
    sys.stdout.flush()
    try:
        pictures = draw(results, folder)
        drawn = [path.name for path in pictures if path.suffix == ".png"]
        write_atomically(folder / "study.csv", as_csv(results).encode())
        name = folder.resolve().name
        write_atomically(folder / "study.md", markdown(results, name, drawn).encode())
        write_atomically(folder / "study.html", study_page.page(results, name).encode())
    except OSError as error:
        raise ResourceError(
            f"{folder}: the table and the plots cannot be written: {error.strerror}. Free some space; the same command "
            "writes them again."
        ) from error
    print_status(f"written to {folder}: study.html, study.md, study.csv, {', '.join(path.name for path in pictures)}")


@contextmanager
def _console(plan: Plan, verbose: bool) -> Iterator[StudyConsole]:
    """A context that shows the progress of runs on stderr, at a terminal with a line that changes."""
    if verbose or not sys.stderr.isatty():
        yield StudyConsole(plan, verbose)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=sys.stderr), auto_refresh=False, transient=True) as live:
        yield StudyConsole(plan, verbose, live)


class StudyConsole:
    """Prints a line for each run; at a terminal also, below them, the last line that the run under way printed."""

    def __init__(self, plan: Plan, verbose: bool, live: Live | None = None) -> None:
        self._plan = plan
        self._verbose = verbose
        self._live = live
        self._current = ""
        self._last_failure = ""

    def run_skipped(self, run: PlannedRun) -> None:
        self._line(f"{self._name(run)}: finished before{_summary(run)}")

    def run_started(self, run: PlannedRun) -> None:
        self._current = self._name(run)
        if self._live is None:
            self._line(f"{self._current}: training")
        else:
            self._update_live_line("")

    def run_printed(self, text: str) -> None:
        if self._verbose:
            print_status(text, end="")
        else:
            self._update_live_line(text.rstrip().rpartition("\n")[2])

    def run_ended(self, run: PlannedRun, failure: str | None) -> None:
        self._update_live_line("")
        if failure is None:
            self._line(f"{self._name(run)}: finished{_summary(run)}", "green")
            return
        if failure == self._last_failure:
            self._line(f"{self._name(run)}: failed in the same way ({run.log})", "red")
            return
        self._last_failure = failure
        again = shlex.join(["danlu", "train", str(run.recipe_file)])
        indented = "".join(f"\n  {line}" for line in failure.splitlines())
        self._line(f"{self._name(run)}: failed{indented}\n  all that it said: {run.log}; alone: {again}", "red")

    def _name(self, run: PlannedRun) -> str:
        return f"[{self._plan.runs.index(run) + 1}/{len(self._plan.runs)}] {run.name}"

    def _line(self, text: str, colour: str = "") -> None:
        if self._live is None:
            print_status(text)
        else:
            self._live.console.print(printable(text), style=colour, markup=False, highlight=False, soft_wrap=True)

    def _update_live_line(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.update(
                Text(printable(f"{self._current}  {text}"), no_wrap=True, overflow="ellipsis"), refresh=True
            )


def _summary(run: PlannedRun) -> str:
    """The end of a finished run's line: `, evaluation loss 2.0312, 0:01:12`."""
    from danlu.report.study_results import read_summary
    from danlu.training.units import format_duration

    summary = read_summary(run.folder)
    loss = "" if summary.evaluation_last is None else f", evaluation loss {summary.evaluation_last:.4f}"
    return f"{loss}, {format_duration(summary.seconds)}"
