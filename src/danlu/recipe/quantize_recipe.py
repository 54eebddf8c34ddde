"""Reading a recipe of `danlu quantize`, which is of another kind than those that train."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from danlu.recipe import other_stages
from danlu.recipe.loading import LoadedSection
from danlu.recipe.other_stages import OtherStage, load_other
from danlu.recipe.overrides import Override
from danlu.recipe.rules.paths import file_of, invalid_path, missing_paths
from danlu.recipe.sections.quantizing import FIXED_FORMATS, QuantizeRecipe, SmoothQuant
from danlu.recipe.yaml_tree import Node, Problem


@dataclass(frozen=True)
class LoadedQuantize(LoadedSection):
    """A recipe that quantizes, with the origins of its values."""

    recipe: QuantizeRecipe


def load_quantize_recipe(path: Path, overrides: Sequence[str] = ()) -> QuantizeRecipe:
    """Reads and checks a recipe with `stage: quantize`.

    Raises RecipeError with one line for each problem, as `loading.load`.
    """
    kind = OtherStage("quantize", "danlu quantize", QuantizeRecipe)
    return load_other(path, overrides, kind, lambda recipe: _problems(recipe, ()))[0]


def complete(tree: Node, overrides: Sequence[Override], problems: list[Problem]) -> None:
    """Brings a mapping to its full form with the overrides in it, in place."""
    other_stages.complete(tree, overrides, problems, QuantizeRecipe)


def check(tree: Node, problems: list[Problem], to_come: Collection[str] = ()) -> QuantizeRecipe | None:
    """The recipe of a tree in full form, or None; everything that is wrong is added to `problems`.

    to_come: paths that need not be there yet, because earlier stages of a chain will write them.
    """
    return other_stages.check(tree, problems, QuantizeRecipe, lambda recipe: _problems(recipe, to_come))


def _problems(recipe: QuantizeRecipe, to_come: Collection[str]) -> Iterator[Problem]:
    yield from _conflicts(recipe)
    yield from _path_problems(recipe, to_come)


def _path_problems(recipe: QuantizeRecipe, to_come: Collection[str]) -> Iterator[Problem]:
    """Yields paths that no file system takes, and those that are not there."""
    paths = {"model": recipe.model}
    if recipe.calibration is not None:
        sources = enumerate(recipe.calibration.data)
        paths |= {f"calibration.data.{index}.path": file_of(source) for index, source in sources}
    for key, path in {**paths, "output": recipe.output}.items():
        if (reason := invalid_path(path)) is not None:
            yield Problem(key, reason)
    yield from missing_paths({key: path for key, path in paths.items() if path not in to_come})


def _conflicts(recipe: QuantizeRecipe) -> Iterator[Problem]:
    """Yields what each value allows, but not all of them together."""
    steps = recipe.quantization
    if not steps:
        yield Problem("quantization", "names no method: one of nearest, gptq, awq", None)
        return
    if isinstance(steps[-1], SmoothQuant):
        yield Problem(
            "quantization", "smoothquant only moves outliers: name nearest, gptq or awq behind it, which rounds", None
        )
    for number, step in enumerate(steps[:-1]):
        if not isinstance(step, SmoothQuant):
            yield Problem(f"quantization.{number}", f"{step.kind} rounds, and nothing can follow it", None)
    if sum(isinstance(step, SmoothQuant) for step in steps) > 1:
        yield Problem("quantization", "names smoothquant twice: its second factors would undo the first", None)
    if recipe.needs_calibration and recipe.calibration is None:
        kinds = ", ".join(step.kind for step in steps)
        yield Problem("quantization", f"{kinds} looks at rows: add `calibration: rows.json#256`, or use nearest", None)
    if recipe.calibration is not None and not recipe.calibration.data:
        yield Problem("calibration.data", "names no rows", None)
    if steps and not isinstance(steps[-1], SmoothQuant):
        yield from _export_conflicts(recipe, len(steps) - 1)


def _export_conflicts(recipe: QuantizeRecipe, last: int) -> Iterator[Problem]:
    """Yields the keys of the last method that a folder of this form cannot have."""
    rounding, export = recipe.rounding, recipe.export
    if recipe.activations == "int8":
        if export != "compressed-tensors":
            yield Problem("activations", "int8 is a setting of export: compressed-tensors, which no other has", None)
        for name, needed in (("bits", 8), ("group", 0), ("symmetric", True)):
            if getattr(rounding, name) != needed:
                need = f"{name}: {str(needed).lower()}"
                message = f"products of 8-bit integers take weights of 8 bits with one scale a row: set {need}"
                yield Problem(f"quantization.{last}.{name}", message, None)
    if export in FIXED_FORMATS:
        for key in sorted({"bits", "group", "symmetric"} & rounding.model_fields_set):
            yield Problem(f"quantization.{last}.{key}", f"is fixed by export: {export}; leave it out", None)
    elif export == "awq" and (rounding.bits != 4 or rounding.symmetric):
        wanted = "bits: 4" if rounding.bits != 4 else "symmetric: false"
        yield Problem("export", f"awq is 4 bits with zeros: set {wanted} in quantization.{last}", None)
    elif export == "gptq" and rounding.bits not in (2, 3, 4, 8):
        yield Problem("export", f"gptq has 2, 3, 4 or 8 bits, not {rounding.bits}", None)
