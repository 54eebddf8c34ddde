"""One row for each stage of training: the table to add a new one to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from danlu.recipe import Recipe
from danlu.recipe.sections import BradleyTerry, HiddenStates, Stepwise
from danlu.recipe.value import value_rate, value_share
from danlu.registry import resolve
from danlu.stages.protocols import Stage


@dataclass(frozen=True)
class Part:
    """A part of a stage by its name, `module:name` in `stages/`, which is imported when it is called."""

    name: str

    @property
    def target(self) -> str:
        """The target of the part, as `registry.resolve` takes it."""
        return f"danlu.stages.{self.name}"

    def __call__(self, *arguments: Any) -> Any:
        return resolve(self.target)(*arguments)


def objective_rate(recipe: Recipe) -> float:
    """The factor on the learning rate of a score head, or of maps of hidden states."""
    if value_share(recipe) is not None:
        return value_rate(recipe)
    trained = (BradleyTerry, Stepwise, HiddenStates)
    return next((term.rate_ratio for term in recipe.objective or () if isinstance(term, trained)), 1.0)


_LIKELIHOOD: dict[str, Any] = {
    "objective": Part("likelihood:likelihood"),
    "evaluation": Part("likelihood:plain_likelihood"),
    "metrics": Part("likelihood:likelihood_metrics"),
}
STAGES: dict[str, Stage] = {
    "classify": Stage(Part("classifier:ImageReader"), Part("classifier:ClassifierBuilder"), **_LIKELIHOOD),
    "distill": Stage(
        Part("reader:PackReader"),
        Part("distillation:DistillationBuilder"),
        Part("distillation:distillation"),
        Part("distillation:teacher_models"),
        Part("distillation:held_out_distillation"),
        columns=Part("distillation:teacher_columns"),
        items=Part("distillation:on_policy_items"),
        objective_rate=objective_rate,
        metrics=Part("distillation:distillation_metrics"),
    ),
    "preference": Stage(
        Part("tree_reader:TreeReader"),
        Part("builder:DecoderBuilder"),
        Part("preference:preference"),
        Part("preference:reference_models"),
        columns=Part("preference:reference_columns"),
        metrics=Part("preference:preference_metrics"),
    ),
    "pretrain": Stage(Part("reader:PackReader"), Part("builder:DecoderBuilder"), **_LIKELIHOOD),
    "reward": Stage(
        Part("tree_reader:TreeReader"),
        Part("builder:DecoderBuilder"),
        Part("reward:reward"),
        task=Part("reward:reward_task"),
        objective_rate=objective_rate,
        metrics=Part("reward:reward_metrics"),
    ),
    "rl": Stage(
        Part("prompt_reader:PromptReader"),
        Part("prompt_reader:RolloutBuilder"),
        Part("policy_objective:policy_objective"),
        Part("policy_objective:models_beside_policy"),
        Part("policy_objective:held_out_rewards"),
        items=Part("reinforcement:experience_items"),
        objective_rate=objective_rate,
        metrics=Part("policy_objective:policy_metrics"),
        remarks=Part("rollout_remarks:RolloutRemarks"),
        lead=Part("rollout_remarks:rollout_numbers"),
        trained_roles=Part("value_model:trained_roles"),
    ),
    "sft": Stage(Part("reader:PackReader"), Part("builder:DecoderBuilder"), **_LIKELIHOOD),
}
"""The stages by their name in a recipe's `stage`; sorted. The two stages of language differ in how `data/` renders
their rows."""
