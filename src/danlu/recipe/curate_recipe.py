"""Reading a recipe of `danlu data clean`, which is of another kind than those that train."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from danlu.core.errors import RecipeError
from danlu.recipe.from_arguments import node_of
from danlu.recipe.other_stages import OtherStage, check, complete, load_other
from danlu.recipe.rules.paths import file_of, invalid_path, missing_paths
from danlu.recipe.sections.curating import (
    CurateRecipe,
    DecontaminateStep,
    DeduplicationStep,
    PersonalStep,
    QualityStep,
    SelectStep,
)
from danlu.recipe.stage_names import VERBS_OF_STAGES
from danlu.recipe.yaml_tree import Origin, Problem


def load_curate_recipe(path: Path, overrides: Sequence[str] = ()) -> CurateRecipe:
    """Reads and checks a recipe with `stage: curate`.

    Raises RecipeError with one line for each problem, as `loading.load`.
    """
    kind = OtherStage("curate", VERBS_OF_STAGES["curate"], CurateRecipe)
    return load_other(path, overrides, kind, _problems)[0]


def curate_recipe_of(values: Mapping[str, Any], verb: str) -> CurateRecipe:
    """A recipe that a verb makes of its arguments, checked as one from a file.

    Raises RecipeError with one line for each problem; it begins with the verb.
    """
    problems: list[Problem] = []
    tree = node_of({"stage": "curate", **values}, Origin(verb))
    complete(tree, [], problems, CurateRecipe)
    recipe = check(tree, problems, CurateRecipe, _problems)
    if recipe is None or problems:
        raise RecipeError([problem.line(verb) for problem in problems])
    return recipe


def _problems(recipe: CurateRecipe) -> Iterator[Problem]:
    yield from _conflicts(recipe)
    yield from _path_problems(recipe)


def _path_problems(recipe: CurateRecipe) -> Iterator[Problem]:
    """Yields paths that no file system takes, those that are not there, and an output that is or holds an input."""
    paths = {f"data.{index}.path": file_of(source) for index, source in enumerate(recipe.data)}
    for number, step in enumerate(recipe.steps):
        if isinstance(step, DecontaminateStep):
            sources = enumerate(step.against)
            paths |= {f"steps.{number}.against.{index}.path": file_of(source) for index, source in sources}
    for key, path in {**paths, "output": recipe.output}.items():
        if (reason := invalid_path(path)) is not None:
            yield Problem(key, reason)
            return
    output = Path(recipe.output).expanduser().absolute()
    for key, path in paths.items():
        absolute = Path(path).expanduser().absolute()
        if absolute == output or output in absolute.parents or absolute in output.parents:
            relation = "lies in" if absolute in output.parents else "is or holds"
            yield Problem("output", f"{relation} {key} ({path}), which is read. Choose another output", reads=(key,))
    yield from missing_paths(paths)


def _conflicts(recipe: CurateRecipe) -> Iterator[Problem]:
    """Yields what each value allows, but not all of them together."""
    for number, source in enumerate(recipe.data):
        if source.weight is not None:
            message = "is a share of a mixture, which training makes of the data set. Leave it out"
            yield Problem(f"data.{number}.weight", message)
        if source.format == "tokenized":
            yield Problem(f"data.{number}.format", "rows of tokens have no texts. Name the rows they were made of")
    for number, step in enumerate(recipe.steps):
        key = f"steps.{number}"
        if isinstance(step, DeduplicationStep):
            yield from _deduplicate_conflicts(step, key)
        elif isinstance(step, QualityStep):
            kinds = [rules.kind for rules in step.rules]
            yield from (Problem(f"{key}.rules", f"names {kind} twice") for kind in _repeated(kinds))
            for index, rules in enumerate(step.rules):
                for name in ("words", "mean_length"):
                    bounds = getattr(rules, name, None)
                    if isinstance(bounds, tuple) and bounds[0] > bounds[1]:
                        message = f"the smallest, {bounds[0]}, is larger than the largest, {bounds[1]}"
                        yield Problem(f"{key}.rules.{index}.{name}", message)
        elif isinstance(step, PersonalStep) and step.action == "drop" and "mask" in step.model_fields_set:
            yield Problem(f"{key}.mask", "only read with action: mask")
        elif isinstance(step, SelectStep) and step.by != "quota" and "of" in step.model_fields_set:
            yield Problem(f"{key}.of", "only read with by: quota")
        elif isinstance(step, DecontaminateStep) and step.shortest > step.words:
            yield Problem(f"{key}.shortest", f"is more than words: {step.words}, the longest run that is looked for")


def _deduplicate_conflicts(step: DeduplicationStep, key: str) -> Iterator[Problem]:
    yield from (Problem(f"{key}.by", f"names {by} twice") for by in _repeated(step.by))
    for by, names in (("minhash", ("words", "bands", "at_least")), ("paragraph", ("paragraph",))):
        if by not in step.by:
            for name in names:
                if name in step.model_fields_set:
                    yield Problem(f"{key}.{name}", f"is a setting of {by}, which `by` does not name")


def _repeated(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1})
