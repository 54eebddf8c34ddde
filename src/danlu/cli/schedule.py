"""`danlu schedule`: the actions of each pipeline rank over time, simulated or as a run has measured them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from danlu.core.errors import CheckpointError, RecipeError
from danlu.core.terminal import echo, print_status
from danlu.parallel.schedules import KINDS, chunks_per_rank, peak_in_flight, schedule_problems
from danlu.parallel.timeline import TimelineEvent, read_timeline
from danlu.planning.action_times import ActionTimes, mean_times, read_times
from danlu.planning.pipeline_simulation import (
    ScheduleShape,
    bubble,
    bubble_formula,
    in_flight_formula,
    measured_orders,
    measured_shape,
    simulate,
)
from danlu.report.timeline_svg import FILE, timeline_svg
from danlu.report.timeline_text import text_timeline

MAX_FORWARDS = 50_000
"""Forward passes of a schedule that is simulated: some seconds, and a picture that a browser still shows."""

_FLAGS = {"kind": "--kind", "stages": "--stages", "chunks": "--chunks", "micro_batches": "--microbatches"}


def schedule(
    kind: Annotated[str | None, typer.Option(metavar="KIND", help=f"{', '.join(KINDS)}.")] = None,
    stages: Annotated[int | None, typer.Option(metavar="P", help="Pipeline ranks.")] = None,
    microbatches: Annotated[int | None, typer.Option(metavar="M", help="Micro-batches of a step.")] = None,
    chunks: Annotated[int | None, typer.Option(metavar="V", help="On each rank, of interleaved; 2 by default.")] = None,
    times: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML or JSON: forward, input, weight, ...: seconds, or a list by chunk."),
    ] = None,
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="A run: its measured timeline instead.")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="The run's step; the last one by default.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the timeline as a picture.")] = None,
) -> None:
    """Simulate a pipeline schedule, or show what a run measured: bubble and activations in flight next to formulas.

    Without --times, forward, input gradient and weight gradient take one unit each and messages nothing.
    """
    if svg is not None:
        FILE.check_target(svg)
    if run is not None:
        options = {"--kind": kind, "--stages": stages, "--microbatches": microbatches, "--chunks": chunks}
        _refuse({**options, "--times": times}, "not with --run: its timeline says it. Leave out either")
        title, line, events = _measured(run, step)
    else:
        _refuse({"--step": step}, "only with --run RUN: the step that was measured. Add that, or leave this out")
        shape = _requested(kind, stages, microbatches, chunks)
        title, line, events = _simulated(shape, None if times is None else read_times(times, shape.num_chunks))
    if svg is not None:
        FILE.write(svg, timeline_svg(events, title, line, "units" if run is None and times is None else "s"))
        print_status(f"drawn in {svg}")


def _refuse(options: dict[str, object], reason: str) -> None:
    given = [flag for flag, value in options.items() if value is not None]
    if given:
        raise RecipeError(f"{', '.join(given)}: {reason}")


def _requested(kind: str | None, stages: int | None, microbatches: int | None, chunks: int | None) -> ScheduleShape:
    """The schedule that the options name. Raises RecipeError with all that is wrong with them."""
    if kind is None or stages is None or microbatches is None:
        needed = {"--kind": kind, "--stages": stages, "--microbatches": microbatches}
        missing = ", ".join(flag for flag, value in needed.items() if value is None)
        raise RecipeError(f"{missing}: needed, as in --kind zbv --stages 4 --microbatches 8; or name a --run RUN")
    shape = ScheduleShape(kind, stages, chunks_per_rank(kind) if chunks is None else chunks, microbatches)
    problems = [
        f"{_FLAGS[argument]}: {message}"
        for argument, message in schedule_problems(kind, shape.stages, shape.chunks, shape.micro_batches)
    ]
    if not problems and shape.num_chunks * microbatches > MAX_FORWARDS:
        most = MAX_FORWARDS // shape.num_chunks
        fewer = f"Use {most:,} or fewer" if most else "Use fewer --stages"
        problems = [
            f"--microbatches: {microbatches:,} through {shape.num_chunks:,} chunks are more than {MAX_FORWARDS:,} "
            f"forward passes, the most that are simulated. {fewer}"
        ]
    if problems:
        raise RecipeError(problems)
    return shape


def _simulated(shape: ScheduleShape, times: ActionTimes | None) -> tuple[str, str, list[TimelineEvent]]:
    """Prints a simulated schedule; returns the title, the line on the bubble and the events of its picture."""
    events = simulate(shape.lists, times)
    simulated = bubble(events)
    line = f"bubble {simulated.ratio:.4f} of the busy time{_bubble_formula(shape)}"
    step, busy = max(event.end_s for event in events), simulated.busy_s / shape.stages
    echo(str(shape))
    echo(line)
    echo(f"step {step:.6g} {'units' if times is None else 's'}, of which each rank computes {busy:.6g} on average")
    _print_in_flight(shape, [peak_in_flight(actions) for actions in shape.lists])
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 120
    for text in text_timeline(events, 1.0, columns) or ():
        echo(text)
    return str(shape), f"simulated: {line}", events


def _measured(run: Path, step: int | None) -> tuple[str, str, list[TimelineEvent]]:
    """Prints a run's measured step; returns the title, the line on the bubble and the events of its picture."""
    if not run.is_dir():
        raise CheckpointError(f"{run}: there is no such folder")
    number, events = read_timeline(run, step)
    orders = measured_orders(events)
    shape = measured_shape(orders)
    title = f"{run.resolve().name}, step {number}: {shape}"
    line = f"measured: bubble {bubble(events).ratio:.4f} of the busy time"
    if shape.kind is not None:
        simulated = bubble(simulate(shape.lists, mean_times(events, shape.num_chunks)))
        line += f"; {simulated.ratio:.4f} simulated with its mean times{_bubble_formula(shape)}"
    echo(title)
    echo(line)
    _print_in_flight(shape, [peak_in_flight(order) for order in orders.values()])
    return title, line, events


def _bubble_formula(shape: ScheduleShape) -> str:
    """The formula, which holds for equal times, to be read behind the bubble."""
    assert shape.kind is not None
    formula, ratio = bubble_formula(shape.kind, shape.stages, shape.chunks, shape.micro_batches)
    return f"; formula: {formula}" if ratio is None else f"; {formula} = {ratio:.4f}"


def _print_in_flight(shape: ScheduleShape, counts: Sequence[int]) -> None:
    """Prints the most activations in flight of each rank, and the formula's where each rank is a stage."""
    unit = "micro-batches" if shape.chunks == 1 else "chunks of micro-batches"
    line = f"in flight, {unit} by rank: {' '.join(map(str, counts))}"
    if shape.kind is not None and len(counts) == shape.stages:
        size = shape.stages, shape.chunks, shape.micro_batches
        formulas = [in_flight_formula(shape.kind, rank, *size) for rank in range(shape.stages)]
        line += f"; {formulas[0][0]} = {' '.join(str(count) for _, count in formulas)}"
    echo(line)
