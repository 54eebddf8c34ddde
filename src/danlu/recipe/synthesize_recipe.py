"""Reading a recipe of `danlu synthesize`, and what its steps need of each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from danlu.recipe.loading import LoadedSection
from danlu.recipe.other_stages import OtherStage, load_other
from danlu.recipe.rules.paths import file_of, invalid_path, missing_paths
from danlu.recipe.sections import FunctionReward
from danlu.recipe.sections.curating import DecontaminateStep
from danlu.recipe.sections.synthesis import (
    AnsweringModel,
    AnswerStep,
    BestStep,
    DistillStep,
    EvolveStep,
    FromDocumentsStep,
    JudgeStep,
    MagpieStep,
    PairsStep,
    RejectionStep,
    SelfInstructStep,
    SynthesisStep,
    SynthesizeRecipe,
)
from danlu.recipe.yaml_tree import Problem

FIRST = (SelfInstructStep, MagpieStep, FromDocumentsStep)
"""Steps that begin with no rows of an earlier one."""
ASKING = (SelfInstructStep, MagpieStep, FromDocumentsStep, EvolveStep, AnswerStep, JudgeStep, DistillStep)
"""Steps that ask a model."""


def load_synthesize_recipe(path: Path, overrides: Sequence[str] = ()) -> tuple[SynthesizeRecipe, LoadedSection]:
    """Reads and checks a recipe with `stage: synthesize`; also with the origins of its values.

    Raises RecipeError with one line for each problem, as `loading.load`.
    """
    kind = OtherStage("synthesize", "danlu synthesize", SynthesizeRecipe)
    return load_other(path, overrides, kind, _problems)


def model_of(recipe: SynthesizeRecipe, step: SynthesisStep) -> AnsweringModel | None:
    """The model that a step asks; None for one that asks none."""
    return (step.model or recipe.model) if isinstance(step, ASKING) else None


def _problems(recipe: SynthesizeRecipe) -> Iterator[Problem]:
    yield from _model_problems("model", recipe.model)
    for number, step in enumerate(recipe.steps):
        if isinstance(step, ASKING) and step.model is not None:
            yield from _model_problems(f"steps.{number}.model", step.model)
    yield from _order_problems(recipe)
    yield from _step_problems(recipe)
    yield from _path_problems(recipe)
    if recipe.budget.cost is not None and not _all_priced(recipe):
        yield Problem(
            "budget.cost", "needs the price of every model: price: [of prompts, of answers] per million", None
        )


def _model_problems(key: str, model: AnsweringModel) -> Iterator[Problem]:
    """Yields what a model lacks, or has too much of."""
    if (model.path is None) == (model.url is None):
        yield Problem(key, "name either a folder (path) or a server (url and name)", None)
        return
    if model.url is None:
        for name in ("name", "key"):
            if getattr(model, name) is not None:
                yield Problem(f"{key}.{name}", "is of a model behind a server: add its url, or leave it out", None)
        return
    if model.name is None:
        yield Problem(f"{key}.name", "is missing: the name that the server knows the model by", None)
    for name in ("device", "precision", "exact"):
        if name in model.model_fields_set:
            yield Problem(f"{key}.{name}", "is of a model of this machine; a server decides it. Leave it out", None)
    variable = (model.key or "").removeprefix("env:")
    if variable and not os.environ.get(variable):
        yield Problem(
            f"{key}.key", f"the environment has no {variable}, which should hold the key of {model.url}", None
        )


def _all_priced(recipe: SynthesizeRecipe) -> bool:
    models = [model_of(recipe, step) for step in recipe.steps]
    return all(model.price is not None for model in models if model is not None)


def _order_problems(recipe: SynthesizeRecipe) -> Iterator[Problem]:
    """Yields steps whose rows come from no step before them, and those that what comes before has no use for."""
    if not recipe.steps:
        yield Problem("steps", "has no step", None)
        return
    first, data = recipe.steps[0], recipe.data
    if isinstance(first, FromDocumentsStep) and not data.documents:
        yield Problem("data.documents", "is missing: from-documents asks about texts. Name a file of them", None)
    elif not isinstance(first, MagpieStep | FromDocumentsStep) and not data.seeds:
        message = f"is missing: {first.kind} begins with tasks. Name a file of them, or begin with magpie"
        yield Problem("data.seeds", message, None)
    if data.types is not None and not isinstance(first, SelfInstructStep):
        yield Problem("data.types", "is read by self-instruct alone, which is not the first step", None)
    has_answers, has_scores, is_paired = isinstance(first, FromDocumentsStep), False, False
    for number, step in enumerate(recipe.steps):
        key = f"steps.{number}"
        if number and isinstance(step, FIRST):
            yield Problem(key, f"{step.kind} makes prompts of its own, so it can only be the first step", None)
        elif isinstance(step, JudgeStep | RejectionStep) and not has_answers:
            yield Problem(key, f"{step.kind} looks at answers, and no step before makes any: add answer", None)
        elif isinstance(step, PairsStep | BestStep) and not has_scores:
            yield Problem(key, f"{step.kind} compares scores, and no step before gives any: add judge", None)
        elif is_paired and isinstance(step, ASKING):
            yield Problem(key, f"{step.kind} cannot follow pairs: only deduplicate and decontaminate can", None)
        elif isinstance(step, EvolveStep) and has_answers:
            yield Problem(key, "evolve rewrites prompts, and these have answers: put it before them", None)
        if isinstance(step, AnswerStep | DistillStep):
            has_answers, has_scores = True, False
        has_scores |= isinstance(step, JudgeStep)
        is_paired |= isinstance(step, PairsStep)


def _step_problems(recipe: SynthesizeRecipe) -> Iterator[Problem]:
    """Yields keys of a step that contradict each other."""
    for number, step in enumerate(recipe.steps):
        key = f"steps.{number}"
        if isinstance(step, AnswerStep | DistillStep) and step.samples > 1 and step.temperature == 0:
            message = "at temperature 0 all answers to a prompt are equal: use samples: 1, or a temperature above 0"
            yield Problem(f"{key}.samples", message, None)
        if isinstance(step, JudgeStep) and step.votes > 1 and step.temperature == 0:
            yield Problem(f"{key}.votes", "at temperature 0 all votes are equal: use votes: 1", None)
        if isinstance(step, PairsStep) and not _samples_before(recipe, number) > 1:
            yield Problem(key, "pairs compares answers to one prompt, and there is one of each: raise samples", None)
        if isinstance(step, MagpieStep):
            model = model_of(recipe, step)
            if step.temperature == 0 and step.rows > 1:
                yield Problem(f"{key}.temperature", "at temperature 0 all prompts are equal: use one above 0", None)
            if model is not None and model.url is not None and step.header is None:
                message = "is needed for a server: the template's text before a user's turn, \"<|im_start|>user\\n\""
                yield Problem(f"{key}.header", message, None)
        if isinstance(step, EvolveStep) and not step.operations:
            yield Problem(f"{key}.operations", "names none", None)
        if isinstance(step, RejectionStep) and not step.rewards:
            yield Problem(f"{key}.rewards", "names none", None)


def _samples_before(recipe: SynthesizeRecipe, number: int) -> int:
    """The answers to a prompt that reach a step at most."""
    for step in reversed(recipe.steps[:number]):
        if isinstance(step, BestStep):
            return 1
        if isinstance(step, AnswerStep | DistillStep):
            return step.samples
    return 1


def _path_problems(recipe: SynthesizeRecipe) -> Iterator[Problem]:
    """Yields paths that no file system takes, and those that are not there."""
    paths, local = dict[str, str](), set[str]()
    for name in ("seeds", "documents"):
        sources = enumerate(getattr(recipe.data, name))
        paths |= {f"data.{name}.{index}.path": file_of(source) for index, source in sources}
    files: Mapping[str, str | None] = {"data.types": recipe.data.types}
    for number, step in enumerate(recipe.steps):
        if isinstance(step, JudgeStep):
            files = {**files, f"steps.{number}.rubric": step.rubric}
        if isinstance(step, DecontaminateStep):
            paths |= {f"steps.{number}.against.{i}.path": file_of(source) for i, source in enumerate(step.against)}
        if isinstance(step, RejectionStep):
            functions = {
                f"steps.{number}.rewards.{index}.path": reward.file
                for index, reward in enumerate(step.rewards)
                if isinstance(reward, FunctionReward)
            }
            files = {**files, **functions}
    given = {key: path for key, path in files.items() if path is not None}
    paths |= given
    local |= given.keys()
    if recipe.model.path is not None:
        paths["model.path"] = recipe.model.path
    for number, step in enumerate(recipe.steps):
        if isinstance(step, ASKING) and step.model is not None and step.model.path is not None:
            paths[f"steps.{number}.model.path"] = step.model.path
    for key, path in {**paths, "output": recipe.output}.items():
        if (reason := invalid_path(path)) is not None:
            yield Problem(key, reason)
    yield from missing_paths(paths, local)
