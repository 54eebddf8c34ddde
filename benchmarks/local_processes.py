"""Runs a function in a group of processes on this machine, for benchmarks of what several processes do together."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def in_group(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """What `function(*arguments)` returns in each of `size` gloo processes of one thread each, by rank.

    function: one of a module, for it travels by name.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, (size, folder, function, arguments), nprocs=size)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


def _work(rank: int, size: int, folder: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    torch.save(function(*arguments), f"{folder}/{rank}.pt")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends in the ordinary way
