"""YAML with positions: scalars as YAML 1.2 reads them, the environment, and what cannot be read."""

from __future__ import annotations

from itertools import pairwise

import pytest

from danlu.recipe import yaml_reader
from danlu.recipe.yaml_reader import parse
from danlu.recipe.yaml_tree import Problem


def read(text: str) -> tuple[object, list[str]]:
    problems: list[Problem] = []
    node = parse(text, "r.yaml", problems)
    said = [
        f"{problem.origin.place if problem.origin else ''} {problem.key}: {problem.message}" for problem in problems
    ]
    return (None if node is None else node.plain), said


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("2e-4", 2e-4),  # PyYAML alone reads a text here
        ("1E3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-1.5e+3", -1500.0),
        ("10_000", 10_000),
        ("007", 7),  # PyYAML alone reads octal
        ("0x10", 16),
        ("0o17", 15),
        ("1:30", "1:30"),  # PyYAML alone reads 90
        ("no", "no"),  # PyYAML alone reads false
        ("on", "on"),
        ("True", True),
        ("~", None),
        ("", None),
        ("2024-01-02", "2024-01-02"),
        ("'2e-4'", "2e-4"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("<<", "<<"),
    ],
)
def test_scalars(written: str, value: object) -> None:
    found, said = read(f"key: {written}")
    assert not said
    assert found == {"key": value}
    assert type(found["key"]) is type(value)  # type: ignore[index]


def test_places_are_lines_and_columns_from_one() -> None:
    problems: list[Problem] = []
    tree = parse("a: 1\nb:\n  - c: xyz\n", "r.yaml", problems)
    assert tree is not None
    places = {key: node.origin.place for key, node in tree.walk()}
    assert places == {"a": "r.yaml:1:4", "b": "r.yaml:3:3", "b.0": "r.yaml:3:5", "b.0.c": "r.yaml:3:8"}
    node, exact = tree.nearest("b.0.d")
    assert (node.origin.place, exact) == ("r.yaml:3:5", False)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/data")
    monkeypatch.setenv("STEPS", "100")
    monkeypatch.delenv("UNSET", raising=False)
    text = "\n".join(
        [
            "a: ${FOLDER}/x-${STEPS}",
            "b: ${STEPS}",
            "c: '${STEPS}'",
            "d: ${UNSET:-2e-4}",
            "e: ${UNSET:-}",
            "f: $${STEPS} and $5",
        ]
    )
    found, said = read(text)
    assert not said
    assert found == {"a": "/data/x-100", "b": 100, "c": "100", "d": 2e-4, "e": None, "f": "${STEPS} and $5"}


def test_environment_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSET", raising=False)
    assert read("a: 1\nb: {c: '${UNSET}/x'}\nd: ${1}")[1] == [
        "r.yaml:2:8 b.c: environment variable UNSET is not set. Set it, or write ${UNSET:-default}",
        "r.yaml:3:4 d: a '${' that names no variable. Write ${NAME}, or $${ for the text itself",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "r.yaml:3:1 a: given twice, first on line 1. Keep one"),
        ("a: !!python/object:os.system x", "YAML tags such as '!!python/object:os.system' are not used in a recipe"),
        ("a: !local x", "YAML tags such as '!local' are not used in a recipe"),
        ("a: !!int word", "YAML tags such as '!!int' are not used in a recipe"),
        ("a: &x [*x]", "r.yaml:1:4 a.0: an alias of a value that it is part of"),
        ("? [a, b]\n: 1", "r.yaml:1:3 : a key must be a word"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    (said,) = read(text)[1]
    assert message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c", "r.yaml:1:5 : not valid YAML: a second ': ' on this line"),
        ("a:\n\tb: 1", "r.yaml:2:1 : not valid YAML: a tab: indent with spaces"),
        ("a: [1, 2", "not valid YAML: expected ',' or ']'"),
        ("a: {path: ${HOME}/x}", "quote a value that holds ${VAR}"),
        ("a: 1\nb\nc: 2", "not valid YAML: a key without its ':'"),
        ("a: 1\n---\nb: 2", "not valid YAML: a second document ('---')"),
        ("a: \x07", "a character that YAML does not allow (code 7)"),
        ("a: *b", "not valid YAML: found undefined alias"),
    ],
)
def test_what_cannot_be_read(text: str, message: str) -> None:
    value, said = read(text)
    assert value is None
    assert message in said[0]


LAUGHS = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 5000, "r.yaml:1:51 : nested more than 50 levels deep, and no key of a recipe lies below the sixth"),
        ("{a: " * 5000, "r.yaml:1:198 : nested more than 50 levels deep"),
        ("".join(f"{' ' * n}a:\n" for n in range(300)), "r.yaml:50:50 : nested more than 50 levels deep"),
        (LAUGHS, ": more than 20,000 values, with aliases written out. Name a folder instead of all its files"),
        ("a: [" + "x, " * 20_000 + "]", "r.yaml:1:59996 : more than 20,000 values"),
        ("#" * (1 << 20) + "\na: 1", "r.yaml : more than 1 MiB, so this is no recipe"),
        (f"seed: {'9' * 5000}", "r.yaml:1:7 seed: a number of 5,000 digits, and no key takes more than 19"),
        ('output: "a\\ud800b"', r"r.yaml:1:9 output: 'a\ud800b' is not Unicode text. Write it in UTF-8; rename a file"),
        ('"\\ud800": 1', r"r.yaml:1:1 : the key '\ud800' is not Unicode text. Write it in UTF-8"),
    ],
    ids=["lists", "mappings", "blocks", "aliases", "values", "size", "digits", "surrogate", "surrogate key"],
)
def test_what_would_hang_or_fill_memory_is_bounded(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[None] = []
    real = yaml_reader.Node.__init__
    monkeypatch.setattr(
        yaml_reader.Node, "__init__", lambda self, *rest, **more: made.append(None) or real(self, *rest, **more)
    )
    _, said = read(text)
    assert len(said) == 1 and message in said[0]
    assert len(made) <= yaml_reader.MAX_VALUES + yaml_reader.MAX_LEVELS


def test_what_lies_within_the_bounds_is_read() -> None:
    deep = "[" * 49 + "1" + "]" * 49
    assert read(deep)[1] == []
    assert read("a: [" + "x, " * 19_990 + "]")[1] == []


def test_an_alias_is_a_copy() -> None:
    assert read("a: &x {b: 1}\nc: *x") == ({"a": {"b": 1}, "c": {"b": 1}}, [])
