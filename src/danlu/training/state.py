"""The parts of a run, the content of its checkpoints, and how a run restores that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from danlu.core.errors import CheckpointError, DanluError
from danlu.core.shard_box import ShardBox
from danlu.core.stop_signals import StopRequest
from danlu.core.types import Item
from danlu.optim.build import Optimizers
from danlu.recipe.sections import EarlyStop, Schedule
from danlu.training.agreement import Failure, one_failure
from danlu.training.checkpoints.loading import load_checkpoint, read_group
from danlu.training.checkpoints.state_boxes import state_box
from danlu.training.checkpoints.store import CheckpointStore
from danlu.training.criterion import LOSS, Criterion
from danlu.training.data_loader import DataLoader
from danlu.training.executor import AnyLearner
from danlu.training.metrics import MetricsLog, Recorder, Value
from danlu.training.timeline import TimelineWriter
from danlu.training.watch import Watch

if TYPE_CHECKING:
    from danlu.numerics.loss_scaling import LossScaler
    from danlu.optim.ema import Ema
    from danlu.training.trained_roles import TrainedRoles

ITEMS = "items"
"""The group of tensors of items that are not trained yet, where the model makes them itself."""


@dataclass
class RunState:
    """The counters of a run."""

    step: int = 0  # optimizer steps behind
    tokens: int = 0
    saved_step: int = 0  # of the newest checkpoint
    assessed_step: int = 0  # of the last evaluation
    best_value: float | None = None  # of all evaluations, by the run's criterion
    best_metric: str = LOSS.metric  # what `best_value` is of
    evaluations_without_gain: int = 0
    ended_early: bool = False
    rewinds: int = 0
    rewind_wanted: bool = False


@dataclass(frozen=True)
class Samples:
    """Texts that the model wrote, one for each prompt, and further recorded values, by name."""

    texts: Sequence[str]
    values: Mapping[str, Value] = field(default_factory=dict)


class Generate(Protocol):
    """Texts that the model writes after each prompt; handed in by whoever builds the run."""

    def __call__(self, prompts: Sequence[str]) -> Samples: ...


@dataclass(frozen=True)
class Cadence:
    """The intervals of a run's events, in steps."""

    total: int
    log: int
    checkpoint: int
    evaluation: int | None  # None: nothing to evaluate


@dataclass
class Run:
    """All parts of a run. `fit` works on it; `state` is the part that a checkpoint brings back."""

    learner: AnyLearner
    optimizer: Optimizers
    schedule: Schedule
    clip: float | None
    data_loader: DataLoader
    cadence: Cadence
    watch: Watch
    store: CheckpointStore
    metrics: MetricsLog | None  # None on processes that write nothing
    recorders: Sequence[Recorder]  # the metrics file is one of them
    stop_request: StopRequest
    scaler: LossScaler | None = None  # fp16
    ema: Ema | None = None
    roles: TrainedRoles | None = None  # of several models that are trained
    held_out: Callable[[], Sequence[Item]] | None = None  # items to be judged; asked for at each evaluation
    early_stop: EarlyStop | None = None
    criterion: Criterion = LOSS  # what early stop and `keep_best` judge by
    sample_prompts: Sequence[str] = ()
    generate: Generate | None = None
    least_seconds: Callable[[Sequence[int], int], float] | None = None  # (document lengths, targets) -> at peak speed
    base: Mapping[str, Any] | None = None  # of an adapter: what tells its frozen base from another
    inputs: Mapping[str, Any] = field(default_factory=dict)  # fingerprints of what the run reads, as JSON
    timeline: TimelineWriter | None = None  # when the process does what in a step; None where it is not written
    state: RunState = field(default_factory=RunState)
    started: float = field(default_factory=time.perf_counter)

    @property
    def finished(self) -> bool:
        return self.state.step >= self.cadence.total or self.state.ended_early or self.data_loader.exhausted

    def due(self, every: int | None, *, since: int) -> bool:
        """Whether an event of every `every` steps, and of the end, is due now; `since` is the step of the last one."""
        return every is not None and self.state.step > since and (self.state.step % every == 0 or self.finished)

    def stopping(self) -> bool:
        """Whether a signal asks to stop, on any process; all of them ask at the same places."""
        return self.learner.parallel.any_rank(self.stop_request.requested)

    def agreed(self, error: DanluError | None) -> Failure | None:
        """The errors of all processes as one, None where no process has one; all of them ask."""
        world = self.learner.parallel.ranks.world
        failures = world.all_gather_objects(None if error is None else Failure.of(error))
        return one_failure(dict(zip(world.ranks, failures, strict=True)))

    def record(self, event: str, **values: Value) -> None:
        for recorder in self.recorders:
            recorder.event(self.state.step, event, **values)

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model holds the averaged weights, where the recipe asks for an average."""
        return nullcontext() if self.ema is None or not self.ema.updates else self.ema.swapped()


def snapshot(run: Run) -> tuple[dict[str, Mapping[str, Tensor]], dict[str, Any]]:
    """Tensors by group, live, and the rest as JSON: everything the next step depends on."""
    groups: dict[str, Mapping[str, Tensor]] = {
        "model": run.learner.weights(),
        "optimizer": run.optimizer.state_tensors(),
    }
    state: dict[str, Any] = {
        "run": asdict(run.state),
        "feed": run.data_loader.state(),
        "optimizer": _optimizer_scalars(run),
        "watch": run.watch.state(),
        # The size of micro-batches decides how sums are rounded; a resumed run must not choose again.
        "micro": run.learner.micro,
        "total_steps": run.cadence.total,
        "finished": run.finished,
        "metrics_lines": 0 if run.metrics is None else run.metrics.lines,
    }
    if run.inputs:
        state["inputs"] = dict(run.inputs)
    if run.base is not None:
        state["base"] = dict(run.base)
    if run.scaler is not None:
        state["scaler"] = run.scaler.state()
    if run.ema is not None:
        groups["ema"] = run.ema.state_tensors()
        state["ema"] = {"updates": run.ema.updates}
    if (generated := run.data_loader.generated) is not None and (tensors := generated.tensors(run.data_loader.next)):
        groups[ITEMS] = tensors
        state[ITEMS] = True
    return groups, state


def _optimizer_scalars(run: Run) -> dict[str, Any]:
    """`Optimizers.state_scalars` of the whole model, of which stages of a pipeline have different parameters."""
    scalars = run.learner.parallel.all_gather_pipeline(run.optimizer.state_scalars())
    unstepped = dict.fromkeys(name for part in scalars for name in part["unstepped"])
    return scalars[0] | {"unstepped": [*unstepped]}


def shard_boxes(run: Run, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, ShardBox]] | None:
    """The box of a whole tensor that each tensor of `snapshot` is; None where every tensor is whole."""
    local = run.learner.parallel.local_parameters
    if not local:
        return None
    boxes: dict[str, dict[str, ShardBox]] = {}
    for group, tensors in groups.items():
        if group == ITEMS:  # whole, and the same on all processes
            continue
        boxes[group] = {}
        for name, tensor in tensors.items():
            box = local[name.partition(".")[2] if group == "optimizer" else name].box
            boxes[group][name] = state_box(tensor, box) if group == "optimizer" else box
    return boxes


def restore(run: Run, path: Path) -> dict[str, Any]:
    """Restores `run` to the state that `snapshot` saw, and returns the JSON part of it.

    Raises CheckpointError if the checkpoint is damaged or of another run.
    """
    model = run.learner.weights()
    into = {"model": model} if run.ema is None else {"model": model, "ema": run.ema.state_tensors()}
    together = run.learner.parallel.ranks.world
    state = load_checkpoint(path, into, shard_boxes(run, into), together)
    wanted = (
        {"run", "feed", "optimizer", "watch"} | ({"scaler"} if run.scaler else set()) | ({"ema"} if run.ema else set())
    )
    if missing := wanted - state.keys():
        raise CheckpointError(f"{path}: its state lacks {', '.join(sorted(missing))}: it is of another recipe.")
    tensors = run.optimizer.empty_state(state["optimizer"])
    load_checkpoint(path, {"optimizer": tensors}, shard_boxes(run, {"optimizer": tensors}), together)
    run.optimizer.load_state(tensors, state["optimizer"])
    if run.scaler is not None:
        run.scaler.load(state["scaler"])
    if run.ema is not None:
        run.ema.updates = int(state["ema"]["updates"])
    run.learner.parallel.reshard()
    run.watch.load(state["watch"])
    run.data_loader.restore(state["feed"])
    if (generated := run.data_loader.generated) is not None and state.get(ITEMS):
        generated.restore_tensors(read_group(path, ITEMS))
    known = {field.name for field in fields(RunState)}
    counters = dict(state["run"])
    if "best_loss" in counters:  # of a danlu that judged by the loss alone
        counters["best_value"] = counters["best_loss"]
    run.state = RunState(**{name: value for name, value in counters.items() if name in known})
    run.state.saved_step = run.state.step
    return state
