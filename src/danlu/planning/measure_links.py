"""Measures this machine with several processes at once: each one's operations, and the links between them.

The processes compute at the same time, as those of a run do, and share memory and caches meanwhile. On a CPU they talk
by gloo over loopback, on GPUs by NCCL. Collectives come behind products there, as in a step: a process waits for the
slowest one, and caches hold nothing of theirs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from danlu.core.errors import ResourceError
from danlu.core.worker_process import Caller, WorkerProcess, decoded
from danlu.parallel.comm import Group, new_group
from danlu.planning.machine_profile import PRODUCT_BEFORE, Collective, Machine, MachineProfile
from danlu.planning.measure_machine import POINT_S, SIZES, Axis, Sizes, measure_tables
from danlu.planning.measured_table import Table

_START = "from danlu.planning.measure_links import serve; serve()"
_LIMIT_S = 1800.0
_CALLS_BYTES, _FEWEST_CALLS, _MOST_CALLS = 1 << 26, 5, 50


@dataclass(frozen=True)
class _Request:
    """The part of one process."""

    machine: Machine
    sizes: Sizes
    point_s: float
    rank: int
    folder: str  # of the store at which the processes rendezvous


def measure_machine(machine: Machine, point_s: float = POINT_S, sizes: Sizes | None = None) -> MachineProfile:
    """Measures this machine and returns its profile; of one process in this one.

    Raises ResourceError where a process ends before it has measured.
    """
    sizes = sizes or SIZES[machine.device]
    if machine.processes > 1:
        tables = _measure_together(machine, point_s, sizes)
    else:
        before = torch.get_num_threads()
        torch.set_num_threads(machine.threads)
        try:
            tables = measure_tables(machine.device, sizes, point_s)
        finally:
            torch.set_num_threads(before)
    return MachineProfile(machine, tables, datetime.now(UTC).isoformat(timespec="seconds"))


def _measure_together(machine: Machine, point_s: float, sizes: Sizes) -> dict[str, Table]:
    """The tables that the first of several processes has measured while the others did the same."""
    variables = {"OMP_NUM_THREADS": str(machine.threads), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory(prefix="danlu-links-") as folder:
        workers = [
            WorkerProcess(_START, _Request(machine, sizes, point_s, rank, folder), variables=variables)
            for rank in range(machine.processes)
        ]
        try:
            replies = [worker.receive(_LIMIT_S) for worker in workers]
            failures = [worker.ending() for worker, reply in zip(workers, replies, strict=True) if reply is None]
        except TimeoutError:
            raise ResourceError(
                f"the links between {machine.processes} processes: no answer in {_LIMIT_S:g} s"
            ) from None
        finally:
            for worker in workers:
                worker.end()
    if failures:
        raise ResourceError(f"one of {machine.processes} measuring processes {failures[0]}")
    return {name: Table.from_json(table) for name, table in decoded(replies[0]).items()}


def serve() -> None:
    """Measures as one of several processes: the statement of a worker."""
    caller = Caller()
    request: _Request = caller.receive()
    machine = request.machine
    torch.set_num_threads(machine.threads)
    if machine.device == "cuda":
        torch.cuda.set_device(request.rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if machine.device == "cuda" else "gloo",
        store=dist.FileStore(str(Path(request.folder) / "store"), machine.processes),  # type: ignore[attr-defined]
        rank=request.rank,
        world_size=machine.processes,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    group = new_group("links", range(machine.processes))

    def agreed(axes: list[Axis]) -> list[Axis]:  # so that all measure the same operation at the same time
        return group.broadcast_object(axes, 0)

    tables = measure_tables(machine.device, request.sizes, request.point_s, agreed)
    tables |= _measure_links(machine, request.sizes, group)
    caller.reply({name: table.to_json() for name, table in tables.items()})
    caller.receive()  # nothing comes: the caller ends all processes once it has all replies


def _measure_links(machine: Machine, sizes: Sizes, group: Group) -> dict[str, Table]:
    """The tables of collectives between all processes; of messages between the first and the second."""
    device = torch.device(machine.device)
    before_each = _products_before(machine)
    calls: dict[Collective, Callable[[torch.Tensor], Any]] = {
        "all_reduce": group.sum,
        "all_gather": lambda x: group.all_gather(x[: len(x) // group.size]),
        "reduce_scatter": group.reduce_scatter,
        "all_to_all": lambda x: group.all_to_all(x, *[[len(x) // group.size] * group.size] * 2),
        "send": lambda x: _echo(group, x),
    }
    tables: dict[str, Table] = {}
    for kind, call in calls.items():
        seconds = []
        for count in sizes.message_bytes:
            elements = -(-count // 4 // group.size) * group.size
            message = torch.zeros(elements, device=device)
            if kind == "send":  # its ranks do not wait for each other: that is a pipeline's bubble
                seconds.append(_seconds(call, message, count) / 2)
            else:
                seconds.append(_seconds(call, message, count, before_each))
        tables[kind] = Table.rising((sizes.message_bytes,), seconds)
    meanwhile = []
    for count in sizes.message_bytes:
        message = torch.zeros(count // 4, device=device)
        meanwhile.append(_seconds_meanwhile(group, message, _seconds(group.sum, message, count)))
    tables["all_reduce_meanwhile"] = Table.rising((sizes.message_bytes,), meanwhile)
    return tables


def _products_before(machine: Machine) -> Callable[[], object]:
    """Returns the call that comes before each collective: a product on a CPU, nothing elsewhere."""
    if machine.device != "cpu":
        return lambda: None
    rows, outputs, inputs = PRODUCT_BEFORE
    return partial(F.linear, torch.zeros(rows, inputs), torch.zeros(outputs, inputs))


def _seconds_meanwhile(group: Group, x: torch.Tensor, alone_s: float) -> float:
    """Seconds by which products that take twice as long as a sum of x take longer while it goes on."""
    matrix = torch.zeros(256, 256, device=x.device)

    def products(calls: int) -> None:
        for _ in range(calls):
            matrix @ matrix

    def sum_and_products(calls: int) -> None:
        pending = group.sum_async(x)
        products(calls)
        pending.wait()

    of_one = _seconds(lambda _: products(8), x, _CALLS_BYTES) / 8
    calls = group.broadcast_object(max(1, round(2 * alone_s / of_one)), 0)
    together, apart = (
        _seconds(lambda _, run=run: run(calls), x, x.nbytes)  # type: ignore[misc]
        for run in (sum_and_products, products)
    )
    return max(1e-9, together - apart)


def _seconds(
    call: Callable[[torch.Tensor], Any],
    x: torch.Tensor,
    count: int,
    before_each: Callable[[], object] = lambda: None,
) -> float:
    """Seconds of a call that all processes make as often, the median.

    before_each: what each process computes before each call, in its own time: the others wait for the slowest.
    """
    times = []
    for _ in range(1 + max(_FEWEST_CALLS, min(_MOST_CALLS, _CALLS_BYTES // count))):
        before_each()
        started = time.perf_counter()
        call(x)
        if x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return max(1e-9, statistics.median(times[1:]))


def _echo(group: Group, x: torch.Tensor) -> None:
    """Sends x from the first to the second process and back."""
    if group.index == 0:
        group.exchange([(x, 1)], [])
        group.exchange([], [(x, 1)])
    elif group.index == 1:
        group.exchange([], [(x, 0)])
        group.exchange([(x, 0)], [])
