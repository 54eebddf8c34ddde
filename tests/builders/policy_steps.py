"""A step of policy gradients in micro-batches of any size, as each process of a group sees it, or alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from builders.policy_samples import random_items
from builders.preference_samples import preference_learner
from builders.preference_steps import scaled_model
from builders.tiny_run import VOCABULARY, tiny_config
from danlu.core.types import Batch, Loss, Pack, Totals
from danlu.models.score_head import new_score_head
from danlu.objectives.distillation import TeacherDivergence, TeacherTerm
from danlu.objectives.policy import PolicyGradient, PolicyGradientSettings
from danlu.objectives.policy_losses import ImportanceBounds
from danlu.objectives.value import PpoObjective
from danlu.parallel.comm import world_size
from danlu.parallel.context_groups import ContextGroups
from danlu.parallel.data import replicated_step
from danlu.parallel.layout import layout_of
from danlu.parallel.local_parameter import local_parameters_of, replicated_parameter
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks, ranks_of
from danlu.recipe.sections import Parallel
from danlu.stages.learner import DecoderLearner, objective_parameters
from danlu.training.learner import Activation
from danlu.training.step import accumulate

COUNT = 9
SETTINGS = {
    "tokens": PolicyGradientSettings(entropy=0.02, kl=0.1, kl_with_ratio=True, temperature=0.7),
    "sequences": PolicyGradientSettings(normalise="sequences", ratio="sequence", dual_clip=3.0, kl=0.1),
    "constant": PolicyGradientSettings(normalise="constant", constant_tokens=9, off_policy=0.5, kl=0.1),
    "groups": PolicyGradientSettings(normalise="groups", importance=ImportanceBounds(low=0.7, high=1.3), entropy=0.02),
    "cispo": PolicyGradientSettings(loss="cispo", clip_high=2.0, normalise="sequences", single_update=True),
    "sapo": PolicyGradientSettings(loss="sapo", normalise="groups", kl=0.1, kl_estimator="k2"),
    "vespo": PolicyGradientSettings(loss="vespo", importance=ImportanceBounds(), kl=0.1, kl_estimator="k1"),
}
Seen = tuple[float, dict[str, float], dict[str, Tensor]]  # loss, metrics, gradients


class PerMicroBatch(DecoderLearner):
    """A mistake: the loss is a mean over what each micro-batch has, and these are averaged."""

    def losses(self, batch: Batch, totals: Totals, gradient_scale: float = 1.0, x: Activation | None = None) -> Loss:
        assert batch.branch is not None
        trained = batch.branch.unique()
        groups = batch.facts["group"][trained].unique()
        counts = {"answers": float(len(trained)), "groups": float(len(groups))}
        local = replace(totals, weight=batch.weight, divisors={**totals.divisors, **counts})
        loss = super().losses(batch, local, gradient_scale, x)
        share = 1 / -(-COUNT // self.micro) * totals.weight / batch.weight
        return replace(loss, total=loss.total * share)


OBJECTIVES = (*SETTINGS, "ppo", "distilled")
DIVERGENCE_WEIGHT = 0.3
TEACHER = TeacherDivergence((TeacherTerm("reference"),), "reverse", temperature=1.5)


def objective_of(name: str) -> PolicyGradient | PpoObjective:
    if name == "distilled":  # the reference is a teacher too
        return PolicyGradient(SETTINGS["sequences"], True, TEACHER, DIVERGENCE_WEIGHT)
    if name != "ppo":
        return PolicyGradient(SETTINGS[name], has_reference=True)
    head = new_score_head(tiny_config().hidden_size, 1, bias=True, seed=3, std=1.0).double()
    return PpoObjective(head, PolicyGradient(PolicyGradientSettings(kl=0.1), has_reference=True))


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
    return {name: _see(objective_of(name), micro, ranks, kind, context) for name in names}


def _see(
    objective: PolicyGradient | PpoObjective,
    micro: int,
    ranks: Ranks,
    kind: Callable[..., DecoderLearner],
    context: ContextGroups,
) -> Seen:
    items, policy = random_items(COUNT, VOCABULARY, support=5), scaled_model(1)
    local = local_parameters_of(policy, ranks, {})
    own = objective_parameters(objective)
    local |= {name: replicated_parameter(name, parameter, ranks) for name, parameter in own.items()}
    parallel = replicated_step(ParallelContext(ranks, local), Parallel())
    score_head = objective.score_head if isinstance(objective, PpoObjective) else None
    options: dict[str, Any] = {
        "dtype": torch.float64,
        "parallel": parallel,
        "score_head": score_head,
        "context": context,
    }
    learner = kind(**vars(preference_learner(policy, scaled_model(0), objective, items, micro, **options)))
    return one_step(learner, items)


def one_step(learner: DecoderLearner, items: Sequence[Pack]) -> Seen:
    """What one step is of, with the gradients of the policy and of what is the objective's own."""
    parameters = {**dict(learner.model.named_parameters()), **objective_parameters(learner.objective)}
    for parameter in parameters.values():
        parameter.grad = None
    step = accumulate(learner, items, step=1, clip=None, holders=list(parameters.values()))
    gradients = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        gradients[name] = (parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad).clone()
    return step.loss, dict(step.metrics), gradients
