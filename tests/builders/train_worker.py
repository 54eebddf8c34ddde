"""`danlu train` on each process of a group, and what befalls it there."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from danlu import run
from danlu.recipe import load
from danlu.train import loop


def train(files: Sequence[str]) -> list[tuple[int, int]]:
    """Steps and exit code of each run."""
    found = []
    for file in files:
        outcome = run.train(load(Path(file)), say=lambda line: None, stream=io.StringIO())
        found.append((outcome.steps, outcome.exit_code))
    return found


def interrupted(files: Sequence[str], at: int, rank: int) -> list[tuple[int, int]]:
    """The same, with Ctrl-C for one of the processes after step `at`."""
    take_step = loop.take_step

    def step(of: Any) -> None:
        take_step(of)
        if of.state.step == at and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGINT)

    loop.take_step = step
    return train(files)
