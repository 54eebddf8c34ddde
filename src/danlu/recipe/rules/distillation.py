"""Rules about the teachers and the objective of stage `distill`."""

from __future__ import annotations

from collections.abc import Iterator

from danlu.recipe.rules.paths import sources_of
from danlu.recipe.sections import Divergence, HiddenStates, Prefix, Prompt, Recipe
from danlu.recipe.yaml_tree import Problem


def distillation_has_teacher(recipe: Recipe) -> Iterator[Problem]:
    """Stage distill has a teacher, no other stage has one, and a teacher is one that the run can have."""
    if recipe.stage != "distill":
        if recipe.teacher is not None:
            message = f"only stage distill has a teacher; this is {recipe.stage}. Leave it out, or set stage: distill"
            yield Problem("teacher", message, reads=("stage",))
        return
    if not recipe.teacher:
        yield Problem("teacher", "missing: stage distill learns from one. Name its folder or run", reads=("stage",))
    for index, teacher in enumerate(recipe.teacher or ()):
        key = f"teacher.{index}"
        if teacher.cache and teacher.top_k is None:
            message = (
                "true writes down the likeliest tokens of the teacher, and top_k does not say how many. Give top_k, "
                "such as 64; a whole distribution is too much for every token"
            )
            yield Problem(f"{key}.cache", message, reads=(f"{key}.top_k",))
        if teacher.cache and recipe.data.streaming:
            message = "true: a stream is read only once, while training. Leave it out, or set data.streaming: false"
            yield Problem(f"{key}.cache", message, reads=("data.streaming",))
        if not teacher.cache and isinstance(recipe.adapter, Prefix | Prompt):
            message = (
                f"{recipe.adapter.kind} puts virtual tokens before every document, which a teacher in memory does not "
                f"know. Give the teacher top_k and cache: true, or take adapter: lora"
            )
            yield Problem("adapter.kind", message, reads=(key,))


def distillation_has_one_divergence(recipe: Recipe) -> Iterator[Problem]:
    """The objective of stage distill is one divergence, and at most one term of hidden states beside it."""
    if recipe.stage != "distill" or recipe.objective is None:
        return
    divergences = [index for index, term in enumerate(recipe.objective) if isinstance(term, Divergence)]
    hidden = [index for index, term in enumerate(recipe.objective) if isinstance(term, HiddenStates)]
    if len(divergences) > 1:
        first, second = (recipe.objective[index].kind for index in divergences[:2])
        message = f"{second} beside {first}: there is one divergence. Take jensen-shannon for something between both"
        yield Problem(f"objective.{divergences[1]}.kind", message, reads=("objective",))
    if hidden and not divergences:
        message = "hidden is a term beside a divergence: add forward, reverse or jensen-shannon"
        yield Problem(f"objective.{hidden[0]}.kind", message, reads=("objective",))
    if len(hidden) > 1:
        yield Problem(f"objective.{hidden[1]}.kind", "hidden is there already. Leave one out", reads=("objective",))
    for index, teacher in enumerate(recipe.teacher or ()):
        if hidden and teacher.cache:
            message = "hidden states are not cached: leave out cache, or the term of hidden states"
            yield Problem(f"teacher.{index}.cache", message, reads=("objective",))


def own_answers_are_possible(recipe: Recipe) -> Iterator[Problem]:
    """With `on_policy` rows are prompts that are answered one by one, and everything asked of an answer can be."""
    data, rollout = recipe.data, recipe.rollout
    if not recipe.on_policy:
        return
    if recipe.stage != "distill":
        hint = ": all of its answers are the policy's own" if recipe.stage == "rl" else ""
        yield Problem("on_policy", f"only read with stage distill; this is {recipe.stage}{hint}", reads=("stage",))
        return
    reads = ("on_policy",)
    for index, teacher in enumerate(recipe.teacher or ()):
        if teacher.cache:
            message = "true: what the policy will answer is not known before training. Leave it out, or on_policy"
            yield Problem(f"teacher.{index}.cache", message, reads=reads)
    for index, term in enumerate(recipe.objective or ()):
        if isinstance(term, Divergence) and term.cross_entropy:
            message = (
                f"{term.cross_entropy}: the likelihood of rows, and with on_policy the policy would learn its own "
                "answers by heart. Leave it out"
            )
            yield Problem(f"objective.{index}.cross_entropy", message, reads=reads)
    if data.streaming:
        message = "on_policy answers rows that are read before training begins. Leave streaming out"
        yield Problem("data.streaming", message, reads=reads)
    if data.packing.kind != "none":
        message = f"{data.packing.kind}: with on_policy each row is an item of its own. Leave packing out"
        yield Problem("data.packing.kind", message, reads=reads)
    if data.overlong == "split":
        message = "with on_policy a row is a prompt that is answered, and cannot be split. Use truncate or drop"
        yield Problem("data.overlong", message, reads=reads)
    if data.train_on == "all":
        message = "all: with on_policy the policy writes what is trained, and it does not ask. Leave train_on out"
        yield Problem("data.train_on", message, reads=reads)
    for key, source in sources_of(data):
        if source.format == "text" and key.startswith("data.train"):
            message = "rows of format text have no prompt, and on_policy answers one. Use conversations"
            yield Problem(key.removesuffix("path") + "format", message, reads=reads)
    if "" in rollout.stop_strings:
        message = "an empty text ends every answer before it begins. Leave it out"
        yield Problem("rollout.stop_strings", message)
