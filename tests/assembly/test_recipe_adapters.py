from __future__ import annotations

from pathlib import Path

import pytest
from builders.tiny_world import CONFIG, World

from danlu.assembly.recipe_adapters import longest_shared_path, max_sample_length
from danlu.core.errors import ModelError
from danlu.recipe import sections


def test_positions_are_the_models_less_the_virtual_tokens(tiny_world: World) -> None:
    def of(adapter: object = None, **model: object) -> int:
        return max_sample_length(sections.Model(**model), adapter)  # type: ignore[arg-type]

    assert of(config=CONFIG) == 128
    assert of(config={**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}) == 512
    assert of(preset="tiny") == 2048
    assert of(path=str(tiny_world.base)) == 128
    assert of(sections.Prompt(tokens=8), path=str(tiny_world.base)) == 120
    assert of(sections.Prefix(tokens=20), path=str(tiny_world.base)) == 108
    assert of(sections.Lora(), path=str(tiny_world.base)) == 128


def test_stems_are_shared_unless_their_keys_depend_on_the_length() -> None:
    dynamic = sections.Model(config={**CONFIG, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    data, repeating = sections.Data(train=[]), sections.Data(train=[], share_stem=False)
    assert longest_shared_path(data, sections.Model(preset="tiny"), None) is None
    assert longest_shared_path(data, dynamic, None) == 128  # though the model has positions for 256
    assert longest_shared_path(data, dynamic, sections.Prompt(tokens=8)) == 120
    assert longest_shared_path(data, dynamic, sections.Prompt(tokens=200)) == 0
    assert longest_shared_path(repeating, sections.Model(preset="tiny"), None) == 0


def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        max_sample_length(sections.Model(path=str(tmp_path / "none")), None)
