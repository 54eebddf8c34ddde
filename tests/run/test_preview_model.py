"""The models of recipes are read in a process where torch cannot be imported, and as they are with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import read_recipes
from builders.adapter_folders import adapter_folder
from builders.tiny_world import World

from danlu.assembly.quantizing import quantize
from danlu.assembly.recipe_adapters import dataset_spec
from danlu.core.shipped_files import shipped_folder
from danlu.data import tokenizer_folder
from danlu.data.prepare import prepare
from danlu.models.hf_folder import CONFIG
from danlu.recipe import load
from danlu.recipe.sections import Lora, Nf4

NOT_PLANNED = ("chain", "lenet_mnist", "rank_study")
"""Shipped files of several recipes, and of no decoder."""
DATA = (
    *("corpus.txt", "general.txt", "held-out.txt", "new-domain.txt"),
    *("gsm8k_train.jsonl", "instructions.json", "judged-answers.jsonl", "preferences.jsonl"),
)
"""The files that shipped recipes name."""
NEW_TOKENS = "model.tokens=[<plan>, {text: <act>, description: to act}]"


def shipped(base: Path, tokenizer: Path, reward: Path) -> dict[str, list[str]]:
    """Shipped recipe -> what makes it one of small models."""
    own = {
        "pretrain": [f"model.tokenizer={tokenizer}"],
        "distill": [f"teacher.model={base}"],
        "gkd": [f"teacher.model={base}"],
        "ppo": [f"rewards=[{{kind: model, path: {reward}}}]", "value.share=none"],
    }
    names = sorted(file.stem for file in shipped_folder().glob("*.yaml") if file.stem not in NOT_PLANNED)
    return {name: [*own.get(name, ()), *([] if name == "pretrain" else [f"model.path={base}"])] for name in names}


def test_recipes_of_every_stage_are_read_without_torch(
    tiny_world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenising_here: None
) -> None:
    monkeypatch.setattr(tokenizer_folder, "CONVERTED", str(tmp_path / "converted"))
    monkeypatch.chdir(tmp_path)
    for name in DATA:
        Path(name).touch()
    base, reward, packed = tiny_world.base, tmp_path / "reward", tmp_path / "packed"
    adapter_folder(base, reward, Lora(rank=3), scores=True)
    quantize(base, packed, Nf4())
    (tmp_path / "config-alone").mkdir()
    (tmp_path / "skipping").mkdir()
    (tmp_path / "config-alone" / CONFIG).write_bytes((packed / CONFIG).read_bytes())
    values = json.loads((packed / CONFIG).read_text())
    values["quantization_config"]["llm_int8_skip_modules"] += ["down_proj"]
    (tmp_path / "skipping" / CONFIG).write_text(json.dumps(values))
    sft = str(tiny_world.recipe(tmp_path / "run", model={"config": None, "path": str(base)}, data={"eval": 0.1}))
    cases: dict[str, list[str]] = {
        name: [str(shipped_folder() / f"{name}.yaml"), *overrides]
        for name, overrides in shipped(base, tiny_world.tokenizer, reward).items()
    }
    cases |= {
        "sft, tokenised": [sft],
        "sft, other rows": [sft, "data.max_length=63"],
        "new tokens": [sft, "adapter={kind: lora, trainable_tokens: [<|im_end|>]}", NEW_TOKENS],
        "packed": [sft, "adapter=lora", f"model.path={packed}"],
        "packed, config alone": [sft, "adapter=lora", f"model.path={tmp_path / 'config-alone'}"],
        "packed, without down_proj": [sft, "adapter=lora", f"model.path={tmp_path / 'skipping'}"],
        "prefix": [sft, "adapter={kind: prefix, tokens: 3}"],
    }
    rows = prepare(dataset_spec(load(sft).recipe)).train
    assert rows is not None
    command = [sys.executable, read_recipes.__file__, json.dumps(list(cases.values()))]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    read: dict[str, Any] = dict(zip(cases, json.loads(printed), strict=True))
    for name, arguments in cases.items():
        assert read[name] == json.loads(json.dumps(read_recipes.read(*arguments))), name

    assert read["sft, tokenised"]["lengths"] == ["token cache", rows.lengths.tolist()]
    assert read["sft, other rows"]["lengths"] == ["full packs", []]
    assert read["distill"]["frozen"] and not read["sft"]["frozen"]
    assert read["ppo"]["critic"] and read["ppo"]["rewards"] and not read["grpo"]["critic"]
    bytes_of = {name: sum(tensor[1] for tensor in each["tensors"].values()) for name, each in read.items()}
    assert bytes_of["packed"] == bytes_of["packed, config alone"] < bytes_of["packed, without down_proj"]
    assert read["packed"]["tensors"] == read["packed, config alone"]["tensors"]
    wide = read["new tokens"]["tensors"]["embed_tokens.weight"][0]
    assert wide[0] == read["packed"]["tensors"]["embed_tokens.weight"][0][0] + 8
