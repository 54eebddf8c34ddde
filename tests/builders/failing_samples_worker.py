"""Runs of several processes whose samples fail on one of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch

from danlu.core.errors import DanluError, ModelError
from danlu.parallel.comm import world_size
from danlu.recipe import load
from danlu.run.train import train
from danlu.stages.placed import PlacedDecoder
from danlu.training.state import Generate, Samples


def ended(file: str, failing: int, rank_only: bool) -> tuple[str, str]:
    """Trains a recipe; what it ended with on this process: the kind of error, and its text.

    failing: rank on which samples fail; without rank_only on all of them.
    """
    torch.set_num_threads(1)
    rank = torch.distributed.get_rank()

    def generate(placed: PlacedDecoder) -> Generate:
        def write(prompts: Sequence[str]) -> Samples:
            if rank == failing or not rank_only:
                raise ModelError("not finite at position 9")
            return Samples([""] * len(prompts))

        return write

    PlacedDecoder.generate = generate  # type: ignore[method-assign]
    assert world_size() == 2
    try:
        train(load(Path(file)), log=lambda line: None, stream=io.StringIO())
    except DanluError as error:
        return type(error).__name__, str(error)
    return "", "finished"
