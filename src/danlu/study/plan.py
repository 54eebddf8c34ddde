"""The runs of a study: every combination of the varied values, with its recipe and its name in the folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from danlu import recipe as recipes
from danlu.core.atomic_write import write_atomically
from danlu.core.errors import CheckpointError, RecipeError, ResourceError
from danlu.core.file_lock import is_lock_of
from danlu.core.output_folder import refuse_foreign_files
from danlu.core.run_files import LOCK_FILE
from danlu.recipe import Recipe, changes, resolved_yaml
from danlu.recipe.parameter_grid import SEED, Combination, VariedKey, parameter_grid
from danlu.recipe.sections import Section, value_at
from danlu.recipe.yaml_tree import overlap
from danlu.report.study_results import STUDY, is_finished, known_runs, study_json


@dataclass(frozen=True)
class PlannedRun:
    """A run with its recipe; the recipe's `output` is the run's own folder."""

    combination: Combination
    recipe: Recipe

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.combination.name

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.recipe.output)

    @property
    def recipe_file(self) -> Path:
        """The file with the run's resolved recipe, next to its folder."""
        return self.folder.with_name(f"{self.folder.name}.yaml")

    @property
    def log(self) -> Path:
        """The file with the run's output, next to its folder."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True)
class Plan:
    """The contents of a study folder: the requested runs, and the other runs that it lists already."""

    folder: Path
    keys: tuple[str, ...]
    runs: tuple[PlannedRun, ...]
    other_runs: tuple[Combination, ...]


def make_plan(path: Path, varied: Sequence[VariedKey], overrides: Sequence[str]) -> Plan:
    """The runs that the arguments ask for, each with its checked recipe, and the folder that they go to.

    A combination that the folder knows already keeps the name that it has there; others join it. Nothing is written.
    Raises RecipeError with all that is wrong with any combination, ResourceError for a folder of something else, and
    CheckpointError for one that holds a study of another recipe.
    """
    combinations = parameter_grid(varied)
    grid_recipes = _load(path, varied, combinations, overrides)
    folder = Path(grid_recipes[0].output).expanduser()
    _refuse_foreign_folder(folder)
    keys, known = _known(folder)
    keys = tuple(dict.fromkeys((*keys, *(entry.key for entry in varied))))
    if known:
        _refuse_other_recipe(folder, known[0], grid_recipes[0], keys)
    planned: list[PlannedRun] = []
    for combination, recipe in zip(combinations, grid_recipes, strict=True):
        if (duplicate := _same_run(recipe, planned, keys)) is not None:
            first, second = _overrides_text(duplicate.combination), _overrides_text(combination)
            raise RecipeError(f"{first} and {second} are the same run: leave one out")
        listed = _same_run(recipe, known, keys)
        name = listed.name if listed else _unused(combination.name, {run.name for run in (*known, *planned)})
        complete = _with_all_keys(Combination(name, combination.values), recipe, keys)
        planned.append(PlannedRun(complete, recipe.model_copy(update={"output": str(folder / name)})))
    names = {run.name for run in planned}
    other_runs = tuple(_with_all_keys(run.combination, run.recipe, keys) for run in known if run.name not in names)
    return Plan(folder, keys, tuple(planned), other_runs)


def notes(plan: Plan) -> list[str]:
    """Warnings about a study with results that may mislead; for the console, once."""
    held_out = plan.runs[0].recipe.data.eval
    if SEED in plan.keys and isinstance(held_out, int | float):
        return [
            f"data.eval: {held_out} is drawn by the seed, so runs of another seed are judged by other rows, and the "
            "spread of their losses is that of the rows too; name a file to judge all by the same"
        ]
    return []


def _with_all_keys(run: Combination, recipe: Recipe, keys: Sequence[str]) -> Combination:
    """The run with a value for every key that varies in its folder: as it was written, or as the recipe has it."""
    return Combination(run.name, {key: run.values.get(key) or value_text(recipe, key) for key in keys})


def _load(
    path: Path, varied: Sequence[VariedKey], combinations: Sequence[Combination], overrides: Sequence[str]
) -> list[Recipe]:
    """The recipe of each combination.

    Raises RecipeError with every problem once; one of a varied value names the command-line argument it came from.
    """
    set_twice = [
        f"override {text!r}: {entry.argument} gives this key its values. Leave one of them out"
        for text in overrides
        for entry in varied
        if text.partition("=")[0].strip() == entry.key
    ]
    if set_twice:
        raise RecipeError(set_twice)
    arguments = {f"override {f'{entry.key}={value}'!r}": entry.argument for entry in varied for value in entry.values}
    loaded: list[Recipe] = []
    problems: dict[str, list[Combination]] = {}  # the combinations that each message is of
    for combination in combinations:
        try:
            loaded.append(recipes.load(path, [*overrides, *combination.overrides]).recipe)
        except RecipeError as error:
            for line in error.problems:
                place = next((place for place in arguments if line.startswith(place)), None)
                message = line if place is None else arguments[place] + line.removeprefix(place)
                problems.setdefault(message, []).append(combination)
    if problems:
        raise RecipeError([_with_first(line, of, combinations) for line, of in problems.items()])
    return loaded


def _with_first(line: str, of: Sequence[Combination], combinations: Sequence[Combination]) -> str:
    """A problem of the file that only some combinations have names the first of them."""
    if line.startswith("--") or len(of) == len(combinations):
        return line
    return f"{line} (with {_overrides_text(of[0])})"


def _overrides_text(combination: Combination) -> str:
    """Formats overrides: `adapter.rank=8 seed=1`."""
    return " ".join(combination.overrides)


def value_text(recipe: Recipe, key: str) -> str:
    """Formats a value of a recipe for a table: a section by its short form alone, its kind or its path."""
    value = value_at(recipe, key)
    if isinstance(value, Section) and value.short is not None:
        value = getattr(value, value.short)
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def _refuse_foreign_folder(folder: Path) -> None:
    """Raises ResourceError for a folder that holds other things than a study."""
    if not folder.is_dir() or (folder / STUDY).is_file():
        return
    refuse_foreign_files(
        folder,
        lambda name: is_lock_of(name, LOCK_FILE),
        holds="the output folder holds other things than a study",
        advice="Choose an empty or new `output`.",
    )


def _known(folder: Path) -> tuple[tuple[str, ...], list[PlannedRun]]:
    """The keys and runs that study.json of a folder lists, with the recipes that were written there.

    Raises CheckpointError for a recipe that cannot be read any more.
    """
    keys, runs = known_runs(folder)
    known = []
    for run in runs:
        file = folder / f"{run.name}.yaml"
        try:
            known.append(PlannedRun(run, recipes.load(file).recipe))
        except RecipeError as error:
            lines = "\n  ".join(error.problems)
            raise CheckpointError(
                f"{folder}: the recipe of a run of this study does not hold any more:\n  {lines}\n"
                "Put that right, or choose another `output`."
            ) from error
    return keys, known


def _refuse_other_recipe(folder: Path, known: PlannedRun, recipe: Recipe, keys: Sequence[str]) -> None:
    """Raises CheckpointError if the recipes differ in more than the keys that vary."""
    differences = [each for each in changes(known.recipe, recipe) if each.matters and not _is_varied(each.key, keys)]
    if differences:
        lines = "\n  ".join(map(str, differences))
        raise CheckpointError(
            f"{folder} holds a study of another recipe; what differs (there -> here):\n  {lines}\n"
            "To start again, choose another `output`; to extend the study, undo the change or vary that key as well."
        )


def _same_run(recipe: Recipe, runs: Sequence[PlannedRun], keys: Sequence[str]) -> PlannedRun | None:
    """The run with a recipe that is equal in the varied keys and in all that matters to the result; None without
    one."""

    def differs(run: PlannedRun) -> bool:
        differences = [change for change in changes(run.recipe, recipe) if change.key != "output"]
        return any(change.matters or _is_varied(change.key, keys) for change in differences)

    return next((run for run in runs if not differs(run)), None)


def _is_varied(changed: str, keys: Sequence[str]) -> bool:
    """Whether a key lies at, below or above one that varies; a `kind` brings a whole section with it."""
    return any(overlap(changed, key.removesuffix(".kind")) for key in keys)


def _unused(name: str, taken: set[str]) -> str:
    """The name, with a number appended where another run has it already."""
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    return candidate


def write_plan(plan: Plan) -> None:
    """Writes study.json and the recipes of runs that are not finished. Raises ResourceError if it cannot."""
    try:
        for run in plan.runs:
            if not is_finished(run.folder):
                write_atomically(run.recipe_file, resolved_yaml(run.recipe).encode())
        runs = (*plan.other_runs, *(run.combination for run in plan.runs))
        write_atomically(plan.folder / STUDY, study_json(plan.keys, runs).encode())
    except OSError as error:
        raise ResourceError(
            f"{plan.folder}: the study folder cannot be written: {error.strerror}. "
            "Free some space, or choose another `output`."
        ) from error
