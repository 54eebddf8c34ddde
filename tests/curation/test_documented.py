"""docs/curation.md: its example runs, and its table has every step."""

from __future__ import annotations

import importlib
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from danlu.curation.steps import Step

PAGE = (Path(__file__).parents[2] / "docs" / "curation.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys: Any) -> None:
    (example,) = (block for block in re.findall(r"\n\n((?:    .*\n|\n)+)", PAGE) if "import" in block)
    exec(textwrap.dedent(example), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["kept", "dropped", "kept"]
    assert "near duplicate" in lines[1]


def test_the_table_names_the_steps_that_are_there() -> None:
    rows = re.findall(r"^\| `([\w.-]+)` \| `(\w+)` in `([\w/]+)\.py`", PAGE, re.MULTILINE)
    assert len(rows) == 12
    for name, kind, file in rows:
        kind_of_step = getattr(importlib.import_module(f"danlu.curation.{file.replace('/', '.')}"), kind)
        settings: dict[str, Any] = {
            "Language": {"keep": ("en",)},
            "Decontaminate": {"benchmarks": ()},
            "Selection": {"rows": 9},
        }.get(kind, {})
        step = kind_of_step(**settings)
        assert step.name == name and isinstance(step, Step)
        assert json.loads(json.dumps(step.measured_with())) == step.measured_with()
