"""What adapter folders say of themselves, and which lie below which."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest

from danlu.adapters.adapter_config import (
    CONFIG,
    DANLU,
    KNOWN_KEYS,
    PEFT_TYPES,
    WEIGHTS,
    adapter_stack,
    is_adapter,
    open_adapter,
    read_adapter_config,
    resolve_adapter,
)  # fmt: skip
from danlu.adapters.peft_folder import FORMATS
from danlu.core.errors import ModelError


def made(folder: Path, below: Any = None) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "base"}))
    if below is not None:
        (folder / DANLU).write_text(json.dumps({"below": below}))
    return folder


def test_a_folder_and_a_run_that_ended_with_one(tmp_path: Path) -> None:
    folder = made(tmp_path / "run" / "adapter")
    assert resolve_adapter(tmp_path / "run") == folder == resolve_adapter(folder)
    assert is_adapter(folder) and is_adapter(tmp_path / "run") and not is_adapter(tmp_path)
    assert (
        read_adapter_config(folder).base == "base"
        and read_adapter_config(folder).kind == "LORA"
        and read_adapter_config(folder).below == []
    )
    with pytest.raises(ModelError, match=f"{tmp_path}: neither an adapter .adapter_config.json is missing. nor"):
        resolve_adapter(tmp_path)
    with pytest.raises(ModelError, match="nowhere: no such folder; an adapter is a folder with adapter_config.json"):
        resolve_adapter(tmp_path / "nowhere")


def test_what_lies_below_comes_along_once_and_lowest_first(tmp_path: Path) -> None:
    lowest = made(tmp_path / "lowest")
    middle = made(tmp_path / "middle" / "adapter", [str(lowest)])
    top = made(tmp_path / "top", [str(lowest), str(middle.parent)])
    assert [folder.path for folder in adapter_stack(top)] == [lowest, middle, top]
    assert [folder.path for folder in adapter_stack(tmp_path / "middle")] == [lowest, middle]


def test_a_stack_that_cannot_be(tmp_path: Path) -> None:
    lost = made(tmp_path / "lost", [str(tmp_path / "gone")])
    with pytest.raises(
        ModelError, match=f"{lost}: was trained on top of the adapter {tmp_path / 'gone'}, which is not the"
    ):
        adapter_stack(lost)
    made(tmp_path / "one", [str(tmp_path / "two")])
    made(tmp_path / "two", [str(tmp_path / "one")])
    with pytest.raises(ModelError, match="danlu.json: the adapter is said to be stacked on itself"):
        adapter_stack(tmp_path / "one")
    with pytest.raises(ModelError, match="danlu.json: below is 'gone', not a list of adapter folders"):
        adapter_stack(made(tmp_path / "odd", "gone"))
    (tmp_path / "one" / DANLU).write_text("[]")
    with pytest.raises(ModelError, match="danlu.json: expected a JSON object"):
        adapter_stack(tmp_path / "one")


@pytest.mark.parametrize("held", [{"kind": "nf3"}, {"block": 64}, "nf4", 7])
def test_a_quantization_that_danlu_does_not_know_is_told(tmp_path: Path, held: Any) -> None:
    folder = made(tmp_path / "one", [])
    assert read_adapter_config(folder).quantization is None
    (folder / DANLU).write_text(json.dumps({"quantization": {"kind": "fp4", "block": 64}}))
    assert read_adapter_config(folder).quantization == {"kind": "fp4", "block": 64}
    (folder / DANLU).write_text(json.dumps({"quantization": held}))
    kind = held.get("kind") if isinstance(held, dict) else held
    with pytest.raises(
        ModelError, match=f"{folder / DANLU}: quantization is of the unknown kind {kind!r}; danlu knows"
    ):
        _ = read_adapter_config(folder).quantization


def test_a_base_that_is_no_text_is_told(tmp_path: Path) -> None:
    folder = made(tmp_path / "one")
    (folder / CONFIG).write_text(json.dumps({"base_model_name_or_path": 7}))
    with pytest.raises(ModelError, match="base_model_name_or_path is 7, not a folder or a hub id"):
        _ = read_adapter_config(folder).base


def test_the_kinds_are_those_that_can_be_read_and_written() -> None:
    assert tuple(FORMATS) == PEFT_TYPES


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("LORA", peft.LoraConfig),
        ("VERA", peft.VeraConfig),
        ("IA3", peft.IA3Config),
        ("PROMPT_TUNING", peft.PromptTuningConfig),
        ("PREFIX_TUNING", peft.PrefixTuningConfig),
    ],
)
def test_every_key_that_peft_has_was_looked_at(kind: str, config: Any) -> None:
    """Keys that a new PEFT adds must be judged, in `check_supported` or here, before adapters with them are read."""
    assert {field.name for field in dataclasses.fields(config)} <= KNOWN_KEYS[kind]


def test_a_key_that_nobody_knows_is_not_ignored(tmp_path: Path) -> None:
    folder = made(tmp_path / "one")
    (folder / WEIGHTS).touch()
    for value in (None, False, {}, []):  # what a new key of no effect looks like
        (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "use_mora": value}))
        open_adapter(folder)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "use_mora": True}))
    with pytest.raises(
        ModelError, match=f"{folder / CONFIG}: use_mora is True: PEFT's LORA has no such key that danlu"
    ):
        open_adapter(folder)


def test_it_is_told_without_torch() -> None:
    code = "import sys, danlu.adapters.adapter_config, danlu.assembly.recipe_adapters; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
