"""Steps of stages that ask for more than a model's likelihood, as each process of a group sees them, or alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from builders.parallel_steps import config_of, groups_of
from builders.preference_samples import judged, pair, random_rows
from builders.reward_stage import RewardRows
from builders.tiny_run import SyntheticPacks
from danlu.core.types import Pack
from danlu.data.batch import EMPTY_PACK, empty_like
from danlu.parallel.layout import Layout, layout_of
from danlu.recipe import Recipe, load
from danlu.stages import builder
from danlu.stages.learner import DecoderLearner
from danlu.stages.roles import FrozenDecoder
from danlu.stages.table import STAGES
from danlu.verification.proxy import Proxy, ProxyTraining
from danlu.verification.role_proxies import with_columns
from danlu.verification.trace import Trace, trace_training

ROWS, HELD_OUT, STEPS = 7, 3, 2  # no number of data ranks divides the rows of a step
VOCABULARY = 400


def items_of(recipe: Recipe) -> list[Pack]:
    """The items of all steps, then those held out."""
    count = STEPS * ROWS + HELD_OUT
    if recipe.stage == "reward":
        assert recipe.objective is not None
        rows = RewardRows(recipe.objective[0].kind == "stepwise")
        return [rows.at(number) for number in range(count)]
    if recipe.stage == "preference":
        answers = random_rows(count, VOCABULARY)
        terms = recipe.objective or []
        items = judged(answers) if any(term.kind == "kto" for term in terms) else [pair(row) for row in answers]
    else:
        items = [SyntheticPacks().at(number) for number in range(count)]
    return list(with_columns(items, recipe, STAGES[recipe.stage], None, VOCABULARY))


def see(files: Sequence[str], world: int | None = None, mistaken: Mapping[str, str] | None = None) -> dict[str, Trace]:
    """What this process sees of each recipe, by its file; alone where `world` is 1. mistaken: the files of recipes in
    which it makes mistakes, by their names in `MISTAKES`, which are the names of what it sees then."""
    torch.set_num_threads(1)
    seen = {file: _see(load(Path(file)).recipe, world) for file in files}
    for mistake, file in (mistaken or {}).items():
        with MISTAKES[mistake]():
            seen[mistake] = _see(load(Path(file)).recipe, world)
    return seen


def _see(recipe: Recipe, world: int | None) -> Trace:
    layout = Layout() if world == 1 else layout_of(recipe.parallel, torch.distributed.get_world_size())
    items = items_of(recipe)
    first = items[0].samples[0]
    proxy = Proxy(
        replace(config_of(recipe), task=STAGES[recipe.stage].task(recipe)),
        empty=empty_like(first) if first.branches or first.columns else EMPTY_PACK,
    )
    training = ProxyTraining(recipe, proxy, groups_of(layout), torch.device("cpu"), micro=1)
    steps = [items[step * ROWS : (step + 1) * ROWS] for step in range(STEPS)]
    return trace_training(training, training.run(steps), STEPS, items[STEPS * ROWS :])


def _reference_of_another_micro_batch() -> AbstractContextManager[Any]:
    """Behind the first chunk a frozen model goes on with hidden states of the micro-batch before, of as many tokens."""
    hidden_states = FrozenDecoder.hidden_states
    last: list[Tensor] = []

    def of_another(role: FrozenDecoder, *args: Any) -> Tensor:
        last[:] = [*last[-1:], hidden_states(role, *args)]
        return last[0][torch.arange(len(last[-1])) % len(last[0])]

    return mock.patch.object(FrozenDecoder, "hidden_states", of_another)


def _head_as_if_on_every_stage() -> AbstractContextManager[Any]:
    """The norm divides the square of the score head's gradient by the stages, as if each of them had the gradient."""
    replicated = builder.replicated_parameter

    def as_if_on_every_stage(name: str, tensor: Tensor, ranks: Any) -> Any:
        parameter = replicated(name, tensor, ranks)
        return replace(parameter, box=replace(parameter.box, replicas=ranks.world.size))

    return mock.patch.object(builder, "replicated_parameter", as_if_on_every_stage)


def _statistics_without_dropout() -> AbstractContextManager[Any]:
    """What has to be known of the whole step is looked at without the dropout that the step has."""
    judged_by = DecoderLearner.judged_by

    def without_dropout(learner: DecoderLearner, evaluation: Any, dropout_step: int | None = None) -> DecoderLearner:
        return judged_by(learner, evaluation)

    return mock.patch.object(DecoderLearner, "judged_by", without_dropout)


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "head as if on every stage": _head_as_if_on_every_stage,
    "reference of another micro-batch": _reference_of_another_micro_batch,
    "statistics without dropout": _statistics_without_dropout,
}
