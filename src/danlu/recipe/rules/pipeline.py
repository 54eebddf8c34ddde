"""Rules about pipeline parallelism: what goes through stages, and in which schedules."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.sections import Continue, Prefix, Prompt, Recipe
from danlu.recipe.yaml_tree import Problem


def pipeline_is_supported(recipe: Recipe) -> Iterator[Problem]:
    """Each stage can do its part of what the recipe asks, and the schedule is one that can be run."""
    section = recipe.parallel.pipeline
    if section.stages == 1:
        for key in sorted(section.model_fields_set - {"stages"}):
            if getattr(section, key) != type(section).model_fields[key].default:
                message = "there is one stage, and nothing to divide. Raise stages, or leave this out"
                yield Problem(f"parallel.pipeline.{key}", message, reads=("parallel.pipeline.stages",))
        return
    if section.defers_weight_gradients and recipe.parallel.accumulate == "sharded":
        message = (
            f"{section.schedule} puts weight gradients off, and gradients are reduced once, after the last of them. "
            "Use auto or local"
        )
        yield Problem("parallel.accumulate", message, reads=("parallel.pipeline.schedule",))
    if section.schedule == "pipedream":
        message = "pipedream updates within the list, which runs cannot do yet. Use 1f1b"
        yield Problem("parallel.pipeline.schedule", message, reads=("parallel.pipeline.stages",))
    for key, reason, instead in _not_of_stages(recipe):
        message = f"{reason}. {instead}, or parallel: {{pipeline: 1}}"
        yield Problem(key, message, reads=("parallel.pipeline.stages",))


def _not_of_stages(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """(key, reason, what to do instead) of what needs a whole model in one process."""
    if recipe.stage == "classify":
        yield "stage", "lenet5 is one chunk, which nothing divides", "Use more data ranks"
    elif recipe.stage == "rl":
        reason = "generation does not go from stage to stage, and rl trains on what its policy writes"
        yield "stage", reason, "Use tensor and shard"
    if recipe.on_policy:
        yield "on_policy", "generation does not go from stage to stage", "Leave it out"
    if recipe.numerics == "exact":
        yield "numerics", "whether bits are those of a rollout is checked on a whole model", "Use numerics: fast"
    if recipe.compile:
        yield "compile", "what is compiled is the forward pass of a whole model", "Leave it out"
    if recipe.memory.recompute.kind == "planned":
        reason = "a plan is measured on a whole model, and counts one micro-batch in memory"
        yield "memory.recompute.kind", reason, "Use full, every or selective"
    if recipe.evaluation.samples is not None:
        yield "evaluation.samples", "generation does not go from stage to stage", "Leave it out"
    if isinstance(recipe.adapter, Continue):
        yield "adapter.kind", "an adapter's folder is read onto a whole model", "Merge it into the base (danlu merge)"
    elif isinstance(recipe.adapter, Prefix | Prompt):
        reason = "virtual tokens begin at the embedding, which later stages do not have"
        yield "adapter.kind", reason, "Use lora"
    elif recipe.adapter is not None and recipe.model.adapters:
        yield "model.adapters", "adapters are put on a whole model", "Merge them into the base (danlu merge)"
