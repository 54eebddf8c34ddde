"""What a server calls its models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from danlu.serving.served_models import base_name


@pytest.mark.parametrize(
    ("path", "adapters", "name"),
    [
        ("fox", (), "fox"),
        ("fox", ("wolf",), "fox"),
        ("fox", ("fox",), "fox-base"),
        ("runs/sft/model", (), "sft"),
        ("runs/other/model", (), "model"),
        ("models--Qwen--Qwen3-0.6B/snapshots/c1899de2", (), "Qwen/Qwen3-0.6B"),
        ("fox/snapshots/c1899de2", (), "c1899de2"),
    ],
)
def test_the_name_of_a_base(tmp_path: Path, path: str, adapters: Sequence[str], name: str) -> None:
    folder = tmp_path / path
    folder.mkdir(parents=True)
    (tmp_path / "runs" / "sft").mkdir(parents=True, exist_ok=True)
    (tmp_path / "runs" / "sft" / "recipe.yaml").touch()
    assert base_name(folder, adapters) == name
