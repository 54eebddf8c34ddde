"""Rules about long context: its stages of lengths, and the keys that each method reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from danlu.recipe.sections import LengthStage, LongContext, Recipe
from danlu.recipe.yaml_tree import Problem


def lengths_do_not_shrink(stages: Sequence[LengthStage], recipe: Recipe) -> Iterator[Problem]:
    """Stages of lengths grow, and say how long the run is and how long its samples are."""
    if not stages:
        return
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


def longrope_has_factors(section: LongContext, recipe: Recipe) -> Iterator[Problem]:
    """LongRoPE's factors are given or searched."""
    if section.method != "longrope":
        return
    if section.long_factor is None and section.search is None:
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
