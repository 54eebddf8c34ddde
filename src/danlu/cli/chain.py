"""`danlu train` of a chain: messages about each stage, and a table of all of them at the end."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from danlu.cli.train import check_processes, launch_training, print_outcome, silent
from danlu.core.errors import RecipeError
from danlu.core.terminal import print_status, print_status_early
from danlu.recipe import Chain

if TYPE_CHECKING:
    from danlu.run.chain import StageOutcome
    from danlu.run.chained_quantize import QuantizeOutcome
    from danlu.run.train import Outcome


def train_chain(chain: Chain, resume: str, dry_run: bool, quiet: bool, *, leads: bool = True) -> int:
    """Trains a chain in this process, one of several or the only one, and returns the exit code."""
    _check_resume(chain, resume)
    if leads and not quiet:
        print_status_early(f"training {', '.join(stage.name for stage in chain.stages)} in {chain.output}")
    # Here, not above: a wrong recipe is refused in a fraction of the second that torch takes to import.
    from danlu.run import chain as chains

    log, stream = (silent, io.StringIO()) if quiet or not leads else (print_status, None)

    def ended(stage: StageOutcome) -> None:
        if stage.outcome is not None:
            _print_ending(stage.outcome, log)
        else:
            inputs = ", ".join(stage.stage.inputs)
            log(f"dry run: the recipe of {stage.stage.name} is sound; the rest can be tried when {inputs} is trained")

    result = chains.train_chain(chain, resume=resume, log=log, stream=stream, dry_run=dry_run, leads=leads, ended=ended)
    if not result.exit_code and not dry_run:
        for line in table(result.stages):
            log(line)
    return result.exit_code


def _print_ending(outcome: Outcome | QuantizeOutcome, log: Callable[[str], None]) -> None:
    """Prints how a stage has ended."""
    from danlu.run.train import Outcome

    if isinstance(outcome, Outcome):
        print_outcome(outcome, log)
        return
    for line in outcome.lines:
        log(line)


def table(stages: Sequence[StageOutcome]) -> list[str]:
    """A line for each finished stage under a heading: name, steps, metric (of stage quantize its method), folder."""
    rows = [("stage", "steps", "metric", "folder")]
    for stage in stages:
        assert stage.outcome is not None, "all stages have ended"
        rows.append((stage.stage.name, str(stage.outcome.steps or "-"), stage.metric, str(stage.folder)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{name:<{widths[0]}}  {steps:>{widths[1]}}  {metric:<{widths[2]}}  {folder}"
        for name, steps, metric, folder in rows
    ]


def launch_chain(chain: Chain, arguments: Sequence[str], resume: str, processes: int, dry_run: bool) -> int:
    """Starts `danlu train` of the chain in `processes` processes, and returns the exit code.

    Raises RecipeError for a stage with a layout that does not fit them, before any process starts.
    """
    check_processes(processes, [stage.loaded for stage in chain.trained])
    _check_resume(chain, resume)

    def command(attempt: int) -> list[str]:
        """The arguments of a process: processes that are started again go on where the chain stopped."""
        return ["-P", "-m", "danlu", "train", *arguments, "--resume", "auto" if attempt else resume]

    folder = Path(chain.output).expanduser()
    first = chain.trained[0].loaded.recipe
    return launch_training(first, command, lambda: "where the chain stopped", processes, folder, dry_run)


def _check_resume(chain: Chain, resume: str) -> None:
    """Raises RecipeError for a checkpoint to resume from, which is that of one stage."""
    if resume not in ("auto", "never"):
        name = chain.trained[-1].name
        raise RecipeError(
            f"--resume {resume}: a chain takes auto or never. For a checkpoint of one stage, train its own recipe: "
            f"danlu train {chain.output}/{name}/recipe.yaml --resume {resume}"
        )
