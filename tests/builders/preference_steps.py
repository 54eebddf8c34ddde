"""A step of every preference objective in micro-batches of any size, as each process of a group sees it, or alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from builders.preference_samples import judged, pair, preference_learner, random_rows, step_gradients
from builders.tiny_run import VOCABULARY, tiny_model
from danlu.core.types import Batch, Loss, Pack, Totals
from danlu.models.decoder import Decoder
from danlu.objectives.branches import CHOSEN, labelled, sum_by_branch
from danlu.objectives.preference import preference_objective
from danlu.parallel.comm import world_size
from danlu.parallel.context_groups import ContextGroups
from danlu.parallel.data import replicated_step
from danlu.parallel.layout import layout_of
from danlu.parallel.local_parameter import local_parameters_of
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.recipe.sections import (
    Aot,
    AotUnpaired,
    ApoDown,
    ApoZero,
    ApoZeroUnpaired,
    Bco,
    Cpo,
    Discopop,
    Exo,
    Hinge,
    Ipo,
    Kto,
    Nca,
    Orpo,
    Parallel,
    PreferenceTerm,
    Robust,
    Sft,
    Sigmoid,
    SigmoidNorm,
    Simpo,
    Sppo,
)
from danlu.stages.learner import DecoderLearner
from danlu.training.learner import Activation

COUNT = 16
OBJECTIVES: dict[str, list[PreferenceTerm]] = {
    "aot": [Aot(label_smoothing=0.1)],
    "aot-unpaired": [AotUnpaired()],
    "apo-down": [ApoDown()],
    "apo-zero": [ApoZero()],
    "apo-zero-unpaired": [ApoZeroUnpaired(desirable=1.5)],
    "bco": [Bco()],
    "bco with a shift": [Bco(shift="running-mean")],
    "cpo": [Cpo()],
    "discopop": [Discopop()],
    "exo": [Exo()],
    "hinge": [Hinge()],
    "ipo": [Ipo()],
    "kto": [Kto(undesirable=0.5)],
    "kto and sft": [Kto(), Sft(weight=0.3)],
    "nca": [Nca()],
    "orpo": [Orpo()],
    "robust": [Robust()],
    "sft": [Sft()],
    "sigmoid": [Sigmoid(label_smoothing=0.1)],
    "sigmoid with everything": [Sigmoid(ld_alpha=0.3, wpo=True), Sft(weight=0.2), Aot(weight=0.5)],
    "sigmoid-norm": [SigmoidNorm()],
    "simpo": [Simpo()],
    "sppo": [Sppo()],
}
OF_STEP = ("aot", "aot-unpaired", "bco with a shift", "kto", "kto and sft")
"""Those that have to see the whole step."""
OF_MICRO_BATCHES = (*OF_STEP, "cpo", "orpo", "sft")
"""Those that a mean or sort over a micro-batch instead of the step would change."""
Seen = tuple[float, dict[str, float], dict[str, Tensor]]  # loss, metrics, gradients


def scaled_model(seed: int) -> Decoder:
    """A decoder in float64 that is far from uniform."""
    model = tiny_model(seed).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() == 2 else 1)
    return model


def items_of(name: str) -> list[Pack]:
    rows = random_rows(COUNT, VOCABULARY)
    return judged(rows) if "kto" in name or name.endswith("zero-unpaired") else [pair(row) for row in rows]


class PerMicroBatch(DecoderLearner):
    """A mistake: what is to be known of the step is found out of each micro-batch, the mean over tokens included."""

    def prepare(
        self, items: Sequence[Pack], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[Pack]:
        prepared = list(items)
        for numbers in micro_batches:
            local = super().prepare([items[number] for number in numbers], [range(len(numbers))], step)
            for number, item in zip(numbers, local, strict=True):
                prepared[number] = item
        return prepared

    def losses(self, batch: Batch, totals: Totals, gradient_scale: float = 1.0, x: Activation | None = None) -> Loss:
        chosen = labelled(batch, CHOSEN)
        tokens = float(sum_by_branch(torch.ones_like(batch.weights), batch)[chosen].sum())
        divisors = dict(totals.divisors)
        divisors["chosen_tokens"] = tokens * divisors["chosen"] / len(chosen) if len(chosen) else 1.0
        return super().losses(batch, replace(totals, divisors=divisors), gradient_scale, x)


class OwnShare(DecoderLearner):
    """A mistake: each process knows only of its own branches of the step."""

    def prepare(
        self, items: Sequence[Pack], micro_batches: Sequence[Sequence[int]], step: int | None
    ) -> Sequence[Pack]:
        alone = replace(self, parallel=ParallelContext())
        return DecoderLearner.prepare(alone, items, micro_batches, step)


def see(
    names: Sequence[str],
    micro: int,
    kind: Callable[..., DecoderLearner] = DecoderLearner,
    section: Parallel | None = None,
) -> dict[str, Seen]:
    """One step of each objective on the processes there are, by a learner of some kind, in some layout."""
    torch.set_num_threads(1)
    section = section or Parallel()
    ranks = ranks_of(layout_of(section, world_size()), "cpu")
    context = ContextGroups.of(ranks, section.context.method)
    return {name: _see(name, micro, ranks, kind, context) for name in names}


def _see(name: str, micro: int, ranks: Ranks, kind: Callable[..., DecoderLearner], context: ContextGroups) -> Seen:
    items, policy = items_of(name), scaled_model(1)
    parallel = replicated_step(ParallelContext(ranks, local_parameters_of(policy, ranks, {})), Parallel())
    objective = preference_objective(OBJECTIVES[name], has_reference=True)
    options: dict[str, Any] = {"dtype": torch.float64, "parallel": parallel, "context": context}
    learner = kind(**vars(preference_learner(policy, scaled_model(0), objective, items, micro, **options)))
    step, gradients = step_gradients(learner, items)
    return step.loss, dict(step.metrics), gradients
