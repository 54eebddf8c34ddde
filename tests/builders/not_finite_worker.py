"""What processes say of a loss that is not finite, each of its own, in layouts that hold a model in parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from builders.parallel_steps import config_of, steps_of
from danlu.errors import TrainingError
from danlu.parallel.layout import layout_of
from danlu.parallel.ranks import ranks_of
from danlu.recipe import load
from danlu.train.step import accumulate
from danlu.verify.decoder_proxy import DecoderProxy
from danlu.verify.proxy import ProxyTraining

WEIGHT = "layers.1.mlp.up_proj.weight"


def said(files: Sequence[str], world: int) -> list[tuple[str, str]]:
    """For each recipe: with too large a weight on all processes, and with one that is not finite on the last."""
    torch.set_num_threads(1)
    return [(_said(file, world, last=False), _said(file, world, last=True)) for file in files]


def _said(file: str, world: int, *, last: bool) -> str:
    recipe = load(Path(file)).recipe
    ranks = ranks_of(layout_of(recipe.parallel, world), "cpu")
    learning = ProxyTraining(recipe, DecoderProxy(config_of(recipe)), ranks, torch.device("cpu"), micro=1)
    weight = dict(learning.placed.parameters())[WEIGHT].detach()
    if not last:
        weight.fill_(3e38)
    elif ranks.world.index == world - 1:
        weight.view(-1)[0] = torch.nan
    try:
        accumulate(learning.learner, steps_of(1, 2)[0], step=3, clip=None)
    except TrainingError as error:
        return str(error)
    return "nothing"
