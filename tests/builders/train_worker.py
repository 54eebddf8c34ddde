"""`danlu train` on each process of a group, and what befalls it there."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from builders.tiny_world import tokenise_here
from danlu.recipe import load
from danlu.run import train as run
from danlu.training import loop


def train(files: Sequence[str]) -> list[tuple[int, int]]:
    """Trains each recipe, with rows tokenised in this process; (steps, exit code) of each."""
    outcomes = []
    with pytest.MonkeyPatch.context() as patch:
        tokenise_here(patch)
        for file in files:
            outcome = run.train(load(Path(file)), log=lambda line: None, stream=io.StringIO())
            outcomes.append((outcome.steps, outcome.exit_code))
    return outcomes


def interrupted(files: Sequence[str], at: int, rank: int) -> list[tuple[int, int]]:
    """As `train`, with SIGINT (Ctrl-C) for process `rank` after step `at`."""
    take_step = loop.take_step

    def take_step_and_interrupt(run: Any) -> None:
        take_step(run)
        if run.state.step == at and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGINT)

    loop.take_step = take_step_and_interrupt
    return train(files)
