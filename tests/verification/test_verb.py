"""`danlu verify` as users type it: tables, exit codes, the page."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders.tiny_world import danlu, tiny_world

from danlu.cli.verify import _print
from danlu.parallel.collective_traffic import Row
from danlu.report.verification import Check, Finding, Module, Verification, format_error, lines
from danlu.report.verification_page import PAGE, page


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tiny_world().recipe(tmp_path / "run", tmp_path / "recipe.yaml")


@pytest.mark.distributed
def test_a_layout_that_is_right_ends_with_0(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "page.html"
    assert danlu("verify", file, "parallel=zero3", "--steps", 1, "--traffic", "--html", html) == 0
    said = capsys.readouterr().out
    assert "the same as one process: zero3, data 2 computes what one process does" in said
    assert "layers.0.attention" in said and "reduce-scatter" in said and "WRONG" not in said
    written = html.read_text()
    assert written.startswith(PAGE.start) and "the same as one process" in written and "reduce-scatter" in written


@pytest.mark.distributed
def test_one_that_is_wrong_ends_with_1(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("verify", file, "parallel.data=2", "--steps", 1, "--inject", "builders.faults:doubled") == 1
    said = capsys.readouterr().out
    assert "NOT the same as one process, first in: gradients of step 1" in said
    assert "first wrong parameter: embed_tokens.weight" in said and "ratio: x2 (data" in said


@pytest.mark.distributed
def test_the_fault_of_the_docs_is_found(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page_of_docs = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page_of_docs, flags=re.DOTALL)
    (tmp_path / "my_faults.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    assert danlu("verify", file, "parallel.data=2", "--steps", 1, "--inject", "my_faults:halved") == 1
    said = capsys.readouterr().out
    assert "NOT the same as one process, first in: gradients of step 1" in said and "ratio: x0.5" in said
    assert danlu("verify", file, "parallel.tensor=2", "--steps", 1, "--inject", "my_faults:halved") == 2
    error = capsys.readouterr().err
    assert "--inject my_faults:halved: not a mistake that this layout can make. It can make none" in error


@pytest.mark.parametrize(
    ("entry", "source", "message"),
    [
        ("halved", "", "--inject halved: not of the form MODULE:NAME, such as my_faults:halved for"),
        (
            "other_faults:halved",
            "1 / 0",
            "other_faults cannot be imported: ZeroDivisionError: division by zero. M",
        ),
        ("other_faults:halved", None, "other_faults cannot be imported: ModuleNotFoundError: No module named"),
        ("other_faults:halved", "", "other_faults has no FAULTS, a dict from names to danlu.verification.fault.Fault"),
        ("other_faults:halved", "FAULTS = {'halved': 1}", "other_faults has no FAULTS, a dict from names to danlu"),
    ],
)
def test_a_module_without_faults_is_refused(
    file: Path,
    tmp_path: Path,
    entry: str,
    source: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if source is not None:
        (tmp_path / "other_faults.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "other_faults", raising=False)
    assert danlu("verify", file, "parallel.data=2", "--inject", entry) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
    sys.modules.pop("other_faults", None)


def test_what_users_get_wrong_ends_with_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert danlu("verify", file, "parallel=zero3", "--html", file) == 2
    assert "is no danlu verification, so it stays as it is" in capsys.readouterr().err
    assert danlu("verify", file, "--precision", "bf17") == 2
    assert "--precision bf17: use fp32, or recipe" in capsys.readouterr().err
    assert danlu("verify", file, "paralel=zero3") == 2
    assert "parallel" in capsys.readouterr().err


FOUND = Verification(
    recipe="<b>.yaml",
    layout="zero3, data 2",
    processes=2,
    about=("model: llama",),
    checks=(Check("loss", 0.0, 1e-6, "loss of step 1"), Check("gradients", 0.5, 1e-6, "norm.weight, step 1")),
    modules=(Module("norm", 24, Check("gradients", 0.5, 1e-6), Check("weights", 0.0, 1e-6)),),
    finding=Finding("gradients of step 1", "norm.weight", "x1.5", "a <sum> made twice"),
    seconds=2.0,
)


def test_wrong_lines_are_marked() -> None:
    said = list(lines(FOUND))
    (module,) = [line for line in said if line.startswith("norm ")]
    assert module.endswith("WRONG") and "5.0e-01" in module
    (loss,) = [line for line in said if line.startswith("loss ")]
    assert "WRONG" not in loss
    assert said[-4:] == [
        "NOT the same as one process, first in: gradients of step 1",
        "  first wrong parameter: norm.weight",
        "  ratio: x1.5",
        "  usually: a <sum> made twice",
    ]


def test_names_of_files_reach_no_terminal_raw(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _print(replace(FOUND, recipe="[bold]a\x1b]0;title\x07.yaml", about=("model: \x9b31m",)))
    said = capsys.readouterr().out
    assert "[bold]a\\x1b]0;title\\x07.yaml: zero3, data 2 on 2 processes" in said and "model: \\u009b31m" in said
    assert "\x1b]" not in said and "\x9b" not in said


def test_the_page_marks_them_too_and_escapes() -> None:
    text = page(FOUND, [Row("shard", "all-gather", "parameters", 1, 10, 20, 0)])  # type: ignore[arg-type]
    assert "&lt;b&gt;.yaml" in text and "<b>" not in text and "a &lt;sum&gt; made twice" in text
    assert text.count('<tr class="wrong">') == 3


def test_errors_are_shown_short() -> None:
    assert [format_error(value) for value in (0.0, 1e-30, 3.14e-7, float("inf"))] == ["0", "0", "3.1e-07", "not finite"]
