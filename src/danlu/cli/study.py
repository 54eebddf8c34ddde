"""`danlu study`: one recipe with some of its values varied, run by run, as a table and pictures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.errors import DanluError, ResourceError
from danlu.terminal import echo, print_status, printable

if TYPE_CHECKING:
    from rich.live import Live

    from danlu.report.study_results import Study
    from danlu.study import Outcome, Plan, PlannedRun


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
    from danlu import study as studies
    from danlu.recipe.parameter_grid import parse_vary_options
    from danlu.report.study_results import read_study

    plan = studies.plan(recipe, parse_vary_options(vary or [], seeds), overrides or [])
    several = "runs" if len(plan.runs) > 1 else "run"
    print_status(f"{len(plan.runs)} {several} in {plan.folder}")
    for note in studies.notes(plan):
        print_status(note)
    with _screen(plan, verbose) as screen:
        outcome = studies.run(plan, screen)
    if outcome.stopped:
        _say_how_to_go_on(outcome)
        assert outcome.signal is not None
        raise typer.Exit(128 + outcome.signal)
    found = read_study(plan.folder)
    if found.finished:
        _report(found, plan.folder)
    if outcome.failed:
        print_status(f"failed: {', '.join(outcome.failed)}; the same command tries again")
        raise typer.Exit(DanluError.exit_code)


def _say_how_to_go_on(outcome: Outcome) -> None:
    where = f" in {outcome.stopped_in}" if outcome.stopped_in is not None else ""
    finished = f"{outcome.finished} of {outcome.of} are finished"
    print_status(f"stopped{where}; {finished}, and the same command goes on from there")


def _report(found: Study, folder: Path) -> None:
    """The table on stdout; the same, every number and the pictures as files."""
    # matplotlib takes a second, for which nobody should wait before a mistake in the recipe is told.
    from danlu.atomic_write import write_atomically
    from danlu.report.study_plots import draw
    from danlu.report.study_table import aligned, as_csv, markdown, remarks, table

    echo(aligned(table(found)), end="")
    for remark in remarks(found):
        echo(remark)
    sys.stdout.flush()
    try:
        pictures = draw(found, folder)
        drawn = [path.name for path in pictures if path.suffix == ".png"]
        write_atomically(folder / "study.csv", as_csv(found).encode())
        write_atomically(folder / "study.md", markdown(found, folder.resolve().name, drawn).encode())
    except OSError as error:
        raise ResourceError(
            f"{folder}: the table and the plots cannot be written: {error.strerror}. Free some space; the same command "
            "writes them again."
        ) from error
    print_status(f"written to {folder}: study.md, study.csv, {', '.join(path.name for path in pictures)}")


@contextmanager
def _screen(plan: Plan, verbose: bool) -> Iterator[Screen]:
    """What becomes of the runs, on stderr: with a line that changes at a terminal."""
    if verbose or not sys.stderr.isatty():
        yield Screen(plan, verbose)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=sys.stderr), auto_refresh=False, transient=True) as live:
        yield Screen(plan, verbose, live)


class Screen:
    """One line a run; at a terminal, below it, what the run under way said last."""

    def __init__(self, plan: Plan, verbose: bool, live: Live | None = None) -> None:
        self._plan = plan
        self._verbose = verbose
        self._live = live
        self._now = ""
        self._last_failure = ""

    def skipped(self, run: PlannedRun) -> None:
        self._line(f"{self._name(run)}: finished before{_facts(run)}")

    def began(self, run: PlannedRun) -> None:
        self._now = self._name(run)
        if self._live is None:
            self._line(f"{self._now}: training")
        else:
            self._below("")

    def wrote(self, text: str) -> None:
        if self._verbose:
            print_status(text, end="")
        else:
            self._below(text.rstrip().rpartition("\n")[2])

    def ended(self, run: PlannedRun, failure: str | None) -> None:
        self._below("")
        if failure is None:
            self._line(f"{self._name(run)}: finished{_facts(run)}", "green")
            return
        if failure == self._last_failure:
            self._line(f"{self._name(run)}: failed in the same way ({run.log})", "red")
            return
        self._last_failure = failure
        again = shlex.join(["danlu", "train", str(run.recipe_file)])
        told = "".join(f"\n  {line}" for line in failure.splitlines())
        self._line(f"{self._name(run)}: failed{told}\n  all that it said: {run.log}; alone: {again}", "red")

    def _name(self, run: PlannedRun) -> str:
        return f"[{self._plan.runs.index(run) + 1}/{len(self._plan.runs)}] {run.run.name}"

    def _line(self, text: str, colour: str = "") -> None:
        if self._live is None:
            print_status(text)
        else:
            self._live.console.print(printable(text), style=colour, markup=False, highlight=False, soft_wrap=True)

    def _below(self, text: str) -> None:
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(printable(f"{self._now}  {text}"), no_wrap=True, overflow="ellipsis"), refresh=True)


def _facts(run: PlannedRun) -> str:
    """`, evaluation loss 2.0312, 0:01:12`."""
    from danlu.report.study_results import read_summary
    from danlu.train.units import format_duration

    summary = read_summary(run.folder)
    loss = "" if summary.evaluation_last is None else f", evaluation loss {summary.evaluation_last:.4f}"
    return f"{loss}, {format_duration(summary.seconds)}"
