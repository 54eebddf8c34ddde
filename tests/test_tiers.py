"""Which tests run where: marks, the Makefile's targets, and what has to pass before a change is merged."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STARTERS = {"run_group", "prove"}
"""Functions that start a group of processes."""


def unmarked(source: str) -> list[str]:
    """Tests of a file that start a group of processes, themselves or by what they use, and are not marked so."""
    if not any(name in source for name in STARTERS):
        return []
    body = ast.parse(source).body
    functions = {one.name: one for one in body if isinstance(one, ast.FunctionDef)}
    uses = {
        name: {node.id for node in ast.walk(one) if isinstance(node, ast.Name)} | {arg.arg for arg in one.args.args}
        for name, one in functions.items()
    }
    starting = {name for name, used in uses.items() if used & STARTERS}
    while more := {name for name, used in uses.items() if used & starting} - starting:
        starting |= more
    if any(isinstance(one, ast.Assign) and "mark.distributed" in ast.unparse(one) for one in body):
        return []
    return [
        name
        for name in functions
        if name in starting
        and name.startswith("test_")
        and not any("mark.distributed" in ast.unparse(decorator) for decorator in functions[name].decorator_list)
    ]


def test_what_starts_a_group_of_processes_is_marked() -> None:
    found = {file: unmarked(file.read_text(encoding="utf-8")) for file in (ROOT / "tests").rglob("test_*.py")}
    assert {str(file.relative_to(ROOT)): names for file, names in found.items() if names} == {}


def test_the_check_follows_fixtures_and_helpers() -> None:
    source = """
        def many(): return run_group(see, 2)
        @pytest.fixture
        def seen(): return many()
        def test_one(seen): assert seen
        @pytest.mark.distributed
        def test_two(seen): assert seen
        def test_three(): assert True
    """
    source = re.sub(r"^        ", "", source, flags=re.MULTILINE)
    assert unmarked(source) == ["test_one"]
    assert unmarked("pytestmark = pytest.mark.distributed\n" + source) == []


def test_what_uses_a_world_of_data_is_end_to_end(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    using = [item for item in items if "tiny_world" in item.fixturenames]
    assert [item.nodeid for item in using if item.get_closest_marker("end_to_end") is None] == []


def test_every_fast_test_runs_in_one_of_the_three_tiers(pytestconfig: pytest.Config) -> None:
    targets = dict(re.findall(r"^(test[a-z-]*):.*\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    selected = {name: re.search(r'-m "(.*)"', line) for name, line in targets.items()}
    marks = {name: found[1] for name, found in selected.items() if found is not None}
    assert marks == {
        "test": "not slow and not more_cases and not gpu and not distributed and not end_to_end",
        "test-end-to-end": "(end_to_end or more_cases) and not distributed and not slow and not gpu",
        "test-distributed": "distributed and not slow and not gpu",
        "test-all": "not gpu",
    }
    parts = re.findall(r'^run_part "(.+)" (\S+)$', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    tiers = [(f"{name} tier", f"test-{name}") for name in ("end-to-end", "distributed")]
    assert parts == [("suite", "test"), *tiers]
    known = {line.partition(":")[0] for line in pytestconfig.getini("markers")}
    assert {"slow", "more_cases", "gpu", "distributed", "end_to_end"} <= known
