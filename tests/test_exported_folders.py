"""Folders that danlu writes, as transformers and vLLM open them: they stop where the chat template ends a turn."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders.tiny_world import CONFIG, World, danlu
from builders.vllm_folder import added_tokens, check_opens, stop_ids

from danlu.inference.generation_config import generation_stops
from danlu.models.hf_config import read_config_values
from danlu.models.initialize import initialize
from danlu.models.loading import build
from danlu.models.saving import save

pytestmark = pytest.mark.usefixtures("tokenising_here")
TURN_END, TEXT_END = "<|im_end|>", "<|endoftext|>"


@pytest.fixture
def base(tiny_world: World, tmp_path: Path) -> Path:
    """A base whose template ends turns with another token than its texts end with, as Qwen2.5's does."""
    words = tmp_path / "tokenizer"
    shutil.copytree(tiny_world.tokenizer, words)
    config = words / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token": TEXT_END}))
    (text_end,) = [token for token, text in added_tokens(words).items() if text == TEXT_END]
    model = build(read_config_values({**CONFIG, "vocab_size": 400, "eos_token_id": text_end}))
    initialize(model, 0)
    save(model, tmp_path / "base", tokenizer_from=words)
    values = {"eos_token_id": text_end, "top_p": 0.8}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(values))
    return tmp_path / "base"


def eos_of(folder: Path, file: str) -> list[int]:
    eos = json.loads((folder / file).read_text())["eos_token_id"]
    return eos if isinstance(eos, list) else [eos]


def test_every_exported_folder_ends_answers_where_the_template_ends_turns(
    tiny_world: World, base: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig, GenerationConfig

    ids = {text: token for token, text in added_tokens(base).items()}
    turn_end, both = ids[TURN_END], [ids[TEXT_END], ids[TURN_END]]
    assert turn_end not in stop_ids(base)  # the control: a server of the base would run to the limit

    def run(name: str, **changes: Any) -> Path:
        model = {"config": None, "tokenizer": None, "path": str(base)}
        changes = {"model": model, "steps": 1, "checkpoint": {"every": 1}, "schedule": {"warmup": 0}, **changes}
        assert danlu("train", tiny_world.recipe(tmp_path / name, **changes)) == 0
        return tmp_path / name

    full, lora = run("full"), run("lora", adapter="lora")
    commands: dict[str, Callable[[Path], tuple[object, ...]]] = {
        "merged": lambda out: ("merge", lora, out),
        "combined": lambda out: ("merge", lora, lora, out, "--as-adapter"),
        "quantized": lambda out: ("quantize", base, out),
        "exported": lambda out: ("checkpoint", "export", full, out),
        "exported-adapter": lambda out: ("checkpoint", "export", lora, out),
    }
    written = {"model": full / "model", "adapter": lora / "adapter"}
    for name, command in commands.items():
        written[name] = tmp_path / name
        assert danlu(*command(written[name])) == 0, name
    for name, folder in written.items():
        is_adapter = not (folder / "config.json").exists()
        check_opens(folder, base if is_adapter else None)
        assert stop_ids(folder) == set(both), name
        assert GenerationConfig.from_pretrained(folder).eos_token_id == both, name
        if not is_adapter:
            assert eos_of(folder, "config.json") == AutoConfig.from_pretrained(folder).eos_token_id == both, name
        assert set(generation_stops(folder)) == set(both), name
        assert json.loads((folder / "generation_config.json").read_text())["top_p"] == 0.8, name
