"""The table of pairs of features holds: tests that it names are there, and recipes are taken and refused as it says."""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from builders.feature_pairs import FEATURES, GROUPS, KINDS, Pair

from danlu.core.errors import RecipeError
from danlu.recipe import load

TESTS = Path(__file__).parent
BASE = {"stage": "sft", "model": {"path": "base"}, "data": {"train": ["rows.json"]}, "output": "runs/x"}
PAIRS = [pair for pairs in GROUPS.values() for pair in pairs]
REFUSED = [pair for pair in PAIRS if pair.message and not pair.test]
STAGES = {"grpo", "ppo", "online-dpo"}
OF_ROLLOUTS = ("asynchronous", "passes", "environment", "agent", "lengths rewarded")


@functools.cache
def module(file: str) -> tuple[set[str], set[str]]:
    """Names of the tests of a file, and all texts in it."""
    nodes = list(ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8"))))
    tests = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    return tests, {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def problem(test: str) -> str:
    """Why there is no such test; empty if there is one."""
    file, _, name = test.partition("::")
    name, _, case = name.removesuffix("]").partition("[")
    if not (TESTS / file).is_file():
        return f"there is no file {file}"
    tests, texts = module(file)
    if name not in tests:
        return f"{file} has no {name}"
    return "" if not case or is_of(case, texts) else f"{file} has no case {case}"


def is_of(case: str, texts: set[str]) -> bool:
    """Whether the name of a case is one of the texts, or several with dashes between them."""
    if case in texts:
        return True
    dashes = [place for place, letter in enumerate(case) if letter == "-"]
    return any(case[:dash] in texts and is_of(case[dash + 1 :], texts) for dash in dashes)


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    values = {**one, **other}
    for name in one.keys() & other.keys():
        if isinstance(one[name], Mapping) and isinstance(other[name], Mapping):
            values[name] = merged(one[name], other[name])
    return values


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: names of features -> problems of the recipe that has them."""
    monkeypatch.chdir(tmp_path)
    Path("rows.json").write_text("[]")
    Path("my.py").write_text("def short(completion, **row): return 0.0")

    def problems(*names: str) -> list[str]:
        # What is read in a rollout alone has a stage with rollouts.
        of_rollouts = any(name in OF_ROLLOUTS for name in names) and not STAGES & {*names}
        recipe = functools.reduce(merged, [FEATURES[name] for name in (*["grpo"] * of_rollouts, *names)], BASE)
        Path("recipe.yaml").write_text(json.dumps(recipe))
        try:
            load("recipe.yaml")
        except RecipeError as error:
            return error.problems
        return []

    return problems


@pytest.mark.parametrize("group", GROUPS)
def test_each_pair_is_there_once_and_its_test_exists(group: str) -> None:
    pairs = GROUPS[group]
    named = [frozenset((pair.one, pair.other)) for pair in pairs]
    assert [sorted(pair) for pair in {*named} if named.count(pair) > 1] == []
    assert {name for pair in named for name in pair} <= FEATURES.keys()
    assert [problem(pair.test) for pair in pairs if pair.test and problem(pair.test)] == []
    assert all(pair.test or pair.message for pair in pairs)


def test_each_adapter_meets_each_kind_of_layer() -> None:
    adapters = ("lora", "dora", "vera", "mora", "ia3", "bottleneck", "prefix", "prompt")
    met = {(pair.one, pair.other) for pair in GROUPS["adapters and layer kinds"]}
    assert met == {(adapter, kind) for adapter in adapters for kind in KINDS.split(", ")}


@pytest.mark.parametrize("pair", REFUSED, ids=lambda pair: f"{pair.one}, {pair.other}")
def test_what_is_refused_is_refused_for_the_pair(problems: Any, pair: Pair) -> None:
    said = problems(pair.one, pair.other)
    assert any(pair.message in each for each in said), said
    for alone, other in ((pair.one, pair.other), (pair.other, pair.one)):
        if merged(BASE, FEATURES[other]) == BASE:
            continue  # the other is what a recipe is by default
        # The control: each of the two by itself is no such problem.
        assert not any(pair.message in each for each in problems(alone))


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_run_is_taken(problems: Any, group: str) -> None:
    asked = {(pair.one, pair.other) for pair in GROUPS[group] if not pair.message}
    asked = {pair for pair in asked if FEATURES[pair[0]] and FEATURES[pair[1]]}
    assert {pair: said for pair in asked if (said := problems(*pair))} == {}


def test_a_test_that_is_not_there_is_seen() -> None:
    here = "test_feature_pairs.py"
    assert problem(f"{here}::test_a_test_that_is_not_there_is_seen") == ""
    assert problem("no/such.py::test_x") and problem(f"{here}::test_" + "x") and problem(f"{here}::module")
    assert problem(f"{here}::test_what_is_run_is_taken[no such " + "case]")
