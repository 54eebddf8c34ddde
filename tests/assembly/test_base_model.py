"""Finding the model that adapters sit on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from builders.adapter_folders import adapter_folder, changed, of_another_tool
from builders.tiny_run import tiny_model
from torch import nn

from danlu.adapters.adapter_config import CONFIG, adapter_stack
from danlu.assembly.base_model import base_of, check_base, find_base
from danlu.assembly.recipe_adapters import adapter_warnings
from danlu.core.errors import ModelError
from danlu.inference.load_model import LoadedModel
from danlu.models.saving import save
from danlu.recipe import sections


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save(tiny_model(), tmp_path / "base")
    return tmp_path / "base"


def test_the_base_is_the_one_given_or_the_one_named(base: Path, tmp_path: Path) -> None:
    folder = adapter_folder(base, tmp_path / "adapter", sections.Lora())
    save(tiny_model(seed=1), tmp_path / "run" / "model")
    assert base_of(adapter_stack(folder), None, "--base").folder == base
    other = base_of(adapter_stack(folder), tmp_path / "run", "--base")
    assert other.folder == tmp_path / "run" / "model" and other.fingerprint != find_base(base).fingerprint
    check_base(adapter_stack(folder)[0], find_base(base))
    with pytest.raises(ModelError, match=rf"{folder}: was trained on another base \({base}\) than {other.folder}"):
        check_base(adapter_stack(folder)[0], other)
    check_base(adapter_stack(of_another_tool(folder))[0], other)  # nothing is known of it


def test_a_base_that_is_not_there(base: Path, tmp_path: Path) -> None:
    folder = adapter_folder(base, tmp_path / "adapter", sections.Lora())
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=rf"{folder}: the model it was trained on cannot be had. {base}: no such folder"
                                         r". Say where it is with --base FOLDER"):  # fmt: skip
        base_of(adapter_stack(folder), None, "--base")
    assert base_of(adapter_stack(folder), tmp_path / "moved", "--base").folder == tmp_path / "moved"
    with pytest.raises(ModelError, match="nowhere: no such folder"):
        base_of(adapter_stack(folder), tmp_path / "nowhere", "--base")
    changed(folder, CONFIG, base_model_name_or_path=None)
    with pytest.raises(ModelError, match="adapter: does not say which model it was trained on. Name it with --into F"):
        base_of(adapter_stack(folder), None, "--into")


def test_what_a_quantized_folder_was_made_from(base: Path) -> None:
    assert find_base(base).quantized_from is None
    (base / "danlu.json").write_text(json.dumps({"quantized_from": "abc"}))
    assert find_base(base).quantized_from == "abc"


def test_settings_that_are_ignored_are_told_of_the_base_and_of_a_loaded_model(tmp_path: Path) -> None:
    """YaRN's attn_factor, also of the language part of a multimodal model."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attn_factor": 0.88}
    for name, values in (("plain", {"rope_scaling": rope}), ("parts", {"text_config": {"rope_parameters": rope}})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
        (told,) = adapter_warnings(sections.Model(path=str(folder)))
        assert told.startswith(f"{folder}/config.json: rope_") and "attn_factor 0.88 is ignored" in told
        loaded = LoadedModel(folder, nn.Linear(1, 1), None, frozenset(), torch.float32)  # type: ignore[arg-type]
        assert loaded.notes == [told]
    (folder / "config.json").write_text("{}")
    assert adapter_warnings(sections.Model(path=str(folder))) == loaded.notes == []
