"""`danlu checkpoint list|verify|prune|export`: look after the checkpoints of a run; only export loads torch."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from danlu.core.errors import CheckpointError
from danlu.core.run_files import RunLock
from danlu.core.terminal import echo, printable
from danlu.training.checkpoints.folders import (
    CheckpointInfo,
    best_checkpoint,
    describe,
    is_checkpoint_folder,
    is_complete,
    list_checkpoints,
    remove_checkpoint,
    step_of,
    to_prune,
)
from danlu.training.checkpoints.verification import verify
from danlu.training.criterion import LOSS
from danlu.training.units import format_bytes

ABOUT = "List, verify, prune and export the checkpoints of a run."
app = typer.Typer(name="checkpoint", help=ABOUT, no_args_is_help=True)

Where = Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run folder, or one checkpoint in it.")]


@app.command("list")
def list_command(path: Where) -> None:
    """Show step, size, evaluation loss, time and state of each checkpoint."""
    checkpoints = _checkpoints_at(path)
    best = best_checkpoint(checkpoints)
    table = Table(box=None, pad_edge=False)
    criteria = [LOSS] if best is None or best.criterion == LOSS else [LOSS, best.criterion]
    for heading in ("step", "size", *(f"eval {printable(criterion.metric)}" for criterion in criteria), "saved"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for info in checkpoints:
        state = "complete" if info.complete else "half-written, ignored"
        table.add_row(
            str(info.step),
            format_bytes(info.bytes),
            *("" if value is None else f"{value:.4f}" for value in map(info.value_by, criteria)),
            f"{datetime.fromtimestamp(info.time):%Y-%m-%d %H:%M:%S}",
            state + (", best" if info == best else ""),
        )
    Console().print(table)


@app.command("verify")
def verify_command(path: Where) -> None:
    """Hash every file again. Exits with 5 when anything is damaged."""
    checkpoints = _checkpoints_at(path)
    damaged = 0
    for info in checkpoints:
        problems = verify(info.path)
        if problems and info.complete and not is_complete(info.path):
            echo(f"step {info.step}: gone, the run has deleted it meanwhile")
            continue
        damaged += bool(problems)
        echo(f"step {info.step}: {'DAMAGED' if problems else 'intact'} ({format_bytes(info.bytes)})")
        for problem in problems:
            echo(f"  {problem}")
    if damaged:
        raise typer.Exit(CheckpointError.exit_code)


@app.command("prune")
def prune_command(
    path: Where,
    keep: Annotated[int, typer.Option(min=1, help="Newest checkpoints to keep.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Also keep steps that are a multiple of this.")] = None,
    keep_best: Annotated[bool, typer.Option(help="Also keep the one with the best evaluation.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
) -> None:
    """Delete old checkpoints, and half-written ones. Refuses while the run is training."""
    folder = _checkpoints_folder(path)
    with nullcontext() if dry_run else RunLock(folder.parent):
        checkpoints = list_checkpoints(folder)
        doomed = to_prune(checkpoints, keep=keep, keep_every=keep_every, keep_best=keep_best)
        doomed += [info for info in checkpoints if not info.complete]
        for info in sorted(doomed, key=lambda info: info.step):
            if not dry_run:
                remove_checkpoint(info.path)
            echo(f"{'would delete' if dry_run else 'deleted'} step {info.step} ({format_bytes(info.bytes)})")
        freed = format_bytes(sum(info.bytes for info in doomed))
        left = len(checkpoints) - len(doomed)
        echo(f"{freed} {'would be freed' if dry_run else 'freed'}, {left} checkpoints stay")


@app.command("export")
def export_command(
    path: Where,
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write it; empty or new.")],
    average: Annotated[bool, typer.Option("--average", help="The averaged weights, of a recipe with `ema`.")] = False,
) -> None:
    """Write a checkpoint (of a run: its newest) as a Hugging Face folder with tokenizer and chat template.

    What was trained decides what it is: a model, or an adapter.
    """
    from danlu.cli.train import suggested_commands  # pydantic, for this command alone
    from danlu.run.export import export_checkpoint

    checkpoint = export_checkpoint(path, target, average=average)
    echo(f"{checkpoint.name} written: {suggested_commands(target)}")


def _checkpoints_folder(path: Path) -> Path:
    """The folder that holds the checkpoints of a run, given the run folder or that folder itself."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder.")
    if is_checkpoint_folder(path):
        raise CheckpointError(f"{path}: this is one checkpoint; give the run folder, {path.resolve().parent.parent}.")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not list_checkpoints(folder):
        raise CheckpointError(f"{path}: no checkpoints here. A run keeps them in its checkpoints/step-00000500, ...")
    return folder.resolve()


def _checkpoints_at(path: Path) -> list[CheckpointInfo]:
    if is_checkpoint_folder(path):
        return [describe(path, step_of(path))]
    return list_checkpoints(_checkpoints_folder(path))
