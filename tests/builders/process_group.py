"""A group of processes that runs one function with many checks, judged by what each wrote and never by an exit code.

Each process of a group is a fork of one that has everything imported, so a group starts in a fraction of a second.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from builders.fork_server import SERVER

Worker = Callable[..., Any]


def run_group(worker: Worker, size: int, *args: Any, timeout: float = 240.0) -> list[Any]:
    """What `worker(*args)` returned in each of `size` processes that are one gloo group, by rank.

    worker: a function of a module (it travels by name). What it returns is saved by torch.save, so tensors are fine.
    Raises AssertionError with the traceback of the first rank that raised, or the ranks that never came to an end.
    """
    with tempfile.TemporaryDirectory(prefix="group-") as name:
        folder = Path(name)
        processes: list[Any] = [
            SERVER.Process(target=_work, args=(worker, rank, size, str(folder), timeout, args), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            if list(folder.glob("*.failed")):
                time.sleep(0.5)  # the others may have a word to say as well
                break
            time.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
        failed = sorted(folder.glob("*.failed"), key=lambda file: file.stat().st_mtime)
        if failed:
            raise AssertionError(f"rank {failed[0].stem} failed:\n{failed[0].read_text()}")
        missing = [rank for rank in range(size) if not (folder / f"{rank}.done").exists()]
        assert not missing, f"ranks {missing} of {size} wrote no result within {timeout} s"
        return [torch.load(folder / f"{rank}.done", weights_only=False) for rank in range(size)]


def _work(worker: Worker, rank: int, size: int, folder: str, timeout: float, args: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        result = worker(*args)
        torch.save(result, f"{folder}/{rank}.part")
        os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.done")
    except BaseException:
        Path(f"{folder}/{rank}.writing").write_text(traceback.format_exc())
        os.rename(f"{folder}/{rank}.writing", f"{folder}/{rank}.failed")
    # gloo's threads may abort a process that ends in the ordinary way.
    os._exit(0)
