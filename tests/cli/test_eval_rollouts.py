"""`danlu eval --rewards`: rewards tried on answers that rows have, and a model judged by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders.tiny_world import World, danlu, write_rows

ROWS = [{"question": f"{n} and {n}", "answer": f"#### {2 * n}", "given": f"{2 * n + (n % 2)}"} for n in range(10)]
MATH = '{"kind": "math", "column": "answer"}'


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    write_rows(file, ROWS)
    return file


@pytest.mark.parametrize(("column", "mean"), [("answer", 1.0), ("given", 0.5)])
def test_answers_of_rows_are_judged_without_a_model(
    rows: Path, column: str, mean: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert danlu("eval", "--rewards", MATH, "--data", rows, "--answers", column, "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert lines[-1]["rewards"]["math"]["mean"] == mean


def test_a_column_that_is_not_there_is_told_with_those_that_are(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = '{"kind": "math", "column": "answr"}'
    assert danlu("eval", "--rewards", rewards, "--data", rows, "--answers", "given") == 3
    assert "rows.jsonl:1: reward math reads the column 'answr'" in capsys.readouterr().err


def test_a_model_is_judged_by_several_answers_to_each_prompt(
    tiny_world: World, rows: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--samples", 4, "--max-new-tokens", 4, "--json"]
    overrides = ['data.prompt="{question}"']
    assert danlu("eval", tiny_world.base, "--rewards", MATH, "--data", rows, *flags, *overrides) == 0
    summary = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")][-1]
    assert (summary["rows"], summary["answers"]) == (10, 40)
    assert set(summary["rewards"]["math"]["pass_at"]) == {"1", "2", "3", "4"}
