"""Recipes of stages that do not train: each is a class of its own, with a verb of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from danlu.core.errors import RecipeError
from danlu.recipe.loading import LoadedSection, in_order, read_text
from danlu.recipe.overrides import Override, parse_overrides, put
from danlu.recipe.sections import Section
from danlu.recipe.short_forms import expand
from danlu.recipe.stage_names import VERBS_OF_STAGES
from danlu.recipe.validation import validate_section
from danlu.recipe.yaml_reader import parse
from danlu.recipe.yaml_tree import Node, Problem

RecipeType = TypeVar("RecipeType", bound=Section)


@dataclass(frozen=True)
class OtherStage(Generic[RecipeType]):
    """A stage that does not train.

    Attributes:
        stage: the value of `stage`.
        verb: the command that takes such recipes.
        root: the class of the recipe.
    """

    stage: str
    verb: str
    root: type[RecipeType]


@cache
def other_stages() -> tuple[OtherStage[Section], ...]:
    """All of them."""
    from danlu.recipe.sections.curating import CurateRecipe
    from danlu.recipe.sections.quantizing import QuantizeRecipe
    from danlu.recipe.sections.synthesis import SynthesizeRecipe

    roots: dict[str, type[Section]] = {
        "quantize": QuantizeRecipe,
        "curate": CurateRecipe,
        "synthesize": SynthesizeRecipe,
    }
    return tuple(OtherStage(stage, VERBS_OF_STAGES[stage], root) for stage, root in roots.items())


def load_other(
    path: Path,
    overrides: Sequence[str],
    kind: OtherStage[RecipeType],
    conflicts: Callable[[RecipeType], Iterator[Problem]],
) -> tuple[RecipeType, LoadedSection]:
    """Reads and checks a recipe of a stage that does not train; also with the origins of its values.

    conflicts: yields what each value allows, but not all of them together.

    Raises RecipeError with one line for each problem, as `loading.load`.
    """
    problems: list[Problem] = []
    tree = parse(read_text(path), str(path), problems)
    recipe = None
    if tree is not None and is_of(tree, kind, problems):
        complete(tree, parse_overrides(overrides, problems), problems, kind.root)
        recipe = check(tree, problems, kind.root, conflicts)
    if recipe is None or tree is None or problems:
        raise RecipeError([problem.line(str(path)) for problem in in_order(problems)])
    return recipe, LoadedSection(recipe, {key: node.origin for key, node in tree.walk()})


def is_of(tree: Node, kind: OtherStage[RecipeType], problems: list[Problem]) -> bool:
    """Whether a file is a recipe of this kind; if it is another one, that is added to `problems`."""
    if not isinstance(tree.value, dict):
        problems.append(Problem("", f"a recipe is a mapping of keys such as 'stage: {kind.stage}'", tree.origin))
        return False
    stage, stages = tree.child("stage"), tree.child("stages")
    if stages is not None:
        message = f"this is a chain of recipes, which `danlu train` takes. Name a recipe with stage: {kind.stage} here"
        problems.append(Problem("stages", message, stages.key_origin or stages.origin))
    elif stage is not None and stage.value != kind.stage:
        verbs = {each.stage: each.verb for each in other_stages()}
        verb = verbs.get(str(stage.value), "danlu train")
        message = f"`{kind.verb}` takes recipes with stage: {kind.stage}, this is {stage.value}. Use `{verb}`"
        problems.append(Problem("stage", message, stage.origin))
    else:
        return True
    return False


def complete(tree: Node, overrides: Sequence[Override], problems: list[Problem], root: type[Section]) -> None:
    """Brings a mapping to its full form with the overrides in it, in place."""
    tree.value = expand(tree, root).value
    put(tree, overrides, problems, root)
    tree.value = expand(tree, root).value


def check(
    tree: Node,
    problems: list[Problem],
    root: type[RecipeType],
    conflicts: Callable[[RecipeType], Iterator[Problem]],
) -> RecipeType | None:
    """The recipe of a tree in full form, or None; everything that is wrong is added to `problems`.

    conflicts: as in `load_other`.
    """
    recipe, wrong = validate_section(tree, root)
    problems += wrong
    if recipe is not None:
        problems += [replace(each, origin=tree.nearest(each.key)[0].origin) for each in conflicts(recipe)]
    return recipe
