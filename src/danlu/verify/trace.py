"""What a process sees while it trains a few steps of a recipe in some layout: losses, gradients, norms, weights.

Everything is taken from the same calls that `danlu train` makes; only the gradient is looked at before it is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from danlu.errors import TrainingError
from danlu.numerics.loss_scaling import LossScaler
from danlu.optim.clip import clip_grad_norm
from danlu.optim.ema import Ema
from danlu.parallel.comm import ALONE, new_group
from danlu.parallel.ranks import Ranks
from danlu.placing import optimizer_of
from danlu.recipe import Recipe
from danlu.recipe.sections import Schedule
from danlu.recipe.sections import Watch as WatchSection
from danlu.shard_box import ShardBox
from danlu.stage_protocols import PlacedModel
from danlu.train.checkpoints.store import CheckpointStore
from danlu.train.evaluation import evaluate
from danlu.train.loop import save, train_step
from danlu.train.position import Feed
from danlu.train.signals import StopRequest
from danlu.train.state import Cadence, Run, restore
from danlu.train.step import StepObserver
from danlu.train.watch import Watch
from danlu.types import Item, Totals
from danlu.verify.data import Listed
from danlu.verify.proxy import PlacedProxy, Proxy

Parts = Mapping[str, tuple[ShardBox, Tensor]]
"""What one process holds of each tensor, by name."""
_STEADY = Schedule(kind="constant", warmup=0)  # a warm-up would make the first steps too small to see
_FP16_SCALE = 1024.0


@dataclass
class StepTrace:
    """One optimizer step."""

    loss: float
    norm: float  # before clipping
    clipped: float  # after
    trained_tokens: int
    gradients: Parts  # of the mean loss, before clipping
    weights: Parts  # after the update


@dataclass(frozen=True)
class ItemGradient:
    """What one pack or image of a step adds to it."""

    weight: float
    gradients: Parts  # of the step's mean loss


@dataclass
class Trace:
    """All that one process saw."""

    steps: list[StepTrace] = field(default_factory=list)
    first_weights: Parts = field(default_factory=dict)
    evaluation: float | None = None
    by_item: list[ItemGradient] = field(default_factory=list)
    """Of one process: what each item adds to the gradient of the first step."""
    next: StepTrace | None = None
    """Of one process: the step after those that all have taken, without any checkpoint."""
    loaded: Parts = field(default_factory=dict)
    """Weights after the other side's checkpoint was loaded; `resumed` is the same step from there."""
    resumed: StepTrace | None = None
    ended: bool = False
    """Of several processes: that numbers were not finite, so that nothing came after what is here."""


@dataclass
class ProxyTraining(PlacedProxy):
    """A recipe on the processes of a layout, ready for steps; no data, and no folder but for checkpoints."""

    proxy: Proxy

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        proxy: Proxy,
        ranks: Ranks,
        device: torch.device,
        *,
        micro: int,
        resumed: Path | None = None,
    ) -> ProxyTraining:
        """resumed: a checkpoint that will be loaded, so that there is only memory for weights."""
        placed = proxy.place(recipe, ranks, device, resumed)
        return cls(placed, placed.learner(micro), recipe, ranks, proxy)

    def run(self, steps: Sequence[Sequence[Item]], folder: Path | None = None) -> Run:
        """The same as a run over the items of steps, all of one size; its checkpoints are in `folder`, if any."""
        parameters = self.placed.parameters()
        group = (
            ALONE
            if self.ranks.alone or folder is None
            else new_group("checkpoint", self.ranks.world.ranks, backend="gloo")
        )
        return Run(
            learner=self.learner,
            optimizer=optimizer_of(parameters, self.recipe, self.learner.device),
            schedule=_STEADY,
            clip=self.recipe.gradient_clipping,
            feed=Feed(Listed([item for step in steps for item in step]), per_step=len(steps[0]), total=None),
            cadence=Cadence(total=len(steps), log=1, checkpoint=len(steps), evaluation=None),
            watch=Watch(WatchSection()),
            store=CheckpointStore(folder or Path("no checkpoints"), background=False, group=group),
            metrics=None,
            recorders=(),
            stop_request=StopRequest(),
            scaler=LossScaler(_FP16_SCALE) if self.recipe.precision == "fp16" else None,
            ema=None if self.recipe.ema is None else Ema(parameters, self.recipe.ema.decay),
        )


def observe(
    learning: ProxyTraining, steps: Sequence[Sequence[Item]], held_out: Sequence[Item] = (), *, run: Run | None = None
) -> Trace:
    """Trains on the items of each step, and looks; then evaluates on held-out ones.

    run: one of `learning` over these steps, to go on with afterwards; it may have more.
    Raises TrainingError for numbers that are not finite in one process; of several, `Trace.ended` says it.
    """
    run = run or learning.run(steps)
    seen = Trace(first_weights=parts_of(learning.placed, weights=True))
    with _as_far_as_finite(learning, seen):
        for _ in steps:
            seen.steps.append(take_step(learning, run))
        if held_out:
            with run.averaged():
                scores = evaluate(run.learner, list(held_out))
                run.learner.parallel.reshard()
            seen.evaluation = None if scores is None else scores.loss
    return seen


@contextmanager
def _as_far_as_finite(learning: ProxyTraining, seen: Trace) -> Iterator[None]:
    """All processes of a layout end together where a number is not finite; one process has no excuse for it."""
    try:
        yield
    except TrainingError:
        if learning.ranks.alone:
            raise
        seen.ended = True


def take_step(learning: ProxyTraining, run: Run) -> StepTrace:
    """One step by `train.loop.train_step` itself, whose gradients are looked at before and after they are clipped."""
    placed, parallel = learning.placed, run.learner.parallel
    gradients: Parts = {}
    clipped = math.nan

    def before_clipping(scale: float) -> None:
        nonlocal gradients
        gradients = parts_of(placed, weights=False, scale=scale)

    def after_clipping() -> None:
        nonlocal clipped
        clipped = clip_grad_norm(
            run.optimizer.gradient_holders(),
            None,
            group=None if parallel.alone else parallel.ranks.world,
            shares=None if parallel.alone else parallel.norm_weights(),
        )

    step = train_step(run, StepObserver(before_clipping, after_clipping))
    assert step is not None, "the items of a verification have targets"
    return StepTrace(step.loss, step.norm, clipped, step.totals.targets, gradients, parts_of(placed, weights=True))


def save_checkpoint(run: Run) -> Path:
    """A checkpoint of the present state, published when this returns."""
    save(run)
    run.store.wait()
    latest = run.store.latest()
    assert latest is not None, "it has just been written"
    return latest.path


def go_on(learning: ProxyTraining, run: Run, checkpoint: Path, seen: Trace) -> None:
    """Takes up what another layout has saved, and takes the next step from there."""
    restore(run, checkpoint)
    run.learner.parallel.reshard()
    seen.loaded = parts_of(learning.placed, weights=True)
    try:
        seen.resumed = take_step(learning, run)
    except TrainingError:  # not finite, though the same step from the state in memory was
        seen.ended = True


def gradients_by_item(learning: ProxyTraining, items: Sequence[Item]) -> list[ItemGradient]:
    """In one process: what each item of the first step adds to the gradient of the step's mean loss."""
    learner, totals = learning.learner, Totals.of(items)
    gradients: list[ItemGradient] = []
    for number, item in enumerate(items):
        with learner.dropout(1, [(number, item)]):
            learner.losses(learner.collate([item]), totals, 1 / totals.weight).total.backward()
        gradients.append(ItemGradient(item.weight, parts_of(learning.placed, weights=False)))
        for parameter in learner.model.parameters():
            parameter.grad = None
    return gradients


@torch.no_grad()
def perturb(learning: ProxyTraining, share: float, seed: int) -> None:
    """Changes every number of a model by up to this share of itself: about what rounding does to its products."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in learning.learner.model.parameters():
        if parameter.is_floating_point():
            noise = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1).mul_(share).add_(1)
            parameter.mul_(noise.to(parameter.device))


def parts_of(placed: PlacedModel, *, weights: bool, scale: float = 1.0) -> dict[str, tuple[ShardBox, Tensor]]:
    """What is here of each weight that is trained, or of its gradient, times `scale`, copied to the host."""
    parts = {}
    for name, parameter in placed.parameters():
        value = parameter.detach() if weights else parameter.grad
        if parameter.requires_grad and value is not None:
            held = placed.parallel.local_parameters.get(name)
            box = ShardBox.full(parameter.shape) if held is None else held.box
            value = value.to_dense() if value.is_sparse else value
            parts[name] = box, value.to(device="cpu", copy=True).mul_(scale)
    return parts


def whole(parts: Sequence[Parts]) -> dict[str, Tensor]:
    """Every tensor put together from what all processes hold. Raises ValueError where copies of a box differ."""
    made, differing = joined(parts)
    if differing:
        raise ValueError(f"{next(iter(differing))}: processes that hold the same part of it differ")
    return made


def joined(parts: Sequence[Parts]) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """Every tensor put together, and those of which two processes (these) hold the same box with other numbers.

    Of such a box the first process counts. Raises ValueError where no process holds all of a tensor.
    """
    made: dict[str, Tensor] = {}
    owner: dict[str, Tensor] = {}  # the process that each number is from; -1: nobody
    differing: dict[str, tuple[int, int]] = {}
    for rank, held in enumerate(parts):
        for name, (box, value) in held.items():
            if name not in made:
                made[name] = torch.zeros(box.global_shape, dtype=value.dtype)
                owner[name] = torch.full(box.global_shape, -1, dtype=torch.int32)
            region, whose = box.view_of(made[name]), box.view_of(owner[name])
            new = whose < 0
            if not bool(new.all()) and name not in differing:
                other = (~new) & (region != value) & ~(region.isnan() & value.isnan())
                if bool(other.any()):
                    differing[name] = int(whose[other][0]), rank
            region.copy_(torch.where(new, value, region))
            whose.masked_fill_(new, rank)
    if missing := [name for name, whose in owner.items() if bool((whose < 0).any())]:
        raise ValueError(f"{missing[0]}: no process holds all of it")
    return made, differing
