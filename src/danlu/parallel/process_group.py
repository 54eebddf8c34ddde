"""Joining the process group of a run, and leaving it: torch.distributed is initialised here and nowhere else.

It is never destroyed: gloo's threads may abort a process that destroys it, or that ends in the ordinary way. A process
that has joined ends by os._exit, as `danlu train` does.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from danlu.core.errors import HangError, RecipeError, ResourceError
from danlu.core.terminal import write_to_stderr
from danlu.parallel import exit_reports
from danlu.parallel.flight_recorder import BUFFER_ENTRIES
from danlu.parallel.phase import PHASE
from danlu.parallel.rendezvous import rendezvous
from danlu.parallel.watchdog import Watchdog
from danlu.parallel.world import World, format_ranks, world_from_environment

if TYPE_CHECKING:
    from danlu.parallel.comm import Group

T = TypeVar("T")

LAUNCHER = "DANLU_LAUNCHER"
"""The environment variable with the process number of the danlu that has started this process."""

_LEAST_RENDEZVOUS_S = 300.0  # processes load torch at different speeds
_LEAVE_TIMEOUT_S = 60.0
_REPORTERS = "told"  # key in the store: how many processes have asked whether they are to report an error
_untimed = Counter[str]()  # barriers of `from_first_untimed`, by the name of the work


@dataclass
class _Membership:
    """The process group that this process has joined, with its store and watchdog."""

    store: Any
    watchdog: Watchdog
    world: World


_membership: _Membership | None = None  # None in a single process, and where something else initialised torch


def join_process_group(device: str, timeout_s: float, log: Callable[[str], None] | None = None) -> None:
    """Joins the process group that the environment describes, and starts the watchdog; does nothing in one process.

    device: cpu, cuda, or auto for cuda where there is one; a process takes the CUDA device of its local rank, or
    the only one that it sees.
    timeout_s: after which a collective has failed.
    log: tells the user of collectives that hang and of processes that do not come; by default on stderr.
    Raises RecipeError for more processes than devices, ResourceError if the others cannot be reached.
    """
    global _membership
    if dist.is_initialized():
        return
    world = world_from_environment(os.environ)
    if world is None:
        return
    on_cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    taken: str | RecipeError | None = None
    if on_cuda:
        try:
            taken = f"CUDA device {torch.cuda.get_device_properties(_take_device(world)).uuid}"
        except RecipeError as error:
            taken = error
    os.environ.update(world.variables())
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(BUFFER_ENTRIES))
    launcher = None if LAUNCHER not in os.environ else int(os.environ[LAUNCHER])
    log = log or write_to_stderr
    store = rendezvous(world, max(timeout_s, _LEAST_RENDEZVOUS_S), log, lambda: _require_launcher(launcher))
    if taken is not None:
        agree_on_devices(world, store, taken)
    _connect(world, "cpu:gloo,cuda:nccl" if on_cuda else "gloo", store, timeout_s)
    watchdog = Watchdog(
        PrefixStore("watch", store.clone()),
        world.rank,
        world.size,
        timeout_s,
        log=log,
        end=lambda text: _end(world.rank, text),
        launcher=launcher,
    ).start()
    _membership = _Membership(store, watchdog, world)


def leave_process_group() -> None:
    """Leaves the process group; to be called once the work is done, before the process ends.

    Rank 0, which may keep the store that the others ask, waits until they have left, a minute at most.
    """
    if _membership is None:
        return
    _membership.watchdog.stop()
    until = time.monotonic() + _LEAVE_TIMEOUT_S
    with suppress(dist.DistError):  # the store went with a launcher that was killed: nobody asks it any more
        left = _membership.store.add("left", 1)
        while _membership.world.rank == 0 and left < _membership.world.size and time.monotonic() < until:
            time.sleep(0.01)
            left = _membership.store.add("left", 0)


def untimed_barrier(name: str) -> None:
    """Returns when every process has come here, however long the slowest takes: a barrier without a time limit.

    name: a different one for each barrier of a run. Does nothing in a process that has not joined.
    Raises ConnectionError where another process has reported an error: it will not come.
    """
    if _membership is None:
        return
    arrived = _membership.store.add(f"assemble/{name}", 1)
    while arrived < _membership.world.size:
        if _membership.store.add(_REPORTERS, 0):
            raise ConnectionError("another process has failed")
        time.sleep(0.02)
        arrived = _membership.store.add(f"assemble/{name}", 0)


def from_first_untimed(world: Group, make: Callable[[], T], name: str) -> T:
    """`world.from_first` for work that may take longer than a collective may. name: of the work, for its barriers."""

    def barrier() -> None:
        _untimed[name] += 1
        untimed_barrier(f"{name}-{_untimed[name]}")

    return world.from_first(make, barrier=barrier)


def error_to_report(error: BaseException) -> BaseException:
    """Returns the error to report: the hang report where a collective failed after the watchdog had reported a hang."""
    if (
        _membership is not None
        and exit_reports.is_peer_failure(error)
        and (report := _membership.watchdog.report()) is not None
    ):
        return HangError(report)
    return error


def current_phase() -> str:
    """Returns the phase of this process's main thread: ``layers.3.mlp (backward, step 17)``."""
    return str(PHASE)


def is_first_to_report() -> bool:
    """Whether no other process has asked before: of several that fail at once, one reports to the user."""
    if _membership is None:
        return True
    try:
        first: bool = _membership.store.add(_REPORTERS, 1) == 1
    except dist.DistError:  # the store is gone: this process is not the first to end
        return False
    return first


def _take_device(world: World) -> int:
    """Makes a CUDA device the current one, and returns its number. Raises RecipeError if there is none."""
    number = device_of(world.rank, world.local_rank, torch.cuda.device_count())
    torch.cuda.set_device(number)
    torch.cuda.init()  # or torch's meshes would set the device of LOCAL_RANK, which may not be visible
    return number


def device_of(rank: int, local_rank: int | None, devices: int) -> int:
    """The number of the CUDA device that a process takes of the `devices` that it sees.

    It is the local rank; 0 where each process sees one device alone, as with SLURM's --gpus-per-task=1.
    Raises RecipeError if there is no device for it.
    """
    local = rank % max(1, devices) if local_rank is None else local_rank
    if local < devices:
        return local
    if devices == 1:  # its own, or the only one of the machine: `agree_on_devices` tells them apart
        return 0
    raise RecipeError(
        f"device: cuda, and process number {local} of this machine finds only {devices} CUDA devices. "
        f"Start {max(1, devices)} processes on it, or use device: cpu"
    )


def agree_on_devices(world: World, store: Any, device: str | RecipeError) -> None:
    """Checks that each process has a CUDA device of its own; NCCL refuses one that two have taken.

    Every process calls it, and all raise the same RecipeError: one that only some raise might not be reported.
    device: an identifier of this process's device, the same in all processes that see it (its UUID); or the error that
    says why it has none.
    """
    store.set(f"device/{world.rank}", json.dumps([isinstance(device, RecipeError), str(device)]))
    if world.rank == 0:
        taken: dict[str, list[int]] = {}
        problems: list[str] = []
        for rank in range(world.size):
            is_problem, text = json.loads(store.get(f"device/{rank}"))
            if is_problem:
                problems.append(f"{format_ranks([rank])}: {text}")
            else:
                taken.setdefault(text, []).append(rank)
        for name, ranks in taken.items():
            if len(ranks) > 1:
                problems.append(
                    f"device: cuda, and {format_ranks(ranks)} have all taken {name}: each process needs one of its "
                    "own. Start as many processes on a machine as it has devices (under SLURM with "
                    "--gpus-per-task=1), or use device: cpu"
                )
        store.set("devices", json.dumps(problems))
    if problems_of_all := json.loads(store.get("devices")):
        raise RecipeError(problems_of_all)


def _require_launcher(launcher: int | None) -> None:
    """Raises ResourceError in a process that has lost its launcher: nobody waits for it, and the store is gone too."""
    if launcher is not None and os.getppid() != launcher:
        raise ResourceError("the danlu that has started this process is gone")


def _connect(world: World, backend: str, store: Any, timeout_s: float) -> None:
    """Makes torch's default group. Raises ResourceError if this machine has no address that the others can reach."""
    limit = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(
            backend, store=PrefixStore("groups", store), rank=world.rank, world_size=world.size, timeout=limit
        )
    except RuntimeError as error:
        if (no_address := re.search(r"Unable to find address for: \S+", str(error))) is None:
            raise
        raise ResourceError(
            f"{no_address[0]}. Set GLOO_SOCKET_IFNAME to the network interface of "
            "this machine that the others reach (`ip address` lists them)"
        ) from error


def _end(rank: int, text: str) -> None:
    """Ends this process; its main thread may never come back."""
    exit_reports.write_report(exit_reports.ExitReport(rank, "hang", HangError.exit_code, (text,)))
    if exit_reports.EXIT_REPORT not in os.environ:
        write_to_stderr(f"error: {text}")
    sys.stdout.flush()
    os._exit(HangError.exit_code)
