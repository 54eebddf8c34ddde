"""Reading a recipe: file, environment and overrides, checked as one; every problem is reported at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from danlu.core.errors import DanluError, RecipeError
from danlu.core.small_files import read_small
from danlu.core.spelling import closest_match
from danlu.recipe import overrides as overriding
from danlu.recipe import rules
from danlu.recipe.evaluation_off import turn_off_evaluation
from danlu.recipe.overrides import Override
from danlu.recipe.sections import Recipe, Section
from danlu.recipe.short_forms import expand
from danlu.recipe.stage_defaults import expand_defaults, expand_importance
from danlu.recipe.stage_names import VERBS_OF_STAGES, expand_stage
from danlu.recipe.staged_lengths import expand_lengths
from danlu.recipe.validation import validate
from danlu.recipe.yaml_reader import MAX_BYTES, parse
from danlu.recipe.yaml_tree import Node, Origin, Problem, overlap

_BEGINS_WITH_KEY = re.compile(r"([a-z_]+(?:\.\w+)*): ")


@dataclass(frozen=True)
class LoadedSection:
    """A recipe of any kind, and where each of its values came from."""

    recipe: Section
    origins: Mapping[str, Origin]  # by dotted key, of what was written and of what the stage decides

    def origin(self, key: str) -> str:
        """`sft.yaml:4:3`, `override 'steps=10'`, `environment $DATA (sft.yaml:3:7)`, `default of stage sft, ...` or
        `default`."""
        return str(self.origins.get(key, "default"))

    def is_written(self, key: str) -> bool:
        """Whether the user gave the value at a key, which otherwise is a default."""
        return key in self.origins and not self.origins[key].default_of

    @contextmanager
    def naming_places(self) -> Iterator[None]:
        """Adds the place of a key to errors in the block that begin with a key of the recipe, as `load` does.

        Problems that a layout or a model has with a key are found long after the file was read.
        """
        try:
            yield
        except RecipeError as error:
            error.problems = [self._with_place(line) for line in error.problems]
            error.args = ("\n".join(error.problems),)
            raise
        except DanluError as error:
            error.args = (self._with_place(str(error)),)
            raise

    def _with_place(self, line: str) -> str:
        """`sft.yaml:4:3 parallel.tensor: ...` of `parallel.tensor: ...`; a line that begins otherwise as it is."""
        match = _BEGINS_WITH_KEY.match(line)
        if match is None or not _is_key(self.recipe, match[1]):
            return line
        key = match[1]
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        return f"{self.origins[key].place} {line}" if key else line


@dataclass(frozen=True)
class Loaded(LoadedSection):
    """A recipe that trains, with its origins."""

    recipe: Recipe
    notes: tuple[str, ...]  # warnings for the console


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Reads and checks a recipe. Paths in it are relative to the working directory, like those of the command line.

    Raises RecipeError with one line for each problem: file, line and column (or the override), key, remedy.
    """
    problems: list[Problem] = []
    return load_tree(parse(read_text(Path(path)), str(path), problems), path, overrides, problems)


def load_tree(tree: Node | None, path: str | Path, overrides: Sequence[str], problems: list[Problem]) -> Loaded:
    """Checks a recipe as `load` does, given the tree and the problems that `parse` has made of its file."""
    recipe = None if tree is None else _check(tree, overriding.parse_overrides(overrides, problems), problems)
    if problems or recipe is None or tree is None:
        raise RecipeError([problem.line(str(path)) for problem in in_order(problems)])
    return loaded(recipe, tree)


def _is_key(recipe: Section, key: str) -> bool:
    """Whether a recipe has a value at a dotted key."""
    value: Any = recipe
    for part in key.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Section) and part in type(value).model_fields:
            value = getattr(value, part)
        else:
            return False
    return True


def in_order(problems: Sequence[Problem]) -> list[Problem]:
    """Problems from the top of the file to its end, then those of overrides."""
    return sorted(problems, key=lambda problem: (0, 0, 0) if problem.origin is None else problem.origin.order)


def loaded(recipe: Recipe, tree: Node) -> Loaded:
    """A sound recipe with the origins of the tree that it was made of."""
    return Loaded(recipe, {key: node.origin for key, node in tree.walk()}, tuple(rules.notes(recipe)))


def load_resolved(path: str | Path) -> Recipe:
    """Reads a recipe that a run has written in full, to look at it: files that it names need not exist any more.

    Raises RecipeError for a file that is no recipe of this danlu.
    """
    problems: list[Problem] = []
    tree = parse(read_text(Path(path)), str(path), problems)
    if tree is not None and isinstance(tree.value, dict):
        tree.value = expand(tree, Recipe).value
        recipe, problems = validate(tree)
        if recipe is not None:
            return recipe
    raise RecipeError([problem.line(str(path)) for problem in problems] or f"{path}: not a recipe")


def _check(tree: Node, overrides: Sequence[Override], problems: list[Problem]) -> Recipe | None:
    """Brings `tree` to its full form with the overrides in it, and adds everything that is wrong to `problems`."""
    if not isinstance(tree.value, dict):
        state = "the file is empty" if tree.value is None else "a recipe is a mapping of keys such as 'stage: sft'"
        problems.append(Problem("", f"{state}. `danlu recipes copy sft` writes one to begin with", tree.origin))
        return None
    if (stages := tree.child("stages")) is not None:
        message = "this is a chain of recipes, which `danlu train` alone takes. Name the recipe of one stage here; in "
        message += "the folder of a stage that was begun, it is recipe.yaml"
        problems.append(Problem("stages", message, stages.key_origin or stages.origin))
        return None
    stage = tree.child("stage")
    if stage is not None and isinstance(stage.value, str) and (verb := VERBS_OF_STAGES.get(stage.value)):
        message = f"a recipe with stage: {stage.value} does not train: `{verb}` takes it"
        problems.append(Problem("stage", message, stage.origin))
        return None
    complete(tree, overrides, problems)
    return check(tree, problems)


def complete(tree: Node, overrides: Sequence[Override], problems: list[Problem]) -> None:
    """Brings the mapping `tree` to its full form with the overrides in it, in place."""
    expand_stage(tree)
    tree.value = expand(tree, Recipe).value
    expand_defaults(tree)  # an override such as batch.micro=2 leaves the others of its section
    overriding.put(tree, overrides, problems)
    expand_stage(tree)
    tree.value = expand(tree, Recipe).value
    turn_off_evaluation(tree)
    expand_lengths(tree)
    expand_defaults(tree)
    expand_importance(tree)


def check(tree: Node, problems: list[Problem], to_come: Collection[str] = ()) -> Recipe | None:
    """The recipe of a tree in full form, or None; everything that is wrong is added to `problems`.

    to_come: paths that need not be there yet, because the run is not the first of its chain.
    """
    reported = {problem.key for problem in problems if problem.key}  # one problem for each key is enough
    recipe, type_problems = validate(tree)
    problems += [problem for problem in type_problems if not _touches(problem, reported)]
    reported |= {problem.key for problem in type_problems}
    sound = recipe or _without(tree, reported)
    if sound is not None:
        missing = rules.missing_files(sound)
        conflicts = rules.problems(sound) + [each for each in missing if _written(tree, each.key) not in to_come]
        problems += [
            replace(problem, origin=tree.nearest(problem.key)[0].origin)  # of its key, or the deepest parent written
            for problem in conflicts
            if not _touches(problem, reported)
        ]
    return recipe


def _written(tree: Node, key: str) -> object:
    """The value that a tree has at a key; None where the key is not written."""
    node, exact = tree.nearest(key)
    return node.value if exact else None


def _without(tree: Node, keys: set[str]) -> Recipe | None:
    """Validates the recipe without its wrong values, to find further problems; None if it is no recipe without them."""
    rest = deepcopy(tree)
    for key in keys:
        parent, _, name = key.rpartition(".")
        node, exact = rest.nearest(parent)
        if exact and isinstance(node.value, dict):
            node.value.pop(name, None)
    return validate(rest)[0]


def _touches(problem: Problem, keys: set[str]) -> bool:
    """Whether a problem, or a key that its rule read, is about one of `keys`, or about one above or below it."""
    return any(overlap(concerned, key) for concerned in (problem.key, *problem.reads) for key in keys)


def read_text(path: Path) -> str:
    """Reads the text of a recipe file. Raises RecipeError that names what is there instead."""
    try:
        return read_small(path, MAX_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise RecipeError(_not_found(path)) from None
    except IsADirectoryError:
        recipe_inside = path / "recipe.yaml"
        hint = f" Did you mean {str(recipe_inside)!r}?" if recipe_inside.is_file() else " Name the recipe in it."
        raise RecipeError(f"{path}: this is a folder, not a recipe.{hint}") from None
    except ValueError as error:
        if not isinstance(error, UnicodeDecodeError):
            raise RecipeError(f"{str(path)!r}: not a file name: {error}") from None
        raise RecipeError(f"{path}: not UTF-8 text (byte {error.start}). Save the recipe as UTF-8") from None
    except OSError as error:
        raise RecipeError(f"{path}: not a recipe that can be read: {error.strerror}") from None


def _not_found(path: Path) -> str:
    """The message for a recipe file that does not exist, with the nearest name in its folder."""
    folder = path.parent
    if not folder.is_dir():
        return f"{path}: no such file, and no folder {str(folder)!r}"
    names = {entry.stem.lower(): entry.name for entry in folder.iterdir() if entry.suffix in (".yaml", ".yml")}
    guess = closest_match(path.stem, list(names))
    if guess is not None:
        return f"{path}: no such file. Did you mean {str(folder / names[guess])!r}?"
    return f"{path}: no such file. `danlu recipes list` shows recipes to copy"
