"""summary.json: a finished run in a few numbers, for whoever compares runs.

::

    {"steps": 500, "tokens": 4096000, "seconds": 812.4, "tokens_per_second": 5042.0,       the median of the steps
     "peak_memory_bytes": 912261120, "parameters": 7300000, "trained_parameters": 61440,
     "loss": 1.91, "evaluation": {"last": 2.05, "best": 2.03},                             null without held-out rows
     "judged": {"metric": "accuracy", "last": 0.71, "best": 0.73},      only where a run is not judged by that loss
     "result": {"path": "model", "bytes": 14600000},                                       its weights, in this folder
     "memory": {"weights": 29200000, "adapter": 0, ...},                        bytes in tensors by part, or null
     "peak": {"dtype": "bfloat16", "measured_flops": 1.2e11, "specified_flops": null, "processes": 1,
              "mfu_divides_by": "measured_flops x processes"}}                  null for a classifier

It is written after the result, so a folder that has it holds a whole run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from danlu.core.atomic_write import write_atomically
from danlu.core.errors import ResourceError
from danlu.core.memory_parts import MemoryParts
from danlu.core.run_files import SUMMARY
from danlu.optim.schedules import multiplier
from danlu.training.criterion import LOSS
from danlu.training.metrics import json_value, peak_memory_bytes, read_metrics
from danlu.training.state import Run

Lines = Sequence[Mapping[str, Any]]  # of metrics.jsonl


def write_summary(
    run: Run,
    result: Path,
    parameters: int,
    trained_parameters: int,
    memory: MemoryParts | None = None,
    peak: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
) -> Path:
    """Sums up a run that has ended in the folder of its metrics file; `result` is the folder in it with the weights.

    parameters, trained_parameters: of the whole model, over all processes.   peak: the peak that `mfu` in its lines was
    measured against.   plan: what was expected of a step next to what it took.

    Numbers that only metrics.jsonl had are null where that file was lost. Raises ResourceError.
    """
    assert run.metrics is not None, "the process that sums up has the metrics"
    folder = run.metrics.path.parent
    lines = read_metrics(run.metrics.path)
    steps = [line for line in lines if "tokens_per_second" in line]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    summary = {
        "steps": run.state.step,
        "tokens": run.state.tokens,
        "seconds": seconds_in(lines),
        "tokens_per_second": median(line["tokens_per_second"] for line in steps) if steps else None,
        # A part of the run that another process trained may have needed more than this one.
        "peak_memory_bytes": max([peak_memory_bytes(run.learner.device), *(line["memory_bytes"] for line in steps)]),
        "parameters": parameters,
        "trained_parameters": trained_parameters,
        "loss": steps[-1]["loss"] if steps else None,
        "evaluation": {"last": json_value(losses[-1]), "best": json_value(_lowest(losses))} if losses else None,
        **_judged(run, lines),
        "result": {
            "path": str(result.relative_to(folder)),
            "bytes": sum(file.stat().st_size for file in result.glob("*.safetensors")),
        },
        "memory": None if memory is None else vars(memory),
        "peak": peak,
        "plan": plan,
    }
    path = folder / SUMMARY
    try:
        write_atomically(path, f"{json.dumps(summary, indent=2, allow_nan=False)}\n".encode())
    except OSError as error:
        raise ResourceError(
            f"{path}: cannot be written: {error.strerror}. Free some space, and start again."
        ) from error
    return path


def clear_summary(folder: Path) -> None:
    """Deletes the summary of an earlier pass over steps that are now trained again."""
    (folder / SUMMARY).unlink(missing_ok=True)


FEW_STEPS = 20
"""Fewer leave a learning rate hardly time to rise and fall."""
_RISE = 0.2  # of the loss, above which it rose even in a few steps: more than what two batches differ by
_FALL = 0.01  # of the loss, below which it is called flat: less than what two batches differ by


def few_steps(steps: int, per_step: str) -> str | None:
    """Warns at the start of a run of a handful of steps; None for a longer one."""
    if steps >= FEW_STEPS:
        return None
    return (
        f"only {steps} optimizer {'step' if steps == 1 else 'steps'} of {per_step}: little is learnt in so few. Raise "
        "epochs (or steps), or lower batch"
    )


def further_line(run: Run) -> str:
    """A line about a finished run that goes on: the schedule is that of all its steps, so the rate may rise again."""
    done, total = run.state.step, run.cadence.total
    share = f"{multiplier(done + 1, total, run.schedule):.3g}"
    ended = f"{multiplier(done, done, run.schedule):.3g}"
    rate = "" if share == ended else f": the learning rate goes on at {share} of its peak, and had ended at {ended}"
    return f"the run had ended after step {done:,} and goes on to step {total:,}, with the schedule of all these{rate}"


def flat_loss(lines: Lines) -> str | None:
    """Warns about a run with a loss that did not fall, by the medians of its first and last tenth; None where it did.

    For a run of fewer than FEW_STEPS steps only a rise beyond the differences between batches is reported, by the
    median of its last third. None too where the loss is not finite, which is reported elsewhere.
    """
    losses = [line["loss"] for line in lines if "loss" in line]
    if len(losses) < 2 or not all(map(math.isfinite, losses)):
        return None
    if len(losses) < FEW_STEPS:
        last = median(losses[-max(1, len(losses) // 3) :])
        if last <= losses[0] + _RISE * abs(losses[0]):
            return None
        return (
            f"the loss rose, from {losses[0]:.3f} in the first logged step to {last:.3f} in the last: lower "
            "optimizer.learning_rate (`danlu explain optimizer.learning_rate` names the usual ones)"
        )
    part = max(5, len(losses) // 10)
    first, last = median(losses[:part]), median(losses[-part:])
    if last < first - _FALL * abs(first):
        return None
    return (
        f"the loss did not fall: {first:.3f} in the first {part} logged steps, {last:.3f} in the last {part}. Try "
        "another optimizer.learning_rate, train for longer, or look at what is trained with `danlu preview`"
    )


def seconds_in(lines: Lines) -> float:
    """Seconds that the steps and evaluations in `lines` took, loading and tokenising left out.

    A resumed run begins its clock here (`Run.started`), so the seconds of its parts add up; work that a kill threw away
    is not in the lines, and with `log.every` above 1 the steps since the last line are not either.
    """
    seconds = 0.0
    for line in lines:
        if "elapsed_s" in line:
            seconds = line["elapsed_s"]
        else:
            seconds += line.get("eval_s", 0.0)
    return seconds


def _judged(run: Run, lines: Lines) -> dict[str, Any]:
    """The run's criterion, where that is not the loss of evaluations: its name, last and best value."""
    criterion = run.criterion
    name = f"eval_{criterion.metric}"
    values = [line[name] for line in lines if name in line]
    if criterion == LOSS or not values:
        return {}
    best = min(values, key=criterion.cost)
    return {"judged": {"metric": criterion.metric, "last": json_value(values[-1]), "best": json_value(best)}}


def _lowest(losses: Sequence[float]) -> float:
    """The lowest loss; NaN only where there is nothing else."""
    return min(losses, key=lambda loss: (math.isnan(loss), loss))
