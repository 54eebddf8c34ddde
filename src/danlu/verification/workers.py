"""The processes of a verification, on this machine: the recipe's layout as a group, and one process as the reference.

A fork server loads torch once, and each process is a fork of it. All are judged by the files they leave, never by exit
codes: gloo's threads may abort a process that ends in the ordinary way.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.core.atomic_write import write_atomically
from danlu.core.errors import DanluError, TrainingError
from danlu.core.types import Item
from danlu.numerics import batch_invariant
from danlu.parallel import gradient_buckets, parallel_context
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.parallel.traffic_counter import fake_process_group
from danlu.recipe import Recipe
from danlu.training.checkpoints.loading import load_checkpoint
from danlu.training.state import Run, restore
from danlu.verification.clear_routes import ClearItems
from danlu.verification.exported import exported_tensors
from danlu.verification.fault import load_fault, replaced
from danlu.verification.pipedream import replay_turn, trace_turn
from danlu.verification.proxy import Proxy, ProxyTraining
from danlu.verification.step_traffic import StepTraffic, measure_step_traffic
from danlu.verification.trace import (
    TakeSteps,
    Trace,
    balance_gradients,
    gradients_by_item,
    perturb_weights,
    save_checkpoint,
    spoiled_step,
    trace_average,
    trace_resumed_step,
    trace_steps,
    trace_training,
)

PERTURBATION = 2.0**-22
"""The relative change of each number where the effect of rounding is measured: two units of float32."""
T = TypeVar("T")
_BUCKET_BYTES, _LARGE_BYTES = 2**13, 2**11
"""A matrix of a small model has 1 KiB to 32 KiB, a norm 128 bytes."""
Result = tuple[Trace, StepTraffic | None]
_CHECKPOINT = "checkpoint-path"  # ends the name of the file in which a side writes where its checkpoint is
_GRACE_S = 0.5  # for other processes to write their errors, once one has failed


@dataclass(frozen=True)
class Task:
    """The task of a verification, which all processes receive; pickled."""

    recipe: Recipe
    proxy: Proxy
    layout: Layout
    steps: Sequence[Sequence[Item]]  # one more than are compared: the last is taken after a checkpoint was loaded
    held_out: Sequence[Item]
    micro: int  # items in a micro-batch
    device: str  # "cpu" or "cuda"
    trace_items: bool = True  # whether the reference traces what each item adds to the first gradient
    candidates: Sequence[Item] = ()  # of a model with experts: items that those of the task are chosen from
    measure_traffic: bool = False
    reshards: bool = True  # whether each side loads the other's checkpoint; or its own, where state cannot be cut again
    fault: str | None = None  # MODULE:NAME of a `Fault` that is injected into the processes of the layout
    item_name: str = "packed sequences"
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Traces:
    """The traces of a task."""

    by_rank: list[Trace]  # of the layout's processes
    reference: Trace  # of one process
    perturbed: Trace  # of one process with initial weights that differ by rounding
    traffic: StepTraffic | None = None  # of rank 0 in a step, where asked for
    reshards: bool = True  # as the task had it


def run_task(task: Task) -> Traces:
    """Runs a task in its layout, in one process, and in one with initial weights that differ by rounding, side by side.

    Raises the DanluError of the first process that had one, TrainingError for one that failed otherwise or did not come
    to an end in time.
    """
    world = range(task.layout.world)
    results = _run(task, [*(("layout", rank) for rank in world), ("reference", 0), ("perturbed", 0)])
    return Traces(
        by_rank=[results["layout", rank][0] for rank in world],
        reference=results["reference", 0][0],
        perturbed=results["perturbed", 0][0],
        traffic=results["layout", 0][1],
        reshards=task.reshards,
    )


def with_clear_routes(task: Task) -> tuple[Task, float] | None:
    """The task with those of its candidates that have clear routes, and the least margin of any route in its steps
    (`routes.RoutingMargin`); None where there are too few. Raises as `run_task` does.
    """
    chosen = _run(task, [("routes", 0)])["routes", 0][0].clear_items
    if chosen is None:
        return None
    of_steps, held_out, margin = chosen
    per_step = len(task.steps[0])
    items = [task.candidates[number] for number in of_steps]
    steps = [items[start : start + per_step] for start in range(0, len(items), per_step)]
    return replace(task, steps=steps, held_out=[task.candidates[number] for number in held_out]), margin


def fake_world_traffic(task: Task) -> StepTraffic:
    """Measures the traffic of rank 0 of a layout in a step, without other processes. Raises as `run_task` does."""
    _, traffic = _run(task, [("fake_world", 0)])["fake_world", 0]
    assert traffic is not None, "measured in this role"
    return traffic


def _run(task: Task, roles: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Result]:
    """Runs each (role, rank) of a task in a process of its own; returns their results."""
    with tempfile.TemporaryDirectory(prefix="danlu-verify-") as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps(task))
        _run_processes(folder, roles, task.timeout_s)
        # Written a moment ago by processes of ours, into a folder that only this user can read.
        return {role: torch.load(_file(folder, *role), weights_only=False) for role in roles}


def _run_processes(folder: Path, roles: Sequence[tuple[str, int]], timeout_s: float) -> None:
    """Starts the processes, and ends them when all are done, when one has failed, or when time is up."""
    server = multiprocessing.get_context("forkserver")
    preloaded = [__name__, "danlu.verification.decoder_proxy"]
    server.set_forkserver_preload([*preloaded, "torch.distributed.fsdp", "torch.nn.parallel"])
    processes: list[Any] = [server.Process(target=_work, args=(folder, *role), daemon=True) for role in roles]
    try:
        with _safe_path():
            for process in processes:
                process.start()
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            if any(folder.glob("*.failed")):
                time.sleep(_GRACE_S)
                break
            time.sleep(0.02)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    failed = sorted(folder.glob("*.failed"), key=lambda file: file.stat().st_mtime)
    if failed:
        raise _failure(failed)
    missing = [_file(folder, *role).stem for role in roles if not _file(folder, *role).exists()]
    if missing:
        raise TrainingError(
            f"after {timeout_s:.0f} s there is no result of {', '.join(missing)}: processes of this layout wait for "
            "each other for ever, or the machine is too slow (--timeout gives more time)"
        )


@contextmanager
def _safe_path() -> Iterator[None]:
    """The fork server and its tracker of resources, started within, import nothing from the working directory.

    Both are `python -c`, for which a file there takes the place of a module of the standard library (signal.py).
    """
    previous = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if previous is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = previous


def _file(folder: Path, role: str, rank: int) -> Path:
    return folder / f"{role}-{rank}.done"


def _failure(files: Sequence[Path]) -> DanluError:
    """The first error of danlu's own kind, or else the first."""
    errors = [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - written by our own processes
    for error, _ in errors:
        if isinstance(error, DanluError):
            return error
    return TrainingError(f"process {files[0].stem} of the verification failed:\n{errors[0][1]}")


def _work(folder: Path, role: str, rank: int) -> None:
    """The whole of a process: leaves ROLE-RANK.done with a `Result`, or ROLE-RANK.failed with (error, traceback)."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")  # advice about usage, which training shows once
    try:
        task: Task = pickle.loads((folder / "task").read_bytes())  # noqa: S301 - written by our own process
        if task.recipe.numerics == "exact":
            batch_invariant.enable()
        # Of all processes, those without an injected fault too: the setting in which the fault can show.
        with nullcontext() if task.fault is None else load_fault(task.fault).setting():
            result = _ROLES[role](task, folder, rank)
        done = _file(folder, role, rank)
        torch.save(result, done.with_suffix(".part"))
        done.with_suffix(".part").rename(done)
    except BaseException as error:
        content = (error if isinstance(error, DanluError) else None, traceback.format_exc())
        write_atomically(folder / f"{role}-{rank}.failed", pickle.dumps(content))
    os._exit(0)


@dataclass(frozen=True)
class _Side:
    """The layout or one process with the whole model, which builds its training again for each checkpoint."""

    task: Task
    recipe: Recipe
    ranks: Ranks
    device: torch.device
    folder: Path  # of its checkpoints

    @classmethod
    def alone(cls, task: Task, folder: Path) -> _Side:
        """One process, in the arithmetic of the layout's."""
        return cls(task, reference_recipe(task.recipe), Ranks(), torch.device(task.device), folder)

    def training(self, resumed: Path | None = None) -> ProxyTraining:
        return ProxyTraining(
            self.recipe, self.task.proxy, self.ranks, self.device, micro=self.task.micro, resumed=resumed
        )

    def start(self) -> tuple[ProxyTraining, Run]:
        training = self.training()
        return training, training.run(self.task.steps, self.folder)

    def trace(self, training: ProxyTraining, run: Run) -> Trace:
        """The steps that are compared, and the evaluation after them."""
        return trace_training(training, run, len(self.task.steps) - 1, self.task.held_out, self._take_steps())

    def take_next(self, training: ProxyTraining, run: Run, trace: Trace) -> None:
        """The step after those that were compared, of one process from the state in memory."""
        (trace.next_step,) = self._take_steps()(training, run, 1)
        trace.next_average = trace_average(training, run)

    def resume(self, checkpoint: Path, trace: Trace, result: Path | None = None) -> tuple[ProxyTraining, Run] | None:
        """Builds everything again, as another start of the program would, and takes a step from a checkpoint.

        result: the folder that the checkpoint is exported to first. Returns None where it could not be loaded, which
        the trace records.
        """
        training = self.training(resumed=checkpoint)
        run = training.run(self.task.steps)
        if _tried(trace, "loading", lambda: restore(run, checkpoint)) is None:
            return None
        if result is not None:
            trace.exported = exported_tensors(training, run, result)
        trace_resumed_step(training, run, trace, self._take_steps())
        return training, run

    def exported_from(self, checkpoint: Path, result: Path) -> Mapping[str, Tensor] | None:
        """Exports the weights of a checkpoint, without the optimizer's state."""
        training = self.training(resumed=checkpoint)
        run = training.run(self.task.steps)
        averages = {} if run.ema is None else {"ema": run.ema.state_tensors()}
        load_checkpoint(checkpoint, {"model": run.learner.weights(), **averages})
        if run.ema is not None:
            run.ema.updates = 1  # so that the average is taken for one
        return exported_tensors(training, run, result)

    def _take_steps(self) -> TakeSteps:
        """The function that takes steps: one after the other; with PipeDream a turn, which one process replays.

        With stages one parameter is without gradient up to the checkpoint, which then records it (`Optimizers`).
        """
        section = self.task.recipe.parallel.pipeline
        if self.task.layout.pipeline == 1:
            return trace_steps
        if not section.updates_each_micro_batch:
            return partial(trace_steps, withheld_until=len(self.task.steps) - 1)
        return partial(replay_turn, section=section) if self.ranks.alone else trace_turn


def _layout_rank(task: Task, folder: Path, rank: int) -> Result:
    """One process of the layout."""
    device = _init_process_group(task, folder, rank)
    ranks = ranks_of(task.layout, device.type)
    side = _Side(task, task.recipe, ranks, device, folder / "layout")
    fault = nullcontext() if task.fault is None else load_fault(task.fault).inject(task.recipe, ranks)
    with small_thresholds(), fault:
        training, run = side.start()
        trace = side.trace(training, run)
        path = None if trace.hit_non_finite else _tried(trace, "saving", lambda: save_checkpoint(run))
        if ranks.leads:
            _publish(folder / f"layout-{_CHECKPOINT}", path)
        if path is None:
            return trace, None
        trace.exported = _tried(trace, "exporting", lambda: exported_tensors(training, run, folder / "layout-result"))
        saved_by = "reference" if task.reshards else "layout"
        checkpoint = _await(folder / f"{saved_by}-{_CHECKPOINT}", task.timeout_s)
        assert checkpoint is not None, "both sides have got so far"
        if not trace.problems:
            resumed = side.resume(checkpoint, trace)
            if resumed is not None and not trace.hit_non_finite:
                trace.spoiled = spoiled_step(*resumed)
        if trace.problems or not task.measure_traffic:
            return trace, None
    # With the thresholds of training.
    return trace, measure_step_traffic(side.training(), task.steps[0])


@contextmanager
def small_thresholds() -> Iterator[None]:
    """A context with byte thresholds of collectives, for splitting or sending alone, that small models cross.

    Some gradients of a small model lie above each and some below.
    """
    with (
        replaced(gradient_buckets, "BUCKET_BYTES", _BUCKET_BYTES),
        replaced(parallel_context, "LARGE_BYTES", _LARGE_BYTES),
    ):
        yield


def _tried(trace: Trace, doing: str, work: Callable[[], T]) -> T | None:
    """Returns the result of `work`, done by several processes; None, with its error in the trace, where it fails."""
    try:
        return work()
    except (DanluError, AssertionError, RuntimeError) as error:  # of torch, where another process has given up
        trace.problems[doing] = f"{type(error).__name__}: {error}"
        return None


def _fake_world(task: Task, folder: Path, rank: int) -> Result:
    """Rank 0 of the layout, without the others."""
    with fake_process_group(task.layout.world):
        side = _Side(task, task.recipe, ranks_of(task.layout, "cpu"), torch.device("cpu"), folder)
        return Trace(), measure_step_traffic(side.training(), task.steps[0])


def _reference(task: Task, folder: Path, rank: int) -> Result:
    """One process with the whole model."""
    side = _Side.alone(task, folder / "reference")
    training, run = side.start()
    item_gradients = gradients_by_item(training, task.steps[0]) if task.trace_items else []
    by_balance = {} if side.recipe.router is None else balance_gradients(training, task.steps[0])
    trace = side.trace(training, run)
    trace.item_gradients, trace.balance_gradients = item_gradients, by_balance
    _publish(folder / f"reference-{_CHECKPOINT}", save_checkpoint(run))
    side.take_next(training, run, trace)
    checkpoint = _await(folder / f"{'layout' if task.reshards else 'reference'}-{_CHECKPOINT}", task.timeout_s)
    if checkpoint is not None:
        result = folder / "reference-result"
        if not task.reshards:
            layouts = _await(folder / f"layout-{_CHECKPOINT}", task.timeout_s)
            trace.exported = None if layouts is None else side.exported_from(layouts, result)
        side.resume(checkpoint, trace, result if task.reshards else None)
    return trace, None


def _routes(task: Task, folder: Path, rank: int) -> Result:
    """The reference, which chooses items with clear routes."""
    training, run = _Side.alone(task, folder / "routes").start()
    clear = ClearItems(training, run, task.candidates)
    compared = clear.of_steps(len(task.steps) - 1)
    held_out = None if compared is None else clear.of_evaluation(len(task.held_out))
    following = None if held_out is None else clear.of_steps(1)
    if compared is None or held_out is None or following is None:
        return Trace(), None
    return Trace(clear_items=([*compared, *following], held_out, clear.least_margin)), None


def _perturbed(task: Task, folder: Path, rank: int) -> Result:
    """The reference with initial weights that differ by rounding; without checkpoints."""
    side = _Side.alone(task, folder / "perturbed")
    training, run = side.start()
    perturb_weights(training, PERTURBATION, side.recipe.seed)
    trace = side.trace(training, run)
    side.take_next(training, run, trace)
    return trace, None


_ROLES = {
    "layout": _layout_rank,
    "reference": _reference,
    "perturbed": _perturbed,
    "routes": _routes,
    "fake_world": _fake_world,
}


def reference_recipe(recipe: Recipe) -> Recipe:
    """The recipe without the verified features: one process, all memory."""
    return recipe.model_copy(update={"parallel": type(recipe.parallel)(), "memory": type(recipe.memory)()})


def _init_process_group(task: Task, folder: Path, rank: int) -> torch.device:
    """Makes this process one of the layout's; its device."""
    world = task.layout.world
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    device = torch.device("cuda", rank) if task.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "store"), world),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=task.timeout_s),
    )
    return device


def _publish(file: Path, checkpoint: Path | None) -> None:
    """Lets the other side know where a checkpoint is; None: that there is none."""
    write_atomically(file, b"" if checkpoint is None else os.fsencode(checkpoint))


def _await(file: Path, timeout_s: float) -> Path | None:
    """The checkpoint that a side has published; None where it has none. The parent ends this process where that side
    fails.

    Raises TrainingError after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TrainingError(f"no checkpoint to resume from within {timeout_s:.0f} s")
        time.sleep(0.01)
    path = os.fsdecode(file.read_bytes())
    return Path(path) if path else None
