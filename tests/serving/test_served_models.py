"""What a server calls its models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from builders.chat_templates import CHATML, QWEN3
from builders.chat_tokenizers import make_tokenizer

from danlu.data.harmony_thoughts import HarmonyReader
from danlu.data.thoughts import ThoughtReader
from danlu.data.tokenizer import load_tokenizer
from danlu.serving.served_models import _thought_reader, base_name


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


def test_thoughts_are_read_by_the_marks_of_the_template(tmp_path: Path) -> None:
    harmony = CHATML + "{{- '<|channel|>analysis<|message|>' if false }}"
    for number, (template, kind) in enumerate(
        ((QWEN3, ThoughtReader), (harmony, HarmonyReader), (CHATML, None), (None, None), ("{% if %}", None))
    ):
        tokenizer = load_tokenizer(str(make_tokenizer(tmp_path / str(number), template)))
        assert _thought_reader(tokenizer) is kind
