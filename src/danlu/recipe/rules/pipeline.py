"""Rules about pipeline parallelism: settings that stages support, and in which schedules."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.rules.refusals import refusals
from danlu.recipe.sections import DraftModel, Prompt, Recipe
from danlu.recipe.value import value_adapter_folder
from danlu.recipe.yaml_tree import Problem


def pipeline_is_supported(recipe: Recipe) -> Iterator[Problem]:
    """Checks that each stage can do its part of the recipe, and that the schedule can be run."""
    section = recipe.parallel.pipeline
    if recipe.log.timeline is not None and (section.stages == 1 or section.updates_each_micro_batch):
        reason = "with one stage nothing waits for another" if section.stages == 1 else "pipedream's steps overlap"
        message = f"a timeline is that of one step of several stages, and {reason}. Leave it out"
        yield Problem("log.timeline", message, reads=("parallel.pipeline.stages", "parallel.pipeline.schedule"))
    if section.stages == 1:
        return
    if section.defers_weight_gradients and recipe.parallel.accumulate == "sharded":
        message = (
            f"{section.schedule} puts weight gradients off, and gradients are reduced once, after the last of them. "
            "Use auto or local"
        )
        yield Problem("parallel.accumulate", message, reads=("parallel.pipeline.schedule",))
    if section.vertical_sync and not section.updates_each_micro_batch:
        message = f"with {section.schedule} all stages have one version of the weights. Leave it out, or use pipedream"
        yield Problem("parallel.pipeline.vertical_sync", message, reads=("parallel.pipeline.schedule",))
    if section.defers_weight_gradients and recipe.compile:
        message = (
            f"{section.schedule} puts weight gradients off, and compiled code makes both gradients in one piece. "
            "Use 1f1b or interleaved, or leave it out"
        )
        yield Problem("compile", message, reads=("parallel.pipeline.schedule",))
    if section.updates_each_micro_batch:
        yield from refusals(_not_of_pipedream(recipe), "schedule: 1f1b", "parallel.pipeline.schedule")
    yield from refusals(_not_of_stages(recipe), "parallel: {pipeline: 1}", "parallel.pipeline.stages")


def _not_of_stages(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields (key, reason, remedy) of settings that need a whole model in one process."""
    if recipe.stage == "classify":
        yield "stage", "lenet5 is one chunk, which nothing divides", "Use more data ranks"
    if value_adapter_folder(recipe) is not None:
        yield "value.model", "an adapter's folder is read onto a whole model", "Leave it out, or use share: none"
    if isinstance(recipe.rollout.draft, DraftModel):
        reason = "each stage would have to propose the same tokens, and the one that draws asks the model for more"
        yield "rollout.draft.kind", reason, "Use ngram"
    if recipe.numerics == "exact":
        yield "numerics", "whether bits are those of a rollout is checked on a whole model", "Use numerics: fast"
    if isinstance(recipe.adapter, Prompt):
        reason = "a soft prompt is at the embedding alone, and later stages would train nothing"
        yield "adapter.kind", reason, "Use prefix"


def _not_of_pipedream(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Yields (key, reason, remedy) of settings that need all of a step before its update, or one version of the
    weights.

    Checks that need the model are in `plan.pipeline_split.pipedream_problems`.
    """
    parallel, batch = recipe.parallel, recipe.batch
    if recipe.stage not in ("pretrain", "sft"):
        reason = (
            "pipedream begins steps before the weights are there that answers or log-probabilities before them need"
        )
        yield "stage", reason, "Use pretrain or sft"
    if parallel.shard != "none":
        reason = "FSDP2 gathers the newest parameters in a backward pass, and pipedream's is of an older version"
        yield "parallel.shard", reason, "Use none"
    if recipe.compile:
        reason = "whether compiled code reads the version of the weights that its forward pass had is not proven"
        yield "compile", reason, "Leave it out"
    if recipe.activations == "fp16":
        reason = "whether fp16 overflows is known once all stages have a step's gradient, and pipedream updates before"
        yield "precision", reason, "Use bf16 or fp32"
    if recipe.ema is not None:
        reason = "an average is of whole models after each step, and pipedream's stages are steps apart"
        yield "ema", reason, "Leave it out"
    if recipe.watch.policy != "warn":
        reason = f"{recipe.watch.policy} decides by a step's loss, and other stages update before they know it"
        yield "watch.policy", reason, "Use warn"
    if "parameters" in recipe.memory.offload:
        reason = "pipedream keeps several versions of parameters, and offloaded ones have one place"
        yield "memory.offload", reason, "Leave parameters out"
    if recipe.router is not None:
        reason = "the load of experts is counted and balanced by steps, of which pipedream has several in flight"
        yield "router", reason, "Train a model without experts"
    if recipe.long_context is not None and recipe.long_context.stages:
        reason = "pipedream's step is one micro-batch of one size, and steps of shorter samples have more of them"
        yield "long_context.stages", reason, "Train each length in a run of its own"
    packs = batch.packs(recipe.data.max_length) if batch.sequences or batch.tokens else None
    if (
        isinstance(batch.micro, int)
        and isinstance(parallel.data, int)
        and packs
        and packs > batch.micro * parallel.data
    ):
        each = "" if parallel.data == 1 else f" on each of {parallel.data} data ranks"
        reason = f"pipedream's step is one micro-batch{each}, and {packs} sequences are more than {batch.micro} in each"
        yield "batch.micro", reason, f"Use {-(-packs // parallel.data)} or auto, or fewer sequences in a step"
