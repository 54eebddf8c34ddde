"""Runs of PipeDream on each process of a group, and what befalls them there."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from danlu.core.errors import DanluError
from danlu.recipe import load
from danlu.run.train import train
from danlu.training import pipedream


def told(files: Sequence[str]) -> list[tuple[list[str], str]]:
    """Trains each recipe; what it says, and the error that it ends with."""
    outcomes = []
    for file in files:
        lines: list[str] = []
        error = ""
        try:
            train(load(Path(file)), log=lines.append, stream=io.StringIO())
        except DanluError as problem:
            error = f"{type(problem).__name__}: {problem}"
        outcomes.append((lines, error))
    return outcomes


def interrupted_in_a_turn(file: str, at: int, rank: int) -> tuple[int, int]:
    """Trains, with SIGINT for process `rank` once its weights have the update of step `at`; (steps, exit code)."""
    update = pipedream._Turn.update

    def update_and_interrupt(turn: Any, micro: int) -> None:
        update(turn, micro)
        if turn._trained[micro].number == at and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGINT)

    pipedream._Turn.update = update_and_interrupt  # type: ignore[method-assign]
    outcome = train(load(Path(file)), log=lambda line: None, stream=io.StringIO())
    pipedream._Turn.update = update  # type: ignore[method-assign]
    return outcome.steps, outcome.exit_code


def interrupted_runs(in_turn: str, at_flush: str) -> list[tuple[int, int]]:
    """The first recipe with a signal for the second process in step 3, the other one after its evaluation in step 6."""
    from builders.train_worker import interrupted

    return [interrupted_in_a_turn(in_turn, 3, 1), *interrupted([at_flush], 6, 0)]
