"""The engine trains every stage alike: nothing in `training/` reads which one it is, or names one or its objectives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from danlu import training
from danlu.recipe.sections.preference import PreferenceObjective
from danlu.recipe.sections.reward import RewardObjective
from danlu.recipe.stage_names import DEFAULT_OBJECTIVES, OBJECTIVE_NAMES
from danlu.stages.table import STAGES

FOLDER = Path(training.__file__).parent
KINDS = [
    get_args(section.model_fields["kind"].annotation)[0]
    for sections in (PreferenceObjective, RewardObjective)
    for section in get_args(sections)
]
# Not the kinds that are words of any training loop: robust deviations of a loss, forward and reverse of distillation.
NAMES = {*STAGES, *DEFAULT_OBJECTIVES, *OBJECTIVE_NAMES, *KINDS, "stage", "stages", "stage_protocols"} - {"robust"}


def names_of_stages(source: str) -> list[str]:
    """`line: text` of each identifier, import and string (docstrings aside) with a stage's or an objective's name."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, documented)]
    # A string that stands alone is a docstring, or one of an attribute.
    docstrings = {id(one.value) for body in bodies for one in body if isinstance(one, ast.Expr)}
    return [
        f"{line}: {text}"
        for node in ast.walk(tree)
        if id(node) not in docstrings
        for line, text in texts(node)
        if any(re.search(rf"(?<![a-z]){re.escape(name)}(?![a-z])", text.lower()) for name in NAMES)
    ]


def texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The identifiers and the string of one node, with its line; capitals of a class's name begin words."""
    match node:
        case ast.Constant(value=str(text)):
            yield node.lineno, text
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield node.lineno, name
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield node.lineno, re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
        case ast.ImportFrom(module=str(module)):
            yield from ((node.lineno, f"{module} {alias.name}") for alias in node.names)
        case ast.Import():
            yield from ((node.lineno, alias.name) for alias in node.names)


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("*.py")), ids=lambda file: str(file.relative_to(FOLDER)))
def test_nothing_in_train_reads_the_stage(file: Path) -> None:
    assert names_of_stages(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "if recipe.stage == wanted: pass",
        "from danlu.stages.table import STAGES",
        "from danlu.stages.protocols import Reader",
        "import danlu.stages.table",
        'x = "preference"',
        'x = f"the {y} of sft"',
        "def dpo_step(): pass",
        "class RewardLoop: pass",
        "def f(is_distill): pass",
        "f(kto=1)",
        'x = "bradley-terry"',
    ],
)
def test_what_would_is_found(source: str) -> None:
    assert len(names_of_stages(source)) == 1


@pytest.mark.parametrize(
    "source",
    ['"""The loop of every stage."""', "storage = backstage", 'PHASE.begin("forward", step)'],
)
def test_what_does_not_is_not(source: str) -> None:
    assert names_of_stages(source) == []
