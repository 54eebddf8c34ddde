"""Rules about long context: its stages of lengths, and the keys that each method reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from danlu.recipe.sections import Recipe
from danlu.recipe.yaml_tree import Problem


def long_context_fits_stage(recipe: Recipe) -> Iterator[Problem]:
    """Long context is for stages pretrain and sft."""
    section = recipe.long_context
    if section is None:
        return
    if recipe.stage not in ("pretrain", "sft"):
        message = (
            f"stage {recipe.stage} takes a model as it is. Train it at more tokens with stage pretrain or sft first"
        )
        yield Problem("long_context", message, reads=("stage",))


def lengths_do_not_shrink(recipe: Recipe) -> Iterator[Problem]:
    """Stages of lengths grow, and say how long the run is and how long its samples are."""
    section = recipe.long_context
    if section is None or not section.stages:
        return
    stages = section.stages
    for index, (before, stage) in enumerate(pairwise(stages), start=1):
        if stage.length < before.length:
            message = f"{stage.length} after {before.length}: lengths do not shrink. Put the shorter stage first"
            yield Problem(f"long_context.stages.{index}.length", message)
    longest, steps = max(stage.length for stage in stages), sum(stage.steps for stage in stages)
    if recipe.epochs is not None:
        message = f"the run's length is that of its stages, {steps} steps. Leave epochs out"
        yield Problem("epochs", message, reads=("long_context.stages",))
    elif recipe.steps not in (None, steps):
        message = f"{recipe.steps}, but the stages of long_context have {steps} steps. Leave steps out"
        yield Problem("steps", message, reads=("long_context.stages",))
    if recipe.data.max_length != longest:
        message = f"{recipe.data.max_length}, but long_context.stages say how long samples are, at last {longest}. "
        yield Problem("data.max_length", f"{message}Leave it out", reads=("long_context.stages",))
    if recipe.data.streaming:
        message = "a stream is read once, in order, and each length packs the rows again. Leave streaming out"
        yield Problem("data.streaming", message, reads=("long_context.stages",))
    batch = recipe.batch
    if batch.tokens is None or recipe.data.packing.kind == "none":
        return
    for index, stage in enumerate(stages):
        if stage.length != longest and batch.tokens % stage.length:
            message = f"{stage.length} does not divide batch.tokens {batch.tokens}: steps are whole packed sequences"
            yield Problem(f"long_context.stages.{index}.length", message, reads=("batch.tokens",))


def longrope_has_factors(recipe: Recipe) -> Iterator[Problem]:
    """LongRoPE's factors are given or searched, and no other method reads them."""
    section = recipe.long_context
    if section is None:
        return
    reads = ("long_context.method",)
    given = [name for name in ("long_factor", "short_factor", "search") if getattr(section, name) is not None]
    if section.method != "longrope":
        for name in given:
            yield Problem(
                f"long_context.{name}", f"only method longrope reads it; this is {section.method}", reads=reads
            )
        return
    if not given or given == ["short_factor"]:
        message = "longrope divides each frequency by a factor of its own: give long_factor, or search: {}"
        yield Problem("long_context.method", message, reads=("long_context.long_factor", "long_context.search"))
    long, short = section.long_factor, section.short_factor
    if long is not None and short is not None and len(long) != len(short):
        message = f"{len(short)} factors, and long_factor has {len(long)}: both have one for each pair of features"
        yield Problem("long_context.short_factor", message, reads=("long_context.long_factor",))
    if section.search is not None and recipe.model.path is None:
        message = "candidates are judged by what the model has learnt: give model.path, a trained one"
        yield Problem("long_context.search", message, reads=("model",))
    if section.search is not None and recipe.data.eval is None:
        message = "candidates are judged by held-out documents: add data.eval (a share such as 0.02, or files)"
        yield Problem("long_context.search", message, reads=("data.eval",))
