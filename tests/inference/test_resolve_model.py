"""What names on the command line stand for, and what is said of those that stand for nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from builders.adapter_folders import adapter_folder, changed, of_another_tool
from builders.tiny_world import World

from danlu.adapters.adapter_config import CONFIG, read_adapter_config
from danlu.core.errors import DataError, ModelError, RecipeError
from danlu.inference.resolve_model import adapter_names, resolve_model
from danlu.recipe import sections


@pytest.fixture
def base(tiny_world: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_world.base, tmp_path / "base"))


def with_words(folder: Path, base: Path) -> Path:
    shutil.copy(base / "tokenizer.json", folder)
    return folder


def test_a_model_an_adapter_and_runs(base: Path, tmp_path: Path) -> None:
    plain = resolve_model(str(base))
    assert (plain.given_path, plain.folder, plain.tokenizer_folder, plain.stacks) == (base, base, base, ())
    folder = adapter_folder(base, tmp_path / "run" / "adapter", sections.Lora())
    for name in (folder, tmp_path / "run"):
        resolved = resolve_model(str(name))
        assert (resolved.given_path, resolved.folder, resolved.tokenizer_folder) == (folder, base, base)
        assert [[one.path for one in stack] for stack in resolved.stacks] == [[folder]]
    assert resolve_model(str(with_words(folder, base))).tokenizer_folder == folder
    shutil.copytree(base, tmp_path / "run" / "model")
    assert resolve_model(str(tmp_path / "run")).stacks == ()  # somebody merged it
    shutil.copytree(folder, base / "adapter")
    assert resolve_model(str(base)).stacks == ()  # its maker laid one into it


def test_a_stack_and_further_adapters(base: Path, tmp_path: Path) -> None:
    lower = with_words(adapter_folder(base, tmp_path / "lower", sections.Lora()), base)
    upper = adapter_folder(base, tmp_path / "upper", sections.Prompt(tokens=3), below=(lower,))
    resolved = resolve_model(str(upper), adapters=[str(lower)])
    assert [[one.path for one in stack] for stack in resolved.stacks] == [[lower, upper], [lower]]
    assert resolved.tokenizer_folder == lower and resolved.virtual_tokens_per_prompt == 3
    over_base = resolve_model(str(base), adapters=[str(lower), str(upper)])
    assert over_base.given_path == over_base.folder == base and over_base.tokenizer_folder == lower
    assert len(over_base.stacks) == 2 and over_base.virtual_tokens_per_prompt == 0


def test_a_base_that_moved(base: Path, tmp_path: Path) -> None:
    folder = adapter_folder(base, tmp_path / "adapter", sections.Lora())
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match="base: no such folder. Say where it is with --base FOLDER"):
        resolve_model(str(folder))
    assert resolve_model(str(folder), base=str(moved)).folder == moved
    with pytest.raises(RecipeError, match="--base: .*moved is a whole model; only an adapter needs a base"):
        resolve_model(str(moved), base=str(moved))


def test_an_adapter_of_another_base(base: Path, tmp_path: Path) -> None:
    folder = adapter_folder(base, tmp_path / "adapter", sections.Lora())
    weights = bytearray((base / "model.safetensors").read_bytes())
    other = Path(shutil.copytree(base, tmp_path / "other"))
    weights[-5] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    for attempt in (
        lambda: resolve_model(str(folder), str(other)),
        lambda: resolve_model(str(other), adapters=[str(folder)]),
    ):
        with pytest.raises(ModelError, match="adapter: was trained on another base .*base. than .*other"):
            attempt()
    assert resolve_model(str(of_another_tool(folder)), str(other)).folder == other


def test_what_is_missing(base: Path, tmp_path: Path) -> None:
    folder = adapter_folder(base, tmp_path / "adapter", sections.Lora())
    changed(base, "config.json", model_type="gptj")
    with pytest.raises(ModelError, match="model_type 'gptj' is not supported"):
        resolve_model(str(folder))
    changed(base, "config.json", model_type="llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    with pytest.raises(DataError, match="base: neither this model folder nor its adapter has a tokenizer"):
        resolve_model(str(folder))
    with pytest.raises(DataError, match="this model folder has no tokenizer"):
        resolve_model(str(base))
    (folder / CONFIG).write_text("{")
    with pytest.raises(ModelError, match="adapter_config.json: cannot be read as JSON"):
        resolve_model(str(folder))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("stage: sft\n")
    with pytest.raises(ModelError, match="this run has not written its model yet"):
        resolve_model(str(tmp_path / "run"))


def test_names_are_those_of_runs_and_folders_and_each_one_of_a_kind(base: Path, tmp_path: Path) -> None:
    stacks = []
    for place in ("sft/adapter", "sft/adapter-ema", "b/sft/adapter", "poet", "c/poet", "my cat", "none", "x/adapter"):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text("{}")
        if "sft" in place:
            (folder.parent / "recipe.yaml").touch()
        stacks.append((read_adapter_config(folder),))
    assert adapter_names(stacks) == [
        "sft", "sft-ema", "sft-2", "poet", "poet-2", "my-cat", "none-2", "adapter",
    ]  # fmt: skip
