"""The outcome of `model: {config: FOLDER}` of each published config: what a preview counts, or why it is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from builders.tiny_world import World

from danlu.core.errors import ModelError
from danlu.data.tokenizer_info import TokenizerInfo
from danlu.models.config import parameter_shapes
from danlu.recipe import load
from danlu.run.expected_memory import memory_lines
from danlu.run.preview_model import config_of, preview_parameters

ACCEPTED: dict[str, int] = {
    "Gemma-2-2b": 8192,
    "Llama-2-13b-hf": 4096,
    "Llama-2-70b-hf": 4096,
    "Llama-2-7b-hf": 4096,
    "Llama-3.2-1B": 131072,
    "Llama-3.2-3B": 131072,
    "Mistral-7B-v0.1": 4096,
    "Qwen2.5-0.5B": 32768,
    "Qwen2.5-72B": 131072,
    "Qwen2.5-7B": 131072,
    "Qwen__Qwen3-0.6B": 40960,
    "Qwen__Qwen3-1.7B": 40960,
    "Qwen__Qwen3-30B-A3B": 40960,
    "Qwen__Qwen3-32B": 40960,
    "Qwen__Qwen3-8B": 40960,
    "SmolLM2-135M": 8192,
    "deepseek-ai__DeepSeek-V3": 163840,
    "meta-llama__Meta-Llama-3.1-405B": 131072,
    "meta-llama__Meta-Llama-3.1-70B": 131072,
    "meta-llama__Meta-Llama-3.1-8B": 131072,
    "mistralai__Mixtral-8x7B-v0.1": 32768,
    "openai__gpt-oss-20b": 131072,
    "phi-4": 16384,
    "pythia-160m": 2048,
    "tiny-llama-1.1b": 2048,
}
"""Folder -> positions of its model."""
REFUSED: dict[str, str] = {
    "zai-org__GLM-5.1": "model_type 'glm_moe_dsa' is not supported: its attention is sparse: an indexer chooses which",
}
PREVIEWED = {
    "SmolLM2-135M": "134.5M parameters, all trained",
    "Qwen2.5-0.5B": "494.0M parameters, all trained",
    "pythia-160m": "162.3M parameters, all trained",
}
"""Small ones, of which the whole model is made without values, as a preview does."""


def preview_of(folder: Path, world: World, tmp_path: Path) -> tuple[str | None, int, int]:
    """The line of parameters, their number without routers' corrections, and the positions."""
    values = json.loads((folder / "config.json").read_text())
    model = {"config": str(folder / "config.json"), "tokenizer": str(world.tokenizer)}
    recipe = load(world.recipe(tmp_path / "run", tmp_path / "recipe.yaml", model=model)).recipe
    tokenizer = TokenizerInfo(values["vocab_size"], None, None, None, ())
    config = config_of(recipe, tokenizer)
    assert config is not None
    shapes = parameter_shapes(config)
    corrections = sum(shape[0] for name, shape in shapes.items() if name.endswith(".correction"))
    line = None
    if folder.name in PREVIEWED:
        line = preview_parameters(recipe, tokenizer)
        assert any("GiB" in each for each in memory_lines(recipe))
    return line, config.parameter_count() - corrections, config.context_length


@pytest.mark.end_to_end
def test_every_published_config_is_accepted_or_refused_with_its_reason(
    shared_data: Path, tiny_world: World, tmp_path: Path
) -> None:
    with (shared_data / "configs" / "params.csv").open() as file:
        counts = {row["config"]: int(row["total_params"]) for row in csv.DictReader(file)}
    assert counts.keys() == ACCEPTED.keys() | REFUSED.keys() and len(counts) == 26
    for name, positions in ACCEPTED.items():
        line, parameters, length = preview_of(shared_data / "configs" / name, tiny_world, tmp_path)
        assert (parameters, length) == (counts[name], positions), name
        assert line == PREVIEWED.get(name)
    for name, reason in REFUSED.items():
        with pytest.raises(ModelError, match=f"{name}/config.json: {reason}"):
            preview_of(shared_data / "configs" / name, tiny_world, tmp_path)
