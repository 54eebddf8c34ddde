"""Faults that pipelines are known for: in state that stages share, of a micro-batch or of the whole step."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from danlu.models import load_balancing
from danlu.models.load_balancing import Balancer, Balancing
from danlu.optim.gradients import HasGradient, clip_grad_norms
from danlu.parallel.layout import Layout
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.ranks import Ranks
from danlu.parallel.schedules import Action
from danlu.parallel.weight_stash import WeightStash
from danlu.recipe import Recipe
from danlu.stages.learner import DecoderLearner
from danlu.training import state
from danlu.training import step as step_module
from danlu.training.learner import MicroStep
from danlu.training.state import Run
from danlu.verification.fault import Fault, replaced
from danlu.verification.proxy import Proxy


def _without_sum_over_stages(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Parameters that stages share have on each of them its own gradient."""
    reduce_gradients = ParallelContext.reduce_gradients

    def reduce(parallel: ParallelContext) -> None:
        rest = [(group, name) for group, name in parallel.partial_gradients if group.name != "pipeline"]
        reduce_gradients(replace(parallel, partial_gradients=rest))

    return replaced(ParallelContext, "reduce_gradients", reduce)


class _StageSum:
    """Sums a number over the ranks of one stage alone."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def sum(self, x: Tensor) -> Tensor:
        everyones = self._ranks.world.all_gather(x.reshape(1))
        count = self._ranks.world.size // self._ranks.pipeline.size  # stages are the outermost axis
        first = self._ranks.world.index // count * count
        return everyones[first : first + count].sum()


def _norm_of_one_stage(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Each stage clips by the norm of its own layers."""

    def clip(parameters: Any, max_norm: float | None, scale: float = 1.0, **options: Any) -> dict[str, float]:
        own: dict[str, Iterable[HasGradient]] = parameters
        return clip_grad_norms(own, max_norm, scale, **{**options, "group": _StageSum(ranks)})

    return replaced(step_module, "clip_grad_norms", clip)


def _dropout_of_another_micro_batch(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Stages after the first take dropout masks of the following items, as if micro-batches were shifted by one."""
    at = DecoderLearner.at

    def at_another(learner: DecoderLearner, micro_step: MicroStep[Any]) -> AbstractContextManager[None]:
        shift = min(ranks.pipeline.index, 1)
        items = [(number + shift, item) for number, item in micro_step.items]
        return at(learner, replace(micro_step, items=items))

    return replaced(DecoderLearner, "at", at_another)


def _router_loss_missing_on_stage(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The routers of the first stage, which sees no loss, are not trained to balance the load."""

    def without_loss(model: Any, balancing: Balancing, *, adds_gradient: bool = True) -> Balancer:
        return Balancer(model, balancing, adds_gradient=adds_gradient and ranks.pipeline.index > 0)

    return replaced(load_balancing, "Balancer", without_loss)


def _sum_before_last_gradient(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Gradients are summed over stages before the last backward pass of the first stage adds its own."""
    actions_of = Pipeline.actions

    def actions(pipeline: Pipeline, micro_batches: int) -> tuple[Action, ...]:
        # What stages share is not put off: its gradient comes in the input pass where a backward pass is split.
        passes = ("backward", "input")
        *others, last = [action for action in actions_of(pipeline, micro_batches) if action.kind in passes]
        in_order = [action for action in actions_of(pipeline, micro_batches) if action.kind != "reduce"]
        if pipeline.stages.index > 0 or not others:
            return actions_of(pipeline, micro_batches)
        place = in_order.index(last)
        return (*in_order[:place], Action("reduce", last.chunk), *in_order[place:])

    return replaced(Pipeline, "actions", actions)


def _newest_weights_in_backward(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Updates change the weights that micro-batches in flight will go back through."""
    return replaced(WeightStash, "_copy_parameters", lambda stash: None)


def _unstepped_of_first_stage(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """A checkpoint knows of the first stage alone which parameters have had no gradient yet."""

    def scalars(run: Run) -> dict[str, Any]:
        of_stages: list[dict[str, Any]] = run.learner.parallel.all_gather_pipeline(run.optimizer.state_scalars())
        return of_stages[0]

    return replaced(state, "_optimizer_scalars", scalars)


def _has_stages(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    """Whether any parameters are clipped by one norm."""
    return layout.pipeline > 1 and not _has_versions(recipe, layout, proxy)


def _has_versions(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.pipeline > 1 and recipe.parallel.pipeline.updates_each_micro_batch


def _has_stages_that_share(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.pipeline > 1 and recipe.adapter is None and proxy.has_tied_head


def _sums_over_stages_alone(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return _has_stages_that_share(recipe, layout, proxy) and layout.world == layout.pipeline


def _has_dropout_in_stages(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.pipeline > 1 and recipe.drops_out and bool(getattr(recipe.adapter, "dropout", 0.0))


def _has_router_loss(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    balances = recipe.router is not None and recipe.router.balance in ("sequence", "step")
    return layout.pipeline > 1 and proxy.has_experts and balances and recipe.adapter is None


FAULTS: dict[str, Fault] = {
    "dropout-of-another-micro-batch": Fault(_has_dropout_in_stages, _dropout_of_another_micro_batch),
    "newest-weights-in-backward": Fault(_has_versions, _newest_weights_in_backward),
    "norm-of-one-stage": Fault(_has_stages, _norm_of_one_stage),
    "router-loss-missing-on-stage": Fault(_has_router_loss, _router_loss_missing_on_stage),
    "sum-before-last-gradient": Fault(_sums_over_stages_alone, _sum_before_last_gradient),
    "sum-over-stages-missing": Fault(_has_stages_that_share, _without_sum_over_stages),
    "unstepped-of-first-stage": Fault(_has_stages, _unstepped_of_first_stage),
}
"""The faults by name, sorted."""
