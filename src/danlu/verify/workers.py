"""The processes of a verification: the recipe's layout as a group, and beside it one process, on this machine.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from danlu.errors import DanluError, TrainingError
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.parallel.traffic_counter import fake_process_group
from danlu.recipe import Recipe
from danlu.types import Item
from danlu.verify.collective_traffic import StepTraffic, measure_step_traffic
from danlu.verify.fault_injection import FAULTS
from danlu.verify.proxy import Proxy
from danlu.verify.trace import (
    ProxyTraining,
    Trace,
    go_on,
    gradients_by_item,
    observe,
    perturb,
    save_checkpoint,
    take_step,
)

PERTURBATION = 2.0**-22
"""By which share of itself each number is changed where the effect of rounding is measured: two units of float32."""
Result = tuple[Trace, StepTraffic | None]
_MARK = "checkpoint-is-in"
_SECONDS_TO_TELL = 0.5  # for other processes, once one has failed


@dataclass(frozen=True)
class Task:
    """What all processes of a verification are told."""

    recipe: Recipe
    proxy: Proxy
    layout: Layout
    steps: Sequence[Sequence[Item]]  # one more than are compared: the last is taken after a checkpoint was loaded
    held_out: Sequence[Item]
    micro: int
    device: str  # "cpu" or "cuda"
    by_item: bool = True  # whether one process tells what each item adds to the first gradient
    traffic: bool = False
    reshards: bool = True  # whether each side takes up the other's checkpoint; or its own, where state cannot be cut
    fault: str | None = None  # of `faults.FAULTS`, injected into the processes of the layout
    counted_in: str = "packed sequences"  # what items are called
    timeout_s: float = 300.0


@dataclass(frozen=True)
class Observed:
    """What came of a task."""

    many: list[Trace]  # by rank
    one: Trace
    perturbed: Trace  # one process again, with first weights that differ by rounding
    sending: StepTraffic | None = None  # of the first process in a step, where asked for
    reshards: bool = True  # as the task had it


def observed(task: Task) -> Observed:
    """Runs a task in its layout, in one process, and in one whose first weights differ by rounding, side by side.

    Raises the DanluError of the first process that had one, TrainingError for one that failed otherwise or did not come
    to an end in time.
    """
    with tempfile.TemporaryDirectory(prefix="danlu-verify-") as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps(task))
        roles = [*(("many", rank) for rank in range(task.layout.world)), ("one", 0), ("perturbed", 0)]
        _run(folder, roles, task.timeout_s)
        found = {role: _result(folder, *role) for role in roles}
        many = [found["many", rank] for rank in range(task.layout.world)]
        return Observed(
            [seen for seen, _ in many], found["one", 0][0], found["perturbed", 0][0], many[0][1], task.reshards
        )


def pretended_traffic(task: Task) -> StepTraffic:
    """What the first process of a layout sends in a step, though there are no others. Raises as `observed` does."""
    with tempfile.TemporaryDirectory(prefix="danlu-verify-") as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps(task))
        _run(folder, [("pretended", 0)], task.timeout_s)
        _, sending = _result(folder, "pretended", 0)
        assert sending is not None
        return sending


def _run(folder: Path, roles: Sequence[tuple[str, int]], timeout_s: float) -> None:
    server = multiprocessing.get_context("forkserver")
    kinds = ["danlu.verify.classifier_proxy", "danlu.verify.decoder_proxy"]
    server.set_forkserver_preload(["danlu.verify.workers", *kinds, "torch.distributed.fsdp", "torch.nn.parallel"])
    processes: list[Any] = [server.Process(target=_work, args=(str(folder), *role), daemon=True) for role in roles]
    try:
        with _safe_path():
            for process in processes:
                process.start()
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and any(process.is_alive() for process in processes):
            if any(folder.glob("*.failed")):
                time.sleep(_SECONDS_TO_TELL)
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
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def _file(folder: Path, role: str, rank: int) -> Path:
    return folder / f"{role}-{rank}.done"


def _result(folder: Path, role: str, rank: int) -> Result:
    # Written a moment ago by a process of ours, into a folder that only this user can read.
    found: Result = torch.load(_file(folder, role, rank), weights_only=False)
    return found


def _failure(files: Sequence[Path]) -> DanluError:
    """The first error of danlu's own kind, or else the first."""
    told = [pickle.loads(file.read_bytes()) for file in files]  # noqa: S301 - written by our own processes
    for error, _ in told:
        if isinstance(error, DanluError):
            return error
    name = files[0].stem
    return TrainingError(f"process {name} of the verification failed:\n{told[0][1]}")


def _work(folder: str, role: str, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")  # what torch would have us do otherwise; told once by training
    place = Path(folder)
    try:
        task: Task = pickle.loads((place / "task").read_bytes())  # noqa: S301 - written by our own process
        result = _ROLES[role](task, place, rank)
        done = _file(place, role, rank)
        torch.save(result, done.with_suffix(".part"))
        done.with_suffix(".part").rename(done)
    except BaseException as error:
        failed = place / f"{role}-{rank}.failed"
        told = (error if isinstance(error, DanluError) else None, traceback.format_exc())
        failed.with_suffix(".writing").write_bytes(pickle.dumps(told))
        failed.with_suffix(".writing").rename(failed)
    os._exit(0)


def _many(task: Task, folder: Path, rank: int) -> Result:
    """One process of the layout."""
    device = _join(task, folder, rank)
    ranks = ranks_of(task.layout, device.type)
    with _injected(task, ranks):
        learning, run = _begun(task, task.recipe, ranks, device, folder / "many")
        seen = observe(learning, task.steps[:-1], task.held_out, run=run)
        path = None if seen.ended else save_checkpoint(run)
        if ranks.leads:
            _tell(folder / f"many-{_MARK}", path)
        if path is None:
            return seen, None
        theirs = _await(folder / f"{'one' if task.reshards else 'many'}-{_MARK}", task.timeout_s)
        assert theirs is not None, "both sides have got so far"
        _resume(task, task.recipe, ranks, device, theirs, seen)
    return seen, measure_step_traffic(learning, task.steps[0]) if task.traffic else None


def _pretended(task: Task, folder: Path, rank: int) -> Result:
    """The first process of the layout, without the others."""
    with fake_process_group(task.layout.world):
        ranks = ranks_of(task.layout, "cpu")
        learning = ProxyTraining.of(task.recipe, task.proxy, ranks, torch.device("cpu"), micro=task.micro)
        return Trace(), measure_step_traffic(learning, task.steps[0])


def _one(task: Task, folder: Path, rank: int) -> Result:
    return _alone(task, folder, perturbed=False)


def _perturbed(task: Task, folder: Path, rank: int) -> Result:
    return _alone(task, folder, perturbed=True)


_ROLES = {"many": _many, "one": _one, "perturbed": _perturbed, "pretended": _pretended}


def _alone(task: Task, folder: Path, *, perturbed: bool) -> Result:
    """One process with the whole model, in the arithmetic of the layout's."""
    recipe, device = reference(task.recipe), torch.device(task.device)
    learning, run = _begun(task, recipe, Ranks(), device, folder / ("perturbed" if perturbed else "one"))
    if perturbed:
        perturb(learning, PERTURBATION, recipe.seed)
    by_item = gradients_by_item(learning, task.steps[0]) if task.by_item and not perturbed else []
    seen = observe(learning, task.steps[:-1], task.held_out, run=run)
    seen.by_item = by_item
    if not perturbed:
        _tell(folder / f"one-{_MARK}", save_checkpoint(run))
    seen.next = take_step(learning, run)
    if not perturbed:
        theirs = _await(folder / f"{'many' if task.reshards else 'one'}-{_MARK}", task.timeout_s)
        if theirs is not None:
            _resume(task, recipe, Ranks(), device, theirs, seen)
    return seen, None


def reference(recipe: Recipe) -> Recipe:
    """The recipe without what verification is about."""
    return recipe.model_copy(update={"parallel": type(recipe.parallel)(), "memory": type(recipe.memory)()})


def _begun(task: Task, recipe: Recipe, ranks: Ranks, device: torch.device, folder: Path) -> tuple[ProxyTraining, Any]:
    learning = ProxyTraining.of(recipe, task.proxy, ranks, device, micro=task.micro)
    return learning, learning.run(task.steps, folder)


def _resume(task: Task, recipe: Recipe, ranks: Ranks, device: torch.device, checkpoint: Path, seen: Trace) -> None:
    """Anew, as another start of the program would, from a checkpoint."""
    learning = ProxyTraining.of(recipe, task.proxy, ranks, device, micro=task.micro, resumed=checkpoint)
    go_on(learning, learning.run(task.steps), checkpoint, seen)


def _join(task: Task, folder: Path, rank: int) -> torch.device:
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


@contextmanager
def _injected(task: Task, ranks: Ranks) -> Iterator[None]:
    if task.fault is None:
        yield
    else:
        with FAULTS[task.fault].injected(task.recipe, ranks):
            yield


def _tell(mark: Path, path: Path | None) -> None:
    writing = mark.with_suffix(".writing")
    writing.write_text("" if path is None else str(path))
    writing.rename(mark)


def _await(mark: Path, timeout_s: float) -> Path | None:
    """What the other side has told, None where it has no checkpoint; the parent ends this process where that fails."""
    until = time.monotonic() + timeout_s
    while not mark.exists():
        if time.monotonic() > until:
            raise TrainingError(f"no checkpoint to take up within {timeout_s:.0f} s")
        time.sleep(0.01)
    told = mark.read_text()
    return Path(told) if told else None
