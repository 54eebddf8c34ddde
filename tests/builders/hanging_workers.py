"""Processes that join as `danlu train`'s do, forked in a fraction of a second, and in which some wait for others."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from builders.fork_server import SERVER
from danlu.parallel import process_group
from danlu.parallel.comm import Group
from danlu.parallel.gradient_buckets import GradientBuckets
from danlu.parallel.phase import PHASE, track_modules


def begin(worker: Callable[..., Any], size: int, timeout_s: float, *args: Any) -> Callable[[], list[Any]]:
    """Starts so many processes that call `worker(said, *args)`, and returns what waits for them.

    That returns what each of them returned, as JSON has it; None of one that did not. said: the list of what the watch
    has told in this process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.TemporaryDirectory(prefix="joined-")
    processes: list[Any] = [
        SERVER.Process(target=_work, args=(worker, rank, size, port, timeout_s, folder.name, args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()

    def end() -> list[Any]:
        with folder:
            until = time.monotonic() + 60
            while time.monotonic() < until and any(process.is_alive() for process in processes):
                time.sleep(0.02)
            for process in processes:
                process.kill()
                process.join()
            files = [Path(folder.name, f"{rank}.json") for rank in range(size)]
            return [json.loads(file.read_text()) if file.exists() else None for file in files]

    return end


def _work(
    worker: Callable[..., Any], rank: int, size: int, port: int, timeout_s: float, folder: str, args: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    said: list[str] = []
    process_group.join_process_group("cpu", timeout_s, said.append)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    try:
        result = worker(said, *args)
    except RuntimeError as error:
        result = {
            "error": str(process_group.error_to_report(error)),
            "kind": type(process_group.error_to_report(error)).__name__,
            "said": said,
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    process_group.leave_process_group()
    os._exit(0)


def skipping(said: list[str], skips: list[int], asleep_s: float) -> Any:
    """All sum together; in the third step those that skip sleep in another layer instead."""
    rank = dist.get_rank()
    for step in (1, 2, 3):
        PHASE.begin("backward" if rank not in skips else "forward", step)
        PHASE.module = "layers.3.mlp" if rank not in skips else "layers.2.attention"
        if step == 3 and rank in skips:
            time.sleep(asleep_s)
        else:
            dist.all_reduce(torch.ones(2, 3))
    return said


def crossing(said: list[str], asleep_s: float) -> Any:
    """Ranks 0 and 1 in their group, 2 and 3 in theirs; in the latter 2 sums while 3 waits in the group of all."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    dist.all_reduce(torch.ones(1), group=mine)
    if rank == 3:
        dist.broadcast(torch.ones(1), 0)
    elif rank == 2:
        dist.all_reduce(torch.ones(4), group=mine)
    else:
        time.sleep(asleep_s)
    return said


def slow(said: list[str], pause_s: float, steps: int) -> Any:
    """Rank 1 is late to every step, but it comes."""
    for _ in range(steps):
        if dist.get_rank() == 1:
            time.sleep(pause_s)
        dist.all_reduce(torch.ones(1))
    return said


def late(said: list[str], pause_s: float) -> Any:
    """Rank 1 comes after it has been told of, and before the time is up."""
    if dist.get_rank() == 1:
        time.sleep(pause_s)
    dist.all_reduce(torch.ones(1))
    time.sleep(1)
    return said


def marked(said: list[str], asleep_s: float) -> Any:
    """Where gradients are being summed in buckets while rank 1 stays away: after the backward of its first layer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    group = Group("data", (0, 1), dist.get_rank(), dist.group.WORLD)
    buckets = GradientBuckets(list(model.named_parameters()), group)
    track_modules(model)
    PHASE.begin("forward", 1)
    loss = model(torch.ones(2, 4)).sum()
    PHASE.begin("backward")
    if dist.get_rank() == 1:
        time.sleep(asleep_s)
    buckets.prepare_backward(True)
    loss.backward()
    buckets.finish()
    return said
