"""`danlu runs list`: the runs of a folder, their progress and their ends."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from danlu.core.errors import CheckpointError
from danlu.core.run_files import RECIPE
from danlu.core.terminal import echo, printable
from danlu.training.criterion import LOSS
from danlu.training.runs import RunInfo, find_runs, number
from danlu.training.units import format_duration

app = typer.Typer(name="runs", no_args_is_help=True)

DEFAULT_FOLDER = Path("runs")
_HEADINGS = ("state", "stage", "step", "loss", "eval", "time", "last change", "run")
_LEFT_ALIGNED = ("state", "stage", "run")


@app.callback()
def runs() -> None:
    """List the runs below a folder."""


@app.command("list")
def list_command(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A run, or a folder with runs below it.")
    ] = DEFAULT_FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for each run, in a list.")] = False,
) -> None:
    """Show each run: running, finished or stopped, its steps, losses and time; the last one changed comes last."""
    if not folder.is_dir() and folder != DEFAULT_FOLDER:
        raise CheckpointError(f"{folder}: there is no such folder.")
    infos = find_runs(folder)
    if as_json:
        echo(json.dumps([_fields(info) for info in infos], indent=2, ensure_ascii=False))
    elif infos:
        _show([_HEADINGS, *map(_row, infos)])
    else:
        echo(f"no runs in {folder}: `danlu train RECIPE` writes them where the recipe's `output` says")


def _fields(info: RunInfo) -> dict[str, Any]:
    """A run as JSON has it: paths as texts, the time in ISO 8601, NaN and infinities as texts."""
    values: dict[str, Any] = asdict(info) | {
        "folder": str(info.folder),
        "stage": _stage(info.folder),
        "reward": _reward(info),
        "chain": None if info.chain is None else str(info.chain),
        "changed": datetime.fromtimestamp(info.changed, UTC).isoformat(timespec="seconds"),
    }
    del values["last"]
    # JSON has no NaN and no infinity: as metrics.jsonl has them.
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def _row(info: RunInfo) -> tuple[str, ...]:
    """The cells of a run in the table."""
    return (
        info.state,
        printable(_stage(info.folder) or ""),
        f"{info.step:,}" if info.steps is None else f"{info.step:,}/{info.steps:,}",
        _trained(info),
        _judged(info),
        "" if info.seconds is None else format_duration(info.seconds),
        f"{datetime.fromtimestamp(info.changed):%m-%d %H:%M}",
        printable(str(info.folder)),
    )


def _stage(run: Path) -> str | None:
    """The stage in a run's recipe, which has it on a line of its own."""
    with suppress(OSError, UnicodeDecodeError), (run / RECIPE).open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("stage:"):
                return line.partition(":")[2].partition("#")[0].strip() or None
    return None


def _reward(info: RunInfo) -> float | None:
    """The mean reward of the last step; None for a stage without rewards."""
    return number(info.last.get("reward"))


def _trained(info: RunInfo) -> str:
    """The last step's loss, or its reward in stage rl, where the loss says little of the run."""
    if (reward := _reward(info)) is not None:
        return f"reward {reward:.4f}"
    return "" if info.loss is None else f"{info.loss:.4f}"


def _judged(info: RunInfo) -> str:
    """The last value of the metric that evaluations are judged by, with its name where it is not the loss."""
    if info.evaluation_value is None:
        return ""
    name = "" if info.metric == LOSS.metric else f"{printable(info.metric)} "
    return f"{name}{info.evaluation_value:.4f}"


def _show(rows: list[tuple[str, ...]]) -> None:
    """Prints the headings and rows with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if heading in _LEFT_ALIGNED else cell.rjust(width)
            for heading, cell, width in zip(_HEADINGS, row, widths, strict=True)
        ]
        echo("  ".join(cells).rstrip())
