"""Rules about teachers and divergences from them, in stages `distill` and `rl`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from danlu.recipe.rules.paths import sources_of
from danlu.recipe.sections import Divergence, HiddenStates, Prefix, Prompt, Recipe, Teacher
from danlu.recipe.sections.base import VariantSection
from danlu.recipe.yaml_tree import Problem


def distillation_has_teacher(recipe: Recipe) -> Iterator[Problem]:
    """Checks that recipes that learn from a teacher have one, that others have none, and that the run can use it."""
    divergence = recipe.divergence
    if recipe.stage == "distill":
        if not recipe.teacher:
            yield Problem("teacher", "missing: stage distill learns from one. Name its folder or run", reads=("stage",))
    elif divergence is None:
        if recipe.teacher is not None:
            message = (
                "the objective has no divergence from one, so nothing is learnt from it. Give one, as in "
                "objective: [grpo, {kind: reverse, weight: 0.1}], or leave it out"
            )
            yield Problem("teacher", message, reads=("stage", "objective"))
        return
    else:
        if not recipe.teacher and recipe.policy_gradient is not None:
            message = f"missing: objective {divergence.kind} is the distance from one. Name its folder or run"
            yield Problem("teacher", message, reads=("objective",))
        yield from _teachers_suit_answers_to_come(recipe.teacher or (), advise=recipe.teachers_advise)
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
                f"know. {'Take' if recipe.stage == 'rl' else 'Give the teacher top_k and cache: true, or take'} "
                "adapter: lora"
            )
            yield Problem("adapter.kind", message, reads=(key,))


def _teachers_suit_answers_to_come(teachers: Sequence[Teacher], *, advise: bool) -> Iterator[Problem]:
    """Teachers of stage rl are asked while training, and of drawn tokens alone where these are all that is learnt."""
    for index, teacher in enumerate(teachers):
        if teacher.cache:
            message = "true: answers are drawn while training, so nothing is known of them before. Leave it out"
            yield Problem(f"teacher.{index}.cache", message, reads=("stage",))
        if teacher.top_k is not None and advise:
            message = "not read with policy_gradient: true, which asks of the drawn tokens alone. Leave it out"
            yield Problem(f"teacher.{index}.top_k", message, reads=("objective",))


def divergence_suits_drawn_tokens(recipe: Recipe) -> Iterator[Problem]:
    """Stage rl has no rows with answers, and teachers that advise on drawn tokens have no temperature."""
    for index, term in enumerate(recipe.objective or ()):
        if not isinstance(term, Divergence):
            continue
        key = f"objective.{index}"
        if term.cross_entropy:
            message = f"{term.cross_entropy}: the likelihood of rows, which stage rl has none of. Leave it out"
            yield Problem(f"{key}.cross_entropy", message, reads=("stage",))
        if recipe.teachers_advise and term.temperature != 1:
            message = "not read with policy_gradient: true: tokens are compared as they were drawn. Leave it out"
            yield Problem(f"{key}.temperature", message, reads=(f"{key}.policy_gradient",))


def distillation_has_one_divergence(
    objective: Sequence[VariantSection], teachers: Sequence[Teacher]
) -> Iterator[Problem]:
    """The objective of stage distill is one divergence, and at most one term of hidden states."""
    divergences = [index for index, term in enumerate(objective) if isinstance(term, Divergence)]
    hidden = [index for index, term in enumerate(objective) if isinstance(term, HiddenStates)]
    if len(divergences) > 1:
        first, second = (objective[index].kind for index in divergences[:2])
        message = f"{second} next to {first}: there is one divergence. Take jensen-shannon for something between both"
        yield Problem(f"objective.{divergences[1]}.kind", message, reads=("objective",))
    if hidden and not divergences:
        message = "hidden is a term next to a divergence: add forward, reverse or jensen-shannon"
        yield Problem(f"objective.{hidden[0]}.kind", message, reads=("objective",))
    if len(hidden) > 1:
        yield Problem(f"objective.{hidden[1]}.kind", "hidden is there already. Leave one out", reads=("objective",))
    for index, teacher in enumerate(teachers):
        if hidden and teacher.cache:
            message = "hidden states are not cached: leave out cache, or the term of hidden states"
            yield Problem(f"teacher.{index}.cache", message, reads=("objective",))


def own_answers_are_possible(recipe: Recipe) -> Iterator[Problem]:
    """Checks that with `on_policy` rows are prompts that are answered one by one, and that answers can be used as
    asked.
    """
    data, rollout = recipe.data, recipe.rollout
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
