"""What processes say of a loss that is not finite, each of its own, in layouts that hold a model in parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from builders.parallel_steps import config_of, groups_of, steps_of
from danlu.core.errors import ResourceError, TrainingError
from danlu.parallel.layout import layout_of
from danlu.recipe import Recipe, load
from danlu.training.loop import broken_weights, train_step
from danlu.training.step import StepObserver, accumulate
from danlu.verification.proxy import Proxy, ProxyTraining

WEIGHT = "layers.1.mlp.up_proj.weight"


def all_said(files: Sequence[str], world: int) -> tuple[list[tuple[str, ...]], list[str]]:
    """`said` of all recipes, and `evaluations` of the first."""
    return said(files, world), evaluations(files[0], world)


def said(files: Sequence[str], world: int) -> list[tuple[str, ...]]:
    """For each recipe: with too large a weight on all processes, with one that is not finite on the last, with a
    gradient that is not finite on the last, and with an update that made such a weight there; and with no mistake."""
    torch.set_num_threads(1)
    return [(_said(file, world, last=False), _said(file, world, last=True), *_of_step(file, world)) for file in files]


def _said(file: str, world: int, *, last: bool) -> str:
    recipe = load(Path(file)).recipe
    learning = _learning(recipe, world)
    ranks = learning.ranks
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


def evaluations(file: str, world: int) -> list[str]:
    """What an evaluation ends with that fails on no process, on all alike, on the last, and on all of its own."""
    learning = _learning(load(Path(file)).recipe, world)
    rank = learning.ranks.world.index
    texts: list[str | None] = [None, "no room", "no room" if rank == world - 1 else None, f"no room for {rank}"]
    run = learning.run(steps_of(1, 2))
    found = [run.agreed(None if text is None else ResourceError(text)) for text in texts]
    return ["" if failure is None else f"{failure.kind.__name__}: {failure.text}" for failure in found]


def _of_step(file: str, world: int) -> tuple[str, str, str]:
    learning = _learning(load(Path(file)).recipe, world)
    parameters, is_last = dict(learning.placed.parameters()), learning.ranks.world.index == world - 1
    run = learning.run(steps_of(1, 2))

    def spoil(scale: float) -> None:
        gradient = parameters[WEIGHT].grad
        if is_last and gradient is not None:
            gradient.view(-1)[0] = torch.nan

    fine = broken_weights(run)
    try:
        train_step(run, StepObserver(before_clipping=spoil))
        of_gradient = "nothing"
    except TrainingError as error:
        of_gradient = str(error)
    if is_last:
        parameters[WEIGHT].detach().view(-1)[0] = torch.nan
    return of_gradient, str(broken_weights(run)), "" if fine is None else str(fine)


def _learning(recipe: Recipe, world: int) -> ProxyTraining:
    ranks = groups_of(layout_of(recipe.parallel, world))
    return ProxyTraining(recipe, Proxy(config_of(recipe)), ranks, torch.device("cpu"), micro=1)
