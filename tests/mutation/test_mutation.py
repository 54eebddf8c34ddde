"""Every mutation can still be applied, and what is said of one is what its tests say."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from mutation.run import EVERY_MUTATION, ROOT, main
from mutation.table import Mutation

ROOMS = """
adapters assembly cli core curation data demo evaluation inference memory models numerics objectives optim parallel
planning production recipe remote_engines report rewards rl run serving stages study training verification
"""


@pytest.mark.parametrize("room", sorted({mutation.file.partition("/")[0] for mutation in EVERY_MUTATION}))
def test_mutations_of_a_room_can_be_applied(room: str) -> None:
    of_room = [mutation for mutation in EVERY_MUTATION if mutation.file.partition("/")[0] == room]
    assert {mutation.name: problem for mutation in of_room if (problem := mutation.problem(ROOT))} == {}


def test_there_are_enough_of_them_in_every_room() -> None:
    names = {mutation.name for mutation in EVERY_MUTATION}
    assert len(names) >= 60 and len(names) == len(EVERY_MUTATION)
    rooms = {mutation.file.partition("/")[0] for mutation in EVERY_MUTATION if "/" in mutation.file}
    assert rooms == set(ROOMS.split())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of one function, whose tests see half of what it does."""
    (tmp_path / "src" / "danlu").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["src"]\n')
    (tmp_path / "src" / "danlu" / "__init__.py").write_text("")
    (tmp_path / "src" / "danlu" / "sign.py").write_text(
        "def sign(x):\n    if x < 0:\n        return -1\n    return 0 if x == 0 else 1\n"
    )
    (tmp_path / "tests" / "test_sign.py").write_text(
        "from danlu.sign import sign\n\n\ndef test_sign():\n    assert (sign(3), sign(-3)) == (1, -1)\n"
    )
    (tmp_path / "tests" / "test_red.py").write_text("def test_red():\n    assert False\n")
    return tmp_path


KILLED = Mutation("sign.py", "x < 0", "x > 0", "test_sign.py")
SURVIVES = Mutation("sign.py", "x == 0", "x == 1.5", "test_sign.py")


@pytest.fixture
def own_server() -> Iterator[ProcessPoolExecutor]:
    """A process whose fork server is its own: that of the tests has danlu loaded, and not the danlu of `tree`."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def _run(tree: Path, mutations: Sequence[Mutation]) -> tuple[int, str]:
    """The exit code of a run on `tree`, and what it said."""
    with redirect_stdout(StringIO()) as said:
        return main([], tree, mutations), said.getvalue()


@pytest.mark.slow
def test_what_tests_notice_is_killed_and_the_rest_survives(tree: Path, own_server: ProcessPoolExecutor) -> None:
    def run(*mutations: Mutation) -> tuple[int, str]:
        return own_server.submit(_run, tree, mutations).result()

    before = (tree / "src" / "danlu" / "sign.py").read_text()
    code, said = run(KILLED)
    assert code == 0 and "1 of 1 mutations killed (100.0%)" in said
    code, said = run(SURVIVES, KILLED)
    assert code == 1
    assert "1 of 2 mutations killed (50.0%) in " in said
    assert said.endswith("minutes\n  survived: sign.py: x == 0 -> x == 1.5\n")
    assert (tree / "src" / "danlu" / "sign.py").read_text() == before
    red = Mutation("sign.py", "x < 0", "x > 0", "test_red.py")
    broken = Mutation("sign.py", "return -1", "import nothing_of_the_kind", "test_sign.py", "no_such_test")
    code, said = run(red, broken)
    assert code == 2
    assert "tests/test_red.py::test_red fails without it too: sign.py: x < 0" in said
    assert "its tests ended with exit code 5: sign.py: return -1" in said  # no test was selected


@pytest.mark.parametrize(
    ("mutation", "problem"),
    [
        (Mutation("sign.py", "x <= 0", "x", "test_sign.py"), "the old text is found 0 times"),
        (Mutation("sign.py", "return", "raise", "test_sign.py"), "the old text is found 2 times"),
        (Mutation("sign.py", "x < 0", "x < 0", "test_sign.py"), "it changes no line, or several"),
        (Mutation("sign.py", "x < 0", "x <", "test_sign.py"), "what it makes does not compile"),
        (Mutation("sign.py", "x < 0", "x", "test_none.py"), "no such tests: test_none.py"),
        (Mutation("no.py", "x", "y", "test_sign.py"), "there is no such file"),
    ],
)
def test_a_stale_mutation_is_an_error(
    tree: Path, mutation: Mutation, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([], tree, [KILLED, mutation]) == 2
    said = capsys.readouterr().out
    assert f"cannot be applied: {mutation.name}: {problem}" in said and "killed" not in said
