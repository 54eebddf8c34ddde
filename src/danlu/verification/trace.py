"""The numbers of a few training steps as one process sees them: losses, gradients, norms, weights.

Everything comes from the same calls that `danlu train` makes; only the gradient is copied before it is clipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from danlu.core.errors import DanluError, TrainingError
from danlu.core.shard_box import ShardBox
from danlu.core.types import Item
from danlu.optim.gradients import clip_grad_norm, stored_values
from danlu.recipe.value import VALUE
from danlu.stages.protocols import PlacedModel
from danlu.training.evaluation import evaluate
from danlu.training.executor import AnyLearner, Executor
from danlu.training.learner import StepItems
from danlu.training.loop import save, train_step
from danlu.training.pipedream import train_turn
from danlu.training.state import Run
from danlu.training.step import StepObserver
from danlu.verification.proxy import ProxyTraining
from danlu.verification.routes import balanced_alone, expert_counts, is_of_router

_LAYER = re.compile(r"layers\.(\d+)\.")

LocalShards = Mapping[str, tuple[ShardBox, Tensor]]
"""One process's shards, by name: the shard's box in the whole tensor, and the numbers, on the host."""


@dataclass
class StepTrace:
    """The trace of one optimizer step."""

    loss: float  # mean over the step's weight
    grad_norm: float  # global, before clipping
    clipped_norm: float  # after clipping
    trained_tokens: int  # targets, counted by the processes that took them, and summed
    gradients: LocalShards  # of the mean loss, before clipping
    weights: LocalShards  # after the update
    expert_counts: Mapping[str, Tensor] = field(default_factory=dict)
    """[E] float64, rows of each expert on all processes, by name of the router."""
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the objective, means over the whole step


@dataclass
class AverageTrace:
    """The moving average of the weights."""

    weights: LocalShards
    updates: int  # that it has taken in


@dataclass(frozen=True)
class ItemGradient:
    """The term of one item (a pack, an image) in a step's gradient."""

    weight: float  # sum over its targets
    gradients: LocalShards  # of the step's mean loss


@dataclass
class Trace:
    """All that one process saw."""

    steps: list[StepTrace] = field(default_factory=list)
    initial_weights: LocalShards = field(default_factory=dict)
    evaluation: float | None = None  # loss on held-out items
    evaluation_metrics: Mapping[str, float] = field(default_factory=dict)
    average: AverageTrace | None = None  # after the steps; None where the recipe keeps no average
    counters: Mapping[str, float] = field(default_factory=dict)  # of the run after the steps
    loaded_counters: Mapping[str, float] = field(default_factory=dict)  # as a checkpoint brought them back
    item_gradients: list[ItemGradient] = field(default_factory=list)
    """Each item's term in the gradient of the first step; on one process alone."""
    balance_gradients: LocalShards = field(default_factory=dict)
    """The routers' gradients of the first step by the balancing loss alone; on one process alone."""
    next_step: StepTrace | None = None
    """The step after `steps`, taken from the state in memory, without any checkpoint; on one process alone."""
    loaded_weights: LocalShards = field(default_factory=dict)
    """Weights after the other side's checkpoint was loaded."""
    resumed_step: StepTrace | None = None
    """The same step as `next_step`, taken from that checkpoint."""
    next_average: AverageTrace | None = None  # after `next_step`
    loaded_average: AverageTrace | None = None  # as that checkpoint brought it back
    resumed_average: AverageTrace | None = None  # after `resumed_step`
    exported: Mapping[str, Tensor] | None = None
    """The process that writes the result has each tensor of its files, written with the weights of the layout's
    checkpoint, by the layout from memory and by one process from that checkpoint."""
    clear_items: tuple[list[int], list[int], float] | None = None
    """The numbers of candidates for steps and evaluation, and the least margin of a route; where only they were chosen.
    """
    spoiled: SpoiledStep | None = None
    """The step of several processes in which a gradient of the last one was made NaN."""
    problems: dict[str, str] = field(default_factory=dict)
    """The errors of several processes, by the task that failed ("saving", "exporting", "loading")."""
    hit_non_finite: bool = False
    """Whether numbers were not finite, so that this trace ends early; on several processes."""


@dataclass(frozen=True)
class SpoiledStep:
    """The outcome of a step with a gradient that was not finite on one process."""

    parameter: str  # that had the gradient
    error: str | None  # that the step ended with; None: it made an update


TakeSteps = Callable[[ProxyTraining, Run, int], Iterable[StepTrace]]
"""Takes a number of steps of a run; each as this process sees it."""


def trace_steps(
    training: ProxyTraining, run: Run, steps: int, *, withheld_until: int | None = None
) -> Iterator[StepTrace]:
    """Takes `steps` steps, one after the other. Raises TrainingError for a loss that is not finite.

    withheld_until: up to this step of the run one parameter (`withheld_parameter`) has no gradient, and no state.
    """
    name = None if withheld_until is None else withheld_parameter(training)
    for _ in range(steps):
        withholds = withheld_until is not None and run.state.step < withheld_until
        yield trace_step(training, run, withheld=name if withholds else None)


def trained_names(training: ProxyTraining) -> set[str]:
    """The names of all trained parameters, those of other stages too."""
    own = [name for name, parameter in training.placed.parameters() if parameter.requires_grad]
    return {name for of_stage in training.learner.parallel.all_gather_pipeline(own) for name in of_stage}


def withheld_parameter(training: ProxyTraining) -> str:
    """The same on all processes: the last trained parameter by name, of the last layer where it is of one."""
    return max(trained_names(training), key=lambda name: (int(match[1]) if (match := _LAYER.match(name)) else -1, name))


def trace_training(
    training: ProxyTraining, run: Run, steps: int, held_out: Sequence[Item], take: TakeSteps = trace_steps
) -> Trace:
    """Takes and records the first steps of a run of `training`; then evaluates on held-out items.

    Raises TrainingError for numbers that are not finite in one process; of several, `Trace.hit_non_finite` says it.
    """
    trace = Trace(initial_weights=weight_shards(training))
    try:
        for step in take(training, run, steps):
            trace.steps.append(step)
        if held_out:
            with run.averaged():
                scores = evaluate(run.learner, list(held_out))
                run.learner.parallel.reshard()
            if scores is not None:
                trace.evaluation, trace.evaluation_metrics = scores.loss, scores.metrics
        trace.average, trace.counters = trace_average(training, run), counters_of(run)
    except TrainingError:  # all processes of a layout end together here; one process alone must not meet such a number
        if training.ranks.alone:
            raise
        trace.hit_non_finite = True
    return trace


def trace_step(
    training: ProxyTraining,
    run: Run,
    after_backward: Callable[[], None] = lambda: None,
    withheld: str | None = None,
) -> StepTrace:
    """Takes one step by `train.loop.train_step` itself, and copies gradients and weights on the way.

    after_backward: is called when all gradients are there, before anything is done with them. withheld: a parameter
    that is as if it had no gradient, once that has been copied.
    Raises TrainingError for a loss that is not finite.
    """
    placed, parallel = training.placed, run.learner.parallel
    gradients: LocalShards = {}
    clipped_norm = math.nan

    def before_clipping(scale: float) -> None:
        nonlocal gradients
        after_backward()
        gradients = local_shards(placed, weights=False, scale=scale)
        for name, holder in run.optimizer.named_gradient_holders():
            if name == withheld:
                holder.grad = None

    def after_clipping() -> None:
        nonlocal clipped_norm
        clipped_norm = clip_grad_norm(
            run.optimizer.gradient_holders(),
            None,  # only measures
            group=None if parallel.alone else parallel.ranks.world,
            norm_weights=None if parallel.alone else parallel.norm_weights(),
        )

    step = train_step(run, StepObserver(before_clipping, after_clipping))
    assert step is not None, "the items of a verification have targets"
    weights = weight_shards(training)
    counts = expert_counts(training)
    taken = targets_of(run, run.data_loader.last_taken)
    return StepTrace(step.loss, step.norm, clipped_norm, taken, gradients, weights, counts, step.metrics)


def counters_of(run: Run) -> dict[str, float]:
    """The counters of a run: the same on all processes, in every layout."""
    return {"steps": run.state.step, "tokens": run.state.tokens, "items taken": run.data_loader.next}


def trace_average(training: ProxyTraining, run: Run) -> AverageTrace | None:
    """The moving average as it is now; None where the run keeps none."""
    if run.ema is None:
        return None
    return AverageTrace(_shards(training.placed, run.ema.state_tensors().items()), run.ema.updates)


def targets_of(run: Run, numbers: Sequence[int]) -> int:
    """The targets of a step's items of these numbers as processes take them, summed: `Totals` has the expected sum."""
    items, parallel = [run.data_loader.source.at(number) for number in numbers], run.learner.parallel
    own = sum(items[number].targets for numbers in run.learner.micro_batches(items) for number in numbers)
    return int(parallel.ranks.data.sum(torch.tensor([own])).item())  # context ranks take the same items


def save_checkpoint(run: Run) -> Path:
    """Saves the present state; its checkpoint is published when this returns."""
    save(run)
    run.store.wait()
    latest = run.store.latest()
    assert latest is not None, "it has just been written"
    return latest.path


def trace_resumed_step(training: ProxyTraining, run: Run, trace: Trace, take: TakeSteps = trace_steps) -> None:
    """Records a run's state after it was restored, perhaps from another layout's checkpoint, and its next step."""
    run.learner.parallel.reshard()
    trace.loaded_weights = weight_shards(training)
    trace.loaded_average, trace.loaded_counters = trace_average(training, run), counters_of(run)
    try:
        (trace.resumed_step,) = take(training, run, 1)
        trace.resumed_average = trace_average(training, run)
    except TrainingError:  # not finite, though the same step from the state in memory was
        trace.hit_non_finite = True


def spoiled_step(training: ProxyTraining, run: Run) -> SpoiledStep:
    """Takes one more step, in which one number of the last process's first gradient is not finite."""
    world = training.ranks.world
    is_last, spoiled = world.index == world.size - 1, ""

    def spoil(scale: float) -> None:
        nonlocal spoiled
        has_gradient = ((name, each.grad) for name, each in run.optimizer.named_gradient_holders())
        own = next(((name, grad) for name, grad in has_gradient if grad is not None and grad.numel()), None)
        if is_last and own is not None:
            spoiled = own[0]
            stored_values(own[1]).view(-1)[0] = math.nan

    error: str | None = None
    run.cadence = replace(run.cadence, total=run.state.step + 1, checkpoint=run.state.step + 1)
    try:
        if training.learner.parallel.updates_each_micro_batch:
            train_turn(run, StepObserver(before_clipping=spoil))
        else:
            step = train_step(run, StepObserver(before_clipping=spoil))
            if step is not None and not math.isfinite(step.norm):  # fp16 passes over such a step
                error = f"norm {step.norm} ({spoiled})"
    except (DanluError, RuntimeError) as raised:  # of torch, where another process has gone on without this one
        error = str(raised)
    return SpoiledStep(spoiled, error)


def gradients_by_item(training: ProxyTraining, items: Sequence[Item]) -> list[ItemGradient]:
    """Computes each item's term in the gradient of the mean loss of the first step, in one process.

    An objective that sees the whole step is evaluated within that step: after the pass that looks at all of its items.
    """
    totals, items = training.learner.totals(items), _prepared(training.learner, items)
    item_gradients: list[ItemGradient] = []
    with of_no_step(training.learner):
        for number, item in enumerate(items):
            of_one = StepItems(items, [[number]], totals, 1, 1 / totals.weight)
            item_gradients.append(ItemGradient(item.weight, _taken_gradients(training, of_one)))
    return item_gradients


def balance_gradients(training: ProxyTraining, items: Sequence[Item]) -> LocalShards:
    """Computes the routers' gradients in the first step by the balancing loss alone, in one process.

    Gradients of a router that others follow include the balancing loss of these.
    """
    learner, totals = training.learner, training.learner.totals(items)
    whole = StepItems(_prepared(learner, items), learner.micro_batches(items), totals, 1, 1 / totals.weight)
    with of_no_step(learner), balanced_alone():
        gradients = _taken_gradients(training, whole)
    return {name: shard for name, shard in gradients.items() if is_of_router(name)}


def _prepared(learner: AnyLearner, items: Sequence[Item]) -> Sequence[Item]:
    """The items of the first step as its pass with gradients has them."""
    # A running statistic takes the step in here, and would once more when it is trained on.
    with _restored_weights(learner):
        prepared: Sequence[Item] = learner.prepare(items, learner.micro_batches(items), 1)
    return prepared


@contextmanager
def of_no_step(learner: AnyLearner) -> Iterator[None]:
    """A context in which counts belong to no step."""
    with _restored_weights(learner):
        yield
        learner.end_step()  # what was counted here is of no step


@contextmanager
def _restored_weights(learner: AnyLearner) -> Iterator[None]:
    """A context after which trained tensors are as they were before."""
    before = {name: weight.clone() for name, weight in learner.weights().items()}
    yield
    for name, weight in learner.weights().items():
        weight.copy_(before[name])


def _taken_gradients(training: ProxyTraining, step: StepItems) -> LocalShards:
    """The gradients that the micro-batches of a step leave, taken away."""
    Executor(training.learner, step).run(training.learner.parallel.actions(len(step.micro_batches)))
    gradients = local_shards(training.placed, weights=False)
    for _, parameter in training.placed.parameters():
        parameter.grad = None
    return gradients


@torch.no_grad()
def perturb_weights(training: ProxyTraining, share: float, seed: int) -> None:
    """Changes every number of a model by up to this share of itself: about the size of rounding in its products."""
    generator = torch.Generator().manual_seed(seed)
    model = training.learner.model
    # Those of the objective and of a critic behind those of the model; in one process their tensors are all there.
    beside = ("objective.", f"{VALUE}.")
    own = [parameter for name, parameter in training.placed.parameters() if name.startswith(beside)]
    for parameter in (*model.parameters(), *own):
        if parameter.is_floating_point():
            factor = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1).mul_(share).add_(1)
            parameter.mul_(factor.to(parameter.device))


def weight_shards(training: ProxyTraining) -> dict[str, tuple[ShardBox, Tensor]]:
    """This process's shard of each trained weight, and of the other tensors that a step changes: corrections of
    routers, running statistics, a reference that moves."""
    placed = training.placed
    trained = local_shards(placed, weights=True)
    others = ((name, tensor) for name, tensor in training.learner.weights().items() if name not in trained)
    return trained | _shards(placed, ((name, tensor) for name, tensor in others if tensor.is_floating_point()))


def local_shards(placed: PlacedModel, *, weights: bool, scale: float = 1.0) -> dict[str, tuple[ShardBox, Tensor]]:
    """This process's shard of each weight that is trained, or (weights=False) of its gradient, copied to the host.

    scale: the copies are multiplied by it.
    """
    trained = ((name, parameter) for name, parameter in placed.parameters() if parameter.requires_grad)
    values = ((name, parameter.detach() if weights else parameter.grad) for name, parameter in trained)
    return _shards(placed, ((name, value) for name, value in values if value is not None), scale)


def _shards(
    placed: PlacedModel, named: Iterable[tuple[str, Tensor]], scale: float = 1.0
) -> dict[str, tuple[ShardBox, Tensor]]:
    """Copies on the host of tensors that this process has, of the shape and cut of its parameters of these names."""
    shards = {}
    for name, value in named:
        local = placed.parallel.local_parameters.get(name)
        box = ShardBox.full(value.shape) if local is None else local.box
        value = value.to_dense() if value.is_sparse else value
        shards[name] = box, value.to(device="cpu", copy=True).mul_(scale)
    return shards


def assemble(shards_by_rank: Sequence[LocalShards]) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """Puts every tensor together, and finds those that two processes hold with different numbers in the same place.

    Returns (tensors by name, pairs of ranks with differing copies, by name). Where copies differ, the lowest rank's
    numbers are taken. Raises ValueError where a part of a tensor is on no process.
    """
    tensors: dict[str, Tensor] = {}
    owners: dict[str, Tensor] = {}  # int32, the rank that each number was taken from; -1: not yet
    differing: dict[str, tuple[int, int]] = {}
    for rank, shards in enumerate(shards_by_rank):
        for name, (box, value) in shards.items():
            if name not in tensors:
                tensors[name] = torch.zeros(box.global_shape, dtype=value.dtype)
                owners[name] = torch.full(box.global_shape, -1, dtype=torch.int32)
            region, owner = box.view_of(tensors[name]), box.view_of(owners[name])
            is_new = owner < 0
            if not bool(is_new.all()) and name not in differing:
                is_unequal = (~is_new) & (region != value) & ~(region.isnan() & value.isnan())
                if bool(is_unequal.any()):
                    differing[name] = int(owner[is_unequal][0]), rank
            region.copy_(torch.where(is_new, value, region))
            owner.masked_fill_(is_new, rank)
    if missing := [name for name, owner in owners.items() if bool((owner < 0).any())]:
        raise ValueError(f"{missing[0]}: no process holds all of it")
    return tensors, differing
