"""Steps of a classifier in some layout, as each process of a group sees them, and in one process."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.core.shard_box import ShardBox
from danlu.optim.build import build
from danlu.parallel.comm import world_size
from danlu.parallel.layout import layout_of
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import ranks_of
from danlu.recipe import Recipe, load
from danlu.run import train as run
from danlu.stages.classifier import PlacedClassifier
from danlu.stages.table import STAGES
from danlu.training.evaluation import evaluate
from danlu.training.step import accumulate

Parts = dict[str, tuple[ShardBox, Tensor]]
STEPS = (7, 8, 3)  # images: uneven, even, and fewer than four processes


class RepeatedRows(ParallelContext):
    """A mistake: every process takes the first items of a step."""

    def local_range(self, items: Sequence[Any]) -> range:
        return range(len(items) // self.ranks.data.size)


@dataclass
class Seen:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Parts] = field(default_factory=list)
    weights: Parts = field(default_factory=dict)
    evaluation: Mapping[str, float] = field(default_factory=dict)


def recipe_of(folder: str, shard: str, precision: str = "fp32", **changes: str) -> Recipe:
    """A recipe over a folder of images; its run folder, which is not used, is beside it."""
    file = Path(folder).parent / f"{shard}-{precision}-{os.getpid()}.yaml"
    file.write_text(
        f"stage: classify\nmodel: {{preset: lenet5}}\n"
        f"data: {{train: {folder}, eval: [{{path: {folder}, split: test}}]}}\n"
        f"optimizer: {{kind: adamw, learning_rate: 1e-3}}\nschedule: {{kind: constant, warmup: 0}}\n"
        f"batch: {{sequences: 8, micro: 2}}\nprecision: {precision}\nparallel: {shard}\noutput: {file}.run\n"
    )
    return load(file, [f"{key}={value}" for key, value in changes.items()]).recipe


def see(folder: str, shards: Sequence[str], fault: str | None = None) -> dict[str, Seen]:
    torch.set_num_threads(1)
    return {shard: _see(recipe_of(folder, shard), fault) for shard in shards}


def _see(recipe: Recipe, fault: str | None) -> Seen:
    stage, device = STAGES["classify"], torch.device("cpu")
    ranks = ranks_of(layout_of(recipe.parallel, world_size()), "cpu")
    stage_data = stage.reader(recipe).read(io.StringIO())
    placed = stage.builder(recipe, stage).place(ranks, device, None, stage_data).policy
    learner = placed.learner(2)
    if fault == "no sum":
        parallel = replace(learner.parallel, finish_backward=lambda: None)
        prepare = learner.parallel.prepare_backward
        learner = replace(
            learner, parallel=replace(parallel, prepare_backward=lambda is_last, chunk: prepare(False, chunk))
        )
    if fault == "repeated rows":
        learner = replace(learner, parallel=RepeatedRows(**vars(learner.parallel)))
    optimizer = build(placed.parameters(), recipe.optimizer)
    seen, taken = Seen(), 0
    for step, count in enumerate(STEPS, 1):
        images = [stage_data.source.at(taken + place) for place in range(count)]
        taken += count
        found = accumulate(learner, images, step=step, clip=None, holders=optimizer.gradient_holders())
        assert found.totals.tokens == count
        seen.losses.append(found.loss)
        seen.norms.append(found.norm)
        seen.gradients.append(_held(placed, {name: one.grad for name, one in placed.parameters()}))
        optimizer.step()
        optimizer.zero_grad()
        learner.parallel.reshard()
    seen.weights = _held(placed, placed.weights())
    scores = evaluate(learner, stage_data.held_out or ())
    assert scores is not None
    seen.evaluation = {**scores.values(), "trained": scores.trained_tokens}
    return seen


def _held(placed: PlacedClassifier, tensors: Mapping[str, Tensor | None]) -> Parts:
    held = placed.parallel.local_parameters
    return {
        name: (held[name].box if held else ShardBox.full(tensor.shape), tensor.detach().clone())
        for name, tensor in tensors.items()
        if tensor is not None
    }


def train(file: str) -> list[str]:
    """A whole run of a recipe; what this process said."""
    torch.set_num_threads(1)
    said: list[str] = []
    run.train(load(Path(file)), log=said.append, stream=io.StringIO())
    return said
