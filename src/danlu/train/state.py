"""What a checkpoint holds of a run, and how a run takes it up again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from danlu.errors import CheckpointError
from danlu.train.checkpoint import load_checkpoint, read_group

if TYPE_CHECKING:
    from danlu.train.loop import Run


@dataclass
class RunState:
    """The counters of a run."""

    step: int = 0  # optimizer steps behind
    tokens: int = 0
    saved_step: int = 0  # of the newest checkpoint
    assessed_step: int = 0  # of the last evaluation
    best_loss: float | None = None  # lowest evaluation loss
    evaluations_without_gain: int = 0
    ended_early: bool = False
    rewinds: int = 0
    rewind_wanted: bool = False


def snapshot(run: Run) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
    """Tensors by group, live, and the rest as JSON: everything the next step depends on."""
    groups: dict[str, Mapping[str, Tensor]] = {
        "model": {name: parameter.detach() for name, parameter in run.compute.model.named_parameters()},
        "optimizer": run.optimizer.state_tensors(),
    }
    state: dict[str, Any] = {
        "run": asdict(run.state),
        "feed": run.feed.state(),
        "optimizer": run.optimizer.state_scalars(),
        "watch": run.watch.state(),
        # The size of micro-batches decides how sums are rounded; a resumed run must not choose anew.
        "micro": run.compute.micro,
        "total_steps": run.cadence.total,
        "finished": run.finished,
        "metrics_lines": run.metrics.lines,
    }
    if run.scaler is not None:
        state["scaler"] = run.scaler.state()
    if run.ema is not None:
        groups["ema"] = run.ema.state_tensors()
        state["ema"] = run.ema.state_scalars()
    return groups, state


def restore(run: Run, path: Path) -> dict[str, Any]:
    """Puts `run` back to what `snapshot` saw, and returns the JSON part of it.

    Raises CheckpointError if the checkpoint is damaged or of another run.
    """
    model = {name: parameter.detach() for name, parameter in run.compute.model.named_parameters()}
    into = {"model": model} if run.ema is None else {"model": model, "ema": run.ema.state_tensors()}
    state = load_checkpoint(path, into)
    wanted = (
        {"run", "feed", "optimizer", "watch"} | ({"scaler"} if run.scaler else set()) | ({"ema"} if run.ema else set())
    )
    if missing := wanted - state.keys():
        raise CheckpointError(f"{path}: its state lacks {', '.join(sorted(missing))}: it is of another recipe.")
    run.optimizer.load_state(read_group(path, "optimizer"), state["optimizer"])
    if run.scaler is not None:
        run.scaler.load(state["scaler"])
    if run.ema is not None:
        run.ema.updates = int(state["ema"]["updates"])
    run.watch.load(state["watch"])
    run.feed.restore(state["feed"])
    known = {field.name for field in fields(RunState)}
    run.state = RunState(**{name: value for name, value in state["run"].items() if name in known})
    run.state.saved_step = run.state.step
    return state
