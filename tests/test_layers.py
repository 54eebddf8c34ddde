"""Imports point down only, rooms of one layer do not import each other, and the words at the bottom need no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "danlu"

ORDER: tuple[tuple[str, ...], ...] = (
    ("", "core", "environment", "registry"),  # "" is danlu/__init__.py: the version
    ("recipe",),
    ("adapters", "curation", "data", "models", "numerics", "objectives", "optim", "rewards"),
    ("memory", "parallel"),
    ("planning", "report", "training"),
    ("assembly",),
    ("inference",),
    ("remote_engines",),
    ("production",),
    ("serving",),
    ("rl",),
    ("stages",),
    ("run",),
    ("evaluation", "study", "verification"),
    ("demo",),
    ("cli",),
    ("api", "__main__"),
)
"""The rooms from the lowest layer up. Rooms of one layer do not import each other, but for those of the lowest."""
LAYERS = {room: number for number, rooms in enumerate(ORDER) for room in rooms}
PARTS = LAYERS["models"]
# The engine knows no decoder, no loss and no stage: what it trains is a `Learner`.
UNKNOWN_TO_TRAINING = ("adapters", "models", "objectives")
# Recipes and errors load none of these: half a second and half a gigabyte before the first message.
HEAVY = ("torch", "transformers", "datasets")
NEEDS_TORCH = ("core/device_moves.py", "core/dtensor.py")
"""Files of core that load torch."""
# What the rooms of `models` and its like take from the recipe: section classes, never a whole recipe.
SECTIONS = "danlu.recipe.sections"


def room(parts: tuple[str, ...]) -> str:
    return parts[0] if parts else ""


def imports(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """(line, module or module.name, whether it runs when the module is imported) of every import."""

    def walk(node: ast.AST, at_import: bool) -> Iterator[tuple[int, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name, at_import) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"line {child.lineno}: relative imports are not used"
                yield from ((child.lineno, f"{child.module}.{alias.name}", at_import) for alias in child.names)
            elif not isinstance(child, ast.expr):  # which have no imports
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                checking = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
                yield from walk(child, at_import and not inside and not checking)

    yield from walk(tree, at_import=True)


def problems(package: Path) -> list[str]:
    """Every import in a package of this shape that goes up, sideways, or loads what it must not."""
    found = []
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).with_suffix("").parts
        here = room(tuple(part for part in inside if part != "__init__"))
        where = f"{path.relative_to(package)}"
        if here not in LAYERS:
            found.append(f"{where}: {here} is in no layer; add it to LAYERS")
            continue
        for line, name, at_import in imports(ast.parse(path.read_text(encoding="utf-8"))):
            top, *rest = name.split(".")
            if here in ("core", "recipe", "registry") and at_import and top in HEAVY and where not in NEEDS_TORCH:
                found.append(f"{where}:{line}: {here} loads {top}")
            if where == "__init__.py" and name.startswith("danlu.api.") and not at_import:
                continue  # the types of what `__getattr__` imports when it is used
            if top == "danlu":
                there = rest[0] if rest and rest[0] in LAYERS else ""
                found += [f"{where}:{line}: {said}" for said in judge(here, there, name)]
    return found


def judge(here: str, there: str, name: str) -> Iterator[str]:
    if LAYERS[there] > LAYERS[here]:
        yield f"{here} imports {there}, which is above it: imports point down only"
    elif here != there and LAYERS[there] == LAYERS[here] != 0:
        yield f"{here} imports {there}: rooms of one layer do not import each other"
    elif here == "training" and there in UNKNOWN_TO_TRAINING:
        yield f"training imports {there}: the engine knows a Learner, and nothing of what it is made of"
    elif LAYERS[here] == PARTS and there == "recipe" and not name.startswith(SECTIONS):
        yield f"{here} imports {name}: it takes section classes from {SECTIONS} only"
    elif LAYERS[here] == PARTS and name == f"{SECTIONS}.Recipe":
        yield f"{here} imports the whole Recipe: take the sections it needs"


def test_imports_point_down() -> None:
    assert problems(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("models/a.py", "from danlu.training.loop import fit", "models imports training, which is above it"),
        ("models/a.py", "def f():\n    from danlu.run.train import train", "models imports run, which is above it"),
        ("models/a.py", "import danlu.optim.build", "models imports optim: rooms of one layer do not"),
        ("training/a.py", "from danlu.planning import flops", "training imports planning: rooms of one layer do not"),
        ("training/a.py", "from danlu import inference", "training imports inference, which is above it"),
        (
            "training/a.py",
            "from danlu.objectives import cross_entropy",
            "training imports objectives: the engine knows a Learner",
        ),
        ("data/a.py", "from danlu.recipe import load", "data imports danlu.recipe.load: it takes section"),
        ("data/a.py", "from danlu.recipe.sections import Recipe", "data imports the whole Recipe"),
        ("recipe/a.py", "import torch.nn", "recipe loads torch"),
        ("core/types.py", "if True:\n    from transformers import AutoModel", "core loads transformers"),
        ("elsewhere/a.py", "import os", "elsewhere is in no layer"),
    ],
)
def test_what_breaks_the_rule_is_found(tmp_path: Path, path: str, line: str, message: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(line)
    (said,) = problems(tmp_path)
    assert message in said


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("assembly/a.py", "from danlu.models.ops import linear"),
        ("training/a.py", "from danlu.optim.gradients import clip_grad_norm"),
        ("data/a.py", "from danlu.recipe.sections import Data"),
        ("cli/a.py", "from danlu.run.train import train"),
        ("core/types.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("recipe/a.py", "from danlu.core.errors import RecipeError"),
        ("models/a.py", "from danlu import __version__\nimport torch"),
    ],
)
def test_what_keeps_the_rule_is_not(tmp_path: Path, path: str, line: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(line)
    assert problems(tmp_path) == []
