"""The plan of a run next to its measured numbers, from fixed values, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report.test_plan_text import VALUES

from danlu.core.errors import DataError
from danlu.core.run_files import PLAN
from danlu.report.plan_comparison import compared, comparison_lines, plan_of_record, read_plan
from danlu.report.run_record import RunRecord

GIB = 2**30


def test_parts_stand_next_to_what_was_measured() -> None:
    measured = {"weights": 12 * GIB, "adapter": 0, "gradients": 4 * GIB, "activations": 32 * GIB}
    assert list(comparison_lines(compared(VALUES, measured, 2.5))) == [
        "                   expected  measured  difference",
        "weights              12 GiB    12 GiB       +0.0%",
        "gradients             3 GiB     4 GiB      -25.0%",
        "activations          40 GiB    32 GiB      +25.0%",
        "all                  55 GiB    48 GiB      +14.6%",
        "seconds of a step       3 s     2.5 s      +20.0%",
    ]


def test_a_run_that_goes_on_has_seconds_alone() -> None:
    record = RunRecord(Path("run"), None, steps={"step_s": {1: 9.0, 2: 2.0, 3: 2.0, 4: 3.0}})
    comparison = plan_of_record({**VALUES, "seconds": None}, record)
    assert comparison["seconds"] == {"expected": None, "measured": 2.0}  # the first step warms up
    lines = list(comparison_lines(comparison))
    assert lines[1].split() == ["weights", "12", "GiB", "unknown"] and lines[-1].split()[-3:] == ["unknown", "2", "s"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (json.dumps(VALUES)[:100], "torn"),
        (json.dumps({**VALUES, "format": 0}), "its format is 0, and this danlu reads 1"),
        (json.dumps({key: value for key, value in VALUES.items() if key != "memory"}), "without memory"),
        ("[]", "torn"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    assert read_plan(tmp_path) is None
    (tmp_path / PLAN).write_text(content)
    with pytest.raises(DataError) as refused:
        read_plan(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / PLAN}: not the plan of a run, or torn (")
    assert reason in str(refused.value)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    values: dict[str, Any] = json.loads(json.dumps(VALUES))
    (tmp_path / PLAN).write_text(json.dumps(values))
    assert read_plan(tmp_path) == values
