"""Imports point down only, rooms of one layer do not import each other, and the words at the bottom need no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "danlu"

LAYERS: dict[str, int] = {
    "": 0,  # danlu/__init__.py: the version
    "atomic_write": 0,
    "environment": 0,
    "device_moves": 0,
    "dtensor": 0,
    "errors": 0,
    "file_lock": 0,
    "http_client": 0,
    "server_key": 0,
    "machine": 0,
    "output_folder": 0,
    "prompt_template": 0,
    "recipe": 0,
    "registry": 0,
    "safetensors_format": 0,
    "shard_box": 0,
    "small_files": 0,
    "line_log": 0,
    "spelling": 0,
    "terminal": 0,
    "tokenizer_files": 0,
    "layer_types": 0,
    "types": 0,
    "weight_gradients": 0,
    "stop_signals": 0,
    "worker_process": 0,
    "adapters": 1,
    "basics": 1,
    "data": 1,
    "models": 1,
    "numerics": 1,
    "objectives": 1,
    "optim": 1,
    "rewards": 1,
    "assembly": 2,
    "memory": 2,
    "parallel": 2,
    "plan": 3,
    "report": 3,
    "rollout": 3,
    "train": 3,
    "__main__": 4,
    "auto_values": 4,
    "chain": 4,
    "cli": 4,
    "demo": 4,
    "demo_recipes": 4,
    "export": 4,
    "images": 4,
    "input_fingerprints": 4,
    "language": 4,
    "memory_estimate": 4,
    "memory_preview": 4,
    "memory_report": 4,
    "parameter_count": 4,
    "placing": 4,
    "replay": 4,
    "run": 4,
    "stage_protocols": 4,
    "stages": 4,
    "study": 4,
    "verify": 4,
}
# Layer 0 is words and layer 4 the surface: their rooms may use each other. The parts between may not.
APART = (1, 2, 3)
# The engine knows no decoder, no loss and no stage: what it trains is a `Learner`.
UNKNOWN_TO_TRAIN = ("adapters", "models", "objectives")
# What the words at the bottom never load: half a second and half a gigabyte before the first error is told.
HEAVY = ("torch", "transformers", "datasets")
# What a room of layer 1 may take from the recipe: its section classes, never a whole recipe.
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
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
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
            if LAYERS[here] == 0 and at_import and top in HEAVY:
                found.append(f"{where}:{line}: layer 0 loads {top}")
            if top == "danlu":
                there = rest[0] if rest and rest[0] in LAYERS else ""
                found += [f"{where}:{line}: {said}" for said in judge(here, there, name)]
    return found


def judge(here: str, there: str, name: str) -> Iterator[str]:
    if LAYERS[there] > LAYERS[here]:
        yield f"{here} (layer {LAYERS[here]}) imports {there} (layer {LAYERS[there]}): imports point down only"
    elif here != there and LAYERS[there] == LAYERS[here] and LAYERS[here] in APART:
        yield f"{here} imports {there}: rooms of layer {LAYERS[here]} do not import each other"
    elif here == "train" and there in UNKNOWN_TO_TRAIN:
        yield f"train imports {there}: the engine knows a Learner, and nothing of what it is made of"
    elif LAYERS[here] == 1 and there == "recipe" and not name.startswith(SECTIONS):
        yield f"{here} imports {name}: layer 1 takes section classes from {SECTIONS} only"
    elif LAYERS[here] == 1 and name == f"{SECTIONS}.Recipe":
        yield f"{here} imports the whole Recipe: take the sections it needs"


def test_imports_point_down() -> None:
    assert problems(PACKAGE) == []


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("models/a.py", "from danlu.train.loop import fit", "models (layer 1) imports train (layer 3)"),
        ("models/a.py", "def f():\n    from danlu.run import train", "models (layer 1) imports run (layer 4)"),
        ("models/a.py", "import danlu.optim.build", "models imports optim: rooms of layer 1 do not"),
        ("train/a.py", "from danlu.rollout import generate", "train imports rollout: rooms of layer 3 do not"),
        ("train/a.py", "from danlu import rollout", "train imports rollout: rooms of layer 3 do not"),
        (
            "train/a.py",
            "from danlu.objectives import cross_entropy",
            "train imports objectives: the engine knows a Learner",
        ),
        ("data/a.py", "from danlu.recipe import load", "data imports danlu.recipe.load: layer 1 takes section"),
        ("data/a.py", "from danlu.recipe.sections import Recipe", "data imports the whole Recipe"),
        ("recipe/a.py", "import torch.nn", "layer 0 loads torch"),
        ("types.py", "if True:\n    from transformers import AutoModel", "layer 0 loads transformers"),
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
        ("train/a.py", "from danlu.optim.clip import clip_grad_norm"),
        ("data/a.py", "from danlu.recipe.sections import Data"),
        ("cli/a.py", "from danlu.run import train"),
        ("types.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor"),
        ("recipe/a.py", "from danlu.errors import RecipeError"),
        ("models/a.py", "from danlu import __version__\nimport torch"),
    ],
)
def test_what_keeps_the_rule_is_not(tmp_path: Path, path: str, line: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(line)
    assert problems(tmp_path) == []
