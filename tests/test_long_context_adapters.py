"""Adapters trained on a base whose rotary embedding is scaled: their folders carry it, and what reads them knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from builders.tiny_world import World, danlu
from torch import Tensor

from danlu.adapters.adapter_config import DANLU
from danlu.core.errors import ModelError
from danlu.inference.load_model import load_chat_tokenizer, load_model
from danlu.inference.resolve_model import resolve_model
from danlu.models.attend import PackedAttention

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
STAGES = [{"length": 32, "steps": 1}, {"length": 64, "steps": 2}]
LENGTH = 60


def recipe(world: World, output: Path, **changes: Any) -> Path:
    """The base with a LoRA adapter, at 64 tokens for two steps, or what `long_context` says."""
    model = {"path": str(world.base), "config": None, "tokenizer": None} | changes.pop("model", {})
    data = {"train": str(world.text), "overlong": "split"}
    lora = {"kind": "lora", "rank": 2}
    values = world.values(output, **{"stage": "pretrain", "model": model, "data": data, "adapter": lora, **changes})
    values |= {"steps": 2}
    if "long_context" in changes:
        del values["steps"], values["data"]["max_length"]
    file = output.with_name(f"{output.name}.yaml")
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture(scope="module")
def adapter(tiny_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of a run in two stages of lengths."""
    run = tmp_path_factory.mktemp("long") / "run"
    long_context = {"method": "yarn", "original_length": 32, "stages": STAGES}
    assert danlu("train", recipe(tiny_world, run, long_context=long_context)) == 0
    return run / "adapter"


def scores(path: Path) -> Tensor:
    """Of 60 tokens, [60, V], as danlu loads a model or an adapter for generation."""
    resolved = resolve_model(str(path))
    tokenizer = load_chat_tokenizer(resolved.tokenizer_folder, model=resolved.folder)
    model = load_model(resolved, tokenizer, precision="fp32", device="cpu").model
    with torch.no_grad():
        return model.logits(model(torch.arange(LENGTH), torch.arange(LENGTH), PackedAttention((0, LENGTH))))


@pytest.mark.usefixtures("tokenising_here")
def test_peft_computes_the_same_with_the_config_in_the_folder(tiny_world: World, adapter: Path) -> None:
    config = json.loads((adapter / "config.json").read_text())
    assert config["rope_scaling"] == YARN and config["max_position_embeddings"] == 64
    import peft
    from transformers import AutoConfig, AutoModelForCausalLM

    def theirs(folder: Path) -> Tensor:
        options = {"config": AutoConfig.from_pretrained(folder), "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(tiny_world.base, **options)
        with torch.no_grad():
            return peft.PeftModel.from_pretrained(model, adapter).eval()(torch.arange(LENGTH)[None]).logits[0]

    torch.testing.assert_close(scores(adapter), theirs(adapter), atol=1e-5, rtol=0)
    assert (scores(adapter) - theirs(tiny_world.base)).abs().max() > 1e-3  # the base's own rotation is another


@pytest.mark.usefixtures("tokenising_here")
def test_merged_it_is_a_model_that_says_the_same(adapter: Path, tmp_path: Path) -> None:
    assert danlu("merge", adapter, tmp_path / "merged") == 0
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["rope_scaling"] == YARN
    torch.testing.assert_close(scores(tmp_path / "merged"), scores(adapter), atol=1e-5, rtol=0)


@pytest.mark.usefixtures("tokenising_here")
def test_what_is_trained_on_from_it_keeps_the_rotation(tiny_world: World, adapter: Path, tmp_path: Path) -> None:
    base = {"model": {"adapters": [str(adapter)]}, "optimizer": {"kind": "adamw", "learning_rate": 1e-30}}
    assert danlu("train", recipe(tiny_world, tmp_path / "continued", **base, adapter="continue")) == 0
    assert json.loads((tmp_path / "continued" / "adapter" / "config.json").read_text())["rope_scaling"] == YARN
    torch.testing.assert_close(scores(tmp_path / "continued"), scores(adapter), atol=1e-5, rtol=0)

    assert danlu("train", recipe(tiny_world, tmp_path / "upon", **base)) == 0
    assert not (tmp_path / "upon" / "adapter" / "config.json").exists()  # the adapter below it says it
    torch.testing.assert_close(scores(tmp_path / "upon"), scores(adapter), atol=1e-5, rtol=0)

    assert danlu("train", recipe(tiny_world, tmp_path / "whole", **base, adapter=None)) == 0
    assert json.loads((tmp_path / "whole" / "model" / "config.json").read_text())["rope_scaling"] == YARN


@pytest.mark.usefixtures("tokenising_here")
def test_adapters_of_other_rotations_do_not_share_a_base(
    tiny_world: World, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    values = json.loads((other / "config.json").read_text())
    values["rope_scaling"]["factor"] = 4.0
    (other / "config.json").write_text(json.dumps(values))
    plain = tmp_path / "plain"
    shutil.copytree(adapter, plain)
    danlu_values = json.loads((plain / DANLU).read_text())
    (plain / DANLU).write_text(json.dumps({**danlu_values, "rotated": False}))
    with pytest.raises(ModelError, match="they would share one base. Load each alone"):
        resolve_model(str(tiny_world.base), adapters=[str(adapter), str(other)])
    assert len(resolve_model(str(tiny_world.base), adapters=[str(adapter), str(adapter)]).stacks) == 2
    capsys.readouterr()
    for sources in ((adapter, other), (adapter, plain)):
        assert danlu("merge", *sources, tmp_path / "merged") != 0
        assert "they would share one base" in capsys.readouterr().err
        assert danlu("merge", *sources, "--as-adapter", tmp_path / "combined") != 0
        assert "their changes do not add up" in capsys.readouterr().err
    model = {"adapters": [str(adapter), str(other)]}
    assert danlu("train", recipe(tiny_world, tmp_path / "run", model=model)) != 0
    assert "were trained with different rotary embeddings" in capsys.readouterr().err
    assert danlu("merge", adapter, adapter, "--as-adapter", tmp_path / "twice") == 0
    assert resolve_model(str(tmp_path / "twice")).config.max_position_embeddings == 64


def test_a_folder_without_its_config_is_refused(adapter: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(adapter, lost)
    (lost / "config.json").unlink()
    with pytest.raises(ModelError, match="lost/config.json: missing. The adapter was trained with long_context"):
        resolve_model(str(lost)).config  # noqa: B018
    values = json.loads((lost / DANLU).read_text())
    (lost / DANLU).write_text(json.dumps({**values, "rotated": False}))
    assert resolve_model(str(lost)).config.max_position_embeddings != 64
