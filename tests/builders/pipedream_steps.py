"""Turns of PipeDream as the stages of a group take them, and the same by its formula in one process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from builders.equal_shards import assemble_equal
from builders.parallel_steps import config_of, groups_of
from builders.tiny_run import SyntheticPacks
from danlu.core.types import Pack, StepMetrics
from danlu.optim.schedules import multiplier
from danlu.parallel.layout import layout_of
from danlu.parallel.ranks import Ranks
from danlu.parallel.weight_stash import WeightStash
from danlu.recipe import Recipe, load
from danlu.recipe.sections import Parallel
from danlu.training.pipedream import train_turn
from danlu.training.state import Run
from danlu.training.step import accumulate
from danlu.training.trained_roles import RoleGradients
from danlu.verification.proxy import Proxy, ProxyTraining
from danlu.verification.trace import LocalShards, local_shards

TURN, STEPS = 6, 8
"""Steps between two checkpoints, and all: a turn longer than any pipeline, and one that is shorter than four stages."""


@dataclass
class Turns:
    """What one process saw of a run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    lines: list[tuple[int, float, float, float]] = field(default_factory=list)  # step, loss, norm, learning rate
    versions: list[int] = field(default_factory=list)  # of its weights at each update
    weights: LocalShards = field(default_factory=dict)  # at the end


def packs_of(packs: int) -> list[list[Pack]]:
    source = SyntheticPacks()
    return [[source.at(step * packs + place) for place in range(packs)] for step in range(STEPS)]


def see_turns(files: Sequence[str], packs: int, mistake: bool = False) -> dict[str, Turns]:
    """What this process sees of each recipe; with a mistake updates change the weights that passes in flight use. For a
    process that ends with it."""
    torch.set_num_threads(1)
    if mistake:
        WeightStash._copy_parameters = lambda stash: None  # type: ignore[method-assign]
    return {file: _see(file, packs) for file in files}


def _see(file: str, packs: int) -> Turns:
    recipe = load(Path(file)).recipe
    ranks = groups_of(layout_of(recipe.parallel, torch.distributed.get_world_size()))
    run, training = _run(recipe, ranks, packs)
    seen = Turns()
    run.recorders = (_Lines(seen),)
    before_update = WeightStash.before_update

    def counted(stash: WeightStash) -> None:
        before_update(stash)
        seen.versions.append(stash.num_versions)

    WeightStash.before_update = counted  # type: ignore[method-assign]
    while not run.finished:
        for step in train_turn(run):
            seen.losses.append(step.loss)
            seen.norms.append(step.norm)
    WeightStash.before_update = before_update  # type: ignore[method-assign]
    seen.weights = local_shards(training.placed, weights=True)
    return seen


def _run(recipe: Recipe, ranks: Ranks, packs: int) -> tuple[Run, ProxyTraining]:
    micro = -(-packs // ranks.layout.data)
    training = ProxyTraining(recipe, Proxy(config_of(recipe)), ranks, torch.device("cpu"), micro=micro)
    run = training.run(packs_of(packs))
    # What counts activations detaches saved weights in a run's first micro-batches: versions are kept without it too.
    run.learner = replace(run.learner, activations=None)
    run.schedule = recipe.schedule  # a rate of its own in each step
    run.cadence = replace(run.cadence, checkpoint=TURN)
    return run, training


@dataclass
class _Lines:
    seen: Turns

    def step(self, metrics: StepMetrics) -> None:
        self.seen.lines.append((metrics.step, metrics.loss, metrics.grad_norm, metrics.learning_rate))

    def evaluation(self, *args: Any) -> None:
        raise AssertionError("nothing is held out")

    def event(self, *args: Any, **values: Any) -> None:
        raise AssertionError("nothing happens")

    def close(self) -> None:
        return None


def replays(files: Sequence[str], packs: int) -> dict[str, Turns]:
    """The same in this process, which has the whole model. In one like those of the group: tests that ran before leave
    things in theirs that bits depend on."""
    torch.set_num_threads(1)
    return {file: _replayed(file, packs) for file in files}


def _replayed(file: str, packs: int) -> Turns:
    """w(t+1) = w(t) - update(grad f(w1(t-n+1), .., wn(t)))."""
    recipe = load(Path(file)).recipe
    section = recipe.parallel.pipeline
    alone = recipe.model_copy(update={"parallel": Parallel(), "memory": type(recipe.memory)()})
    run, training = _run(alone, Ranks(), packs)
    layers = len(training.placed.model.layers)  # type: ignore[attr-defined]
    stages, turns = section.stages, Turns()
    trained = {name: one for name, one in training.placed.parameters() if one.requires_grad}
    stage = {name: _stage_of(name, layers, stages) for name in trained}
    by_stage = [[one for name, one in trained.items() if stage[name] == own] for own in range(stages)]
    for start in range(0, STEPS, TURN):
        versions = [_copies(trained)]
        for t in range(min(TURN, STEPS - start)):
            delay = {own: stages - 1 - (0 if section.vertical_sync else own) for own in range(stages)}
            _load(trained, {name: versions[max(0, t - delay[own])][name] for name, own in stage.items()})
            step = start + t + 1
            # Each set of parameters is clipped by its own norm.
            roles = RoleGradients({str(own): by_stage[own] for own in range(stages)}, ())
            gradients = accumulate(run.learner, run.data_loader.take(step), step=step, clip=run.clip, roles=roles)
            _load(trained, versions[-1])
            run.optimizer.set_learning_rate(multiplier(step, STEPS, run.schedule))
            run.optimizer.step()
            run.optimizer.zero_grad()
            versions.append(_copies(trained))
            turns.losses.append(gradients.loss)
            turns.norms.append(gradients.norm)
            turns.lines.append((step, gradients.loss, gradients.norm, run.optimizer.learning_rate))
    turns.weights = local_shards(training.placed, weights=True)
    return turns


def _stage_of(name: str, layers: int, stages: int) -> int:
    """Of a model whose layers are split evenly."""
    if (layer := re.match(r"layers\.(\d+)\.", name)) is not None:
        return int(layer[1]) * stages // layers
    return 0 if name.startswith("embed_tokens") else stages - 1


def _copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@torch.no_grad()
def _load(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def weights_of(by_rank: Sequence[Turns]) -> dict[str, Tensor]:
    """The whole model at the end."""
    return assemble_equal([seen.weights for seen in by_rank])
