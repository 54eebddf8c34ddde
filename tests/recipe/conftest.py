"""A recipe on disk with the files it names, for tests that load one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MINIMAL = """\
stage: sft
model: base
data: rows.json
output: runs/x
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes `recipe.yaml` in an empty working folder that holds rows.json and more.jsonl; gives its path."""
    monkeypatch.chdir(tmp_path)
    for name in ("rows.json", "more.jsonl"):
        Path(name).write_text("[]")

    def write(text: str = MINIMAL) -> str:
        Path("recipe.yaml").write_text(text, encoding="utf-8")
        return "recipe.yaml"

    return write
