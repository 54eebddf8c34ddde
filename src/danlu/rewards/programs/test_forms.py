"""Parsing the tests in a cell, in the forms of published data sets, and refusing cells without a test.

Forms: a piece of Python or a list of them (MBPP), `def check(candidate)` (HumanEval), functions of pytest, classes of
unittest, and `{"inputs": [...], "outputs": [...]}`, with `fn_name` or for programs that read and print (APPS, TACO). A
list or an object may also be written as JSON, or as Python, in a cell of text.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SETUP_COLUMNS = ("test_imports", "test_setup_code")
"""Columns of MBPP with code that its tests need before them."""
ENTRY_POINT = "entry_point"
"""The column of HumanEval with the name of the function that `check` is given."""
PRELOADED = ("unittest", "pytest", "numpy")
"""Modules that the judge imports once, where tests name them."""
DEFINITION = re.compile(r"^\s*(?:async\s+)?def\s+(\w+)\s*\(", re.MULTILINE)


class NoTest(ValueError):
    """A cell holds no test, or one in a form that is unknown."""


@dataclass(frozen=True)
class ProgramTest:
    """A test of a program, as the judge runs it."""

    form: str
    """source: Python; call: of a function with arguments; script: a run with an input."""
    source: str = ""
    entry_point: str | None = None
    """The function given to `check`, where the source has one."""
    hints: tuple[str, ...] = ()
    """Functions that the prompt defines, where no entry point is named."""
    name: str = ""
    arguments: str = ""
    given: str = ""
    expected: str = ""

    @property
    def modules(self) -> str:
        """The modules that the judge imports before the test."""
        return " ".join(name for name in PRELOADED if re.search(rf"\b{name}\b", self.source))

    def asked(self) -> dict[str, Any]:
        """The test as plain data."""
        return {**vars(self), "hints": list(self.hints)}


def parse_tests(cell: Any, row: Mapping[str, Any], prompt: str = "") -> list[ProgramTest]:
    """Parses the tests in a cell; each counts by itself. Raises NoTest with the fault.

    Args:
        row: its other columns: those of MBPP and HumanEval that belong to the tests are read. prompt: that of the row:
            `check` gets a function that it defines where the row does not name one.
    """
    value = _unquoted(cell)
    if isinstance(value, Mapping):
        return list(_cases(value))
    sources = [value] if isinstance(value, str) else value
    if not isinstance(sources, Sequence) or not sources:
        raise NoTest("it is empty" if not sources else f"it is {type(cell).__name__}, and no text or list of texts")
    if all(isinstance(each, Mapping) for each in sources):
        return [case for each in sources for case in _cases(each)]  # type: ignore[arg-type]
    if wrong := next((each for each in sources if not isinstance(each, str)), None):
        raise NoTest(f"a list of tests holds {type(wrong).__name__}: {wrong!r:.80}")
    setup = "".join(f"{line}\n" for column in SETUP_COLUMNS for line in _lines(row.get(column)))
    entry_point = row.get(ENTRY_POINT)
    hints = tuple(DEFINITION.findall(prompt))
    named = entry_point if isinstance(entry_point, str) and entry_point else None
    return [ProgramTest("source", _checked(setup, source), named, hints) for source in sources]


def _unquoted(cell: Any) -> Any:
    """A cell with the list or object that its text writes; tolist() of arrays, which Parquet has for lists."""
    if hasattr(cell, "tolist"):
        cell = cell.tolist()
    if not isinstance(cell, str) or cell.lstrip()[:1] not in ("[", "{"):
        return cell.strip() and cell if isinstance(cell, str) else cell
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(cell.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, list | dict):
            return value
    return cell


def _lines(value: Any) -> list[str]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    return [value] if isinstance(value, str) else [each for each in value or () if isinstance(each, str)]


def _checked(setup: str, source: str) -> str:
    """Returns a piece of Python that can fail, behind its setup. Raises NoTest for any other."""
    if not source.strip():
        raise NoTest("a test is empty")
    try:
        tree = ast.parse(setup + source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoTest(f"a test is no Python, and no form that is known: {error}: {source!r:.80}") from None
    if not any(_can_fail(node) for node in ast.walk(ast.parse(source))):
        raise NoTest(
            f"it tests nothing: no assert, no check(candidate), no test of pytest or unittest in {source!r:.80}"
        )
    roots = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    if "pytest" in roots and importlib.util.find_spec("pytest") is None:
        raise NoTest("it imports pytest, which is not installed. Install it: pip install pytest")
    return setup + source


def _can_fail(node: ast.AST) -> bool:
    """Whether a statement or expression decides something: an assertion, in whatever form."""
    if isinstance(node, ast.Assert | ast.Raise):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return "assert" in name.lower() or name.endswith((".raises", ".fail", "exit", "check"))


def _cases(value: Mapping[str, Any]) -> Iterator[ProgramTest]:
    """The cases of an object of APPS or TACO, each a test. Raises NoTest for an object of other names."""
    if not {"inputs", "outputs"} <= value.keys() and {"input", "output"} <= value.keys():
        value = {**value, "inputs": [value["input"]], "outputs": [value["output"]]}
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise NoTest(
            f"an object with {', '.join(map(repr, value)) or 'nothing'} in it; known are inputs and outputs (APPS)"
        )
    if not inputs or len(inputs) != len(outputs):
        raise NoTest(f"{len(inputs)} inputs and {len(outputs)} outputs")
    name = value.get("fn_name")
    for given, expected in zip(inputs, outputs, strict=True):
        if name:
            arguments = given if isinstance(given, list) else [given]
            yield ProgramTest("call", name=str(name), arguments=json.dumps(arguments), expected=json.dumps(expected))
        else:
            yield ProgramTest("script", given=_joined(given), expected=_joined(expected))


def _joined(text: Any) -> str:
    """The text of an input or output, which some rows have as a list of lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)
