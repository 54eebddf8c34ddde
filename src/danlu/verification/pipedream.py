"""Turns of PipeDream in a verification: as the stages take them, and replayed in one process with the whole model.

The replay keeps whole models of past steps, and takes each gradient at weights that are put together of them by the
formula (`train.pipedream`): it knows neither schedules nor stashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.models.chunks import Chunks
from danlu.models.decoder import Decoder
from danlu.optim.gradients import clip_grad_norm
from danlu.planning.pipeline_split import chunk_sizes
from danlu.recipe.sections import Pipeline
from danlu.training.pipedream import train_turn
from danlu.training.state import Run
from danlu.training.step import StepObserver
from danlu.training.trained_roles import NORM, TrainedRoles
from danlu.verification.proxy import ProxyTraining
from danlu.verification.trace import LocalShards, StepTrace, local_shards, targets_of, trace_step, weight_shards


def trace_turn(training: ProxyTraining, run: Run, steps: int) -> list[StepTrace]:
    """Takes a turn of `steps` steps by `training.pipedream.train_turn` itself; each as this process sees it.

    Raises TrainingError for numbers that are not finite.
    """
    placed, parallel = training.placed, run.learner.parallel
    gradients, weights, norms = list[LocalShards](), list[LocalShards](), list[float]()
    norm_weights = parallel.norm_weights_without_pipeline()

    def before_clipping(scale: float) -> None:
        gradients.append(local_shards(placed, weights=False, scale=scale))

    def after_clipping() -> None:
        holders = run.optimizer.gradient_holders()
        norms.append(clip_grad_norm(holders, None, group=parallel.ranks.tensor, norm_weights=norm_weights))

    def after_update() -> None:
        weights.append(weight_shards(training))

    first, per_step = run.data_loader.next, run.data_loader.per_step
    run.cadence = replace(run.cadence, checkpoint=run.state.step + steps)  # after which the turn ends
    done = train_turn(run, StepObserver(before_clipping, after_clipping, after_update))
    assert len(done) == steps, "the items of a verification have targets"
    clipped = [math.hypot(*of_stages) for of_stages in zip(*parallel.all_gather_pipeline(norms), strict=True)]
    taken = [targets_of(run, range(first + step * per_step, first + (step + 1) * per_step)) for step in range(steps)]
    return [
        StepTrace(
            step.loss,
            step.norm,
            clipped[number],
            taken[number],
            gradients[number],
            weights[number],
            metrics=step.metrics,
        )
        for number, step in enumerate(done)
    ]


def replay_turn(training: ProxyTraining, run: Run, steps: int, section: Pipeline) -> list[StepTrace]:
    """The same of one process, for a pipeline as `section` has it: w(t+1) = w(t) - lr grad f(w1(t-n+1), .., wn(t))."""
    model = training.placed.model
    assert isinstance(model, Decoder), "what has stages is a decoder"
    chunks = Chunks.of_sizes(chunk_sizes(section, model.config), range(section.stages))
    parameters = {name: each for name, each in training.placed.parameters() if each.requires_grad}
    run.roles = TrainedRoles(lambda name: f"stage {chunks.of_parameter(name)}")  # each is clipped by its own norm
    missing = {  # updates right before a step that its weights do not have
        name: section.stages - 1 - (0 if section.vertical_sync else chunks.of_parameter(name)) for name in parameters
    }
    models, traces = [_copied(parameters)], list[StepTrace]()
    for step in range(steps):
        _load(parameters, {name: models[max(0, step - count)][name] for name, count in missing.items()})
        newest: Callable[[], None] = partial(_load, parameters, models[-1])
        trace = trace_step(training, run, after_backward=newest)
        own = {name: value for name, value in trace.metrics.items() if not name.startswith(f"{NORM}/")}
        traces.append(replace(trace, metrics=own))  # norms by stage are the replay's alone
        models.append(_copied(parameters))
    return traces


def _copied(parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


@torch.no_grad()
def _load(parameters: Mapping[str, Parameter], values: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
