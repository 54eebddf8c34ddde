from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from danlu.core.errors import ModelError, ResourceError
from danlu.core.shard_box import ShardBox
from danlu.core.tokenizer_files import NAMED_TEMPLATES, TOKENIZER_FILES, VOCABULARY_FILES
from danlu.models import saving
from danlu.models.decoder import Decoder
from danlu.models.loading import load
from danlu.models.saving import save


@pytest.fixture
def model(tiny_model: Callable[..., Decoder]) -> Decoder:
    return tiny_model("phi-4")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "notes.txt"):
        (folder / name).write_bytes(f"bytes of {name}\r\n".encode())
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("shard_bytes", [1, 50_000, 5_000_000_000])
def test_saved_loaded_saved_is_the_same_bytes(model: Decoder, shard_bytes: int, tmp_path: Path) -> None:
    save(model, tmp_path / "one", shard_bytes=shard_bytes)
    save(load(tmp_path / "one"), tmp_path / "two", shard_bytes=shard_bytes)
    assert content(tmp_path / "one") == content(tmp_path / "two")
    save(load(tmp_path / "one", dtype=torch.bfloat16), tmp_path / "three", shard_bytes=shard_bytes)
    assert content(tmp_path / "one") != content(tmp_path / "three")


def test_shards_and_index_are_what_transformers_reads(model: Decoder, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save(model, tmp_path / "one", dtype=torch.bfloat16, shard_bytes=50_000)
    index = json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * model.config.parameter_count()
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "one" / shard, framework="pt") as file:
            assert name in set(file.keys())
            assert file.metadata() == {"format": "pt"}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert theirs.dtype == torch.bfloat16
    fused = theirs.model.layers[0].self_attn.qkv_proj.weight
    attention = model.layers["0"].attention
    mine = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(fused, mine.to(torch.bfloat16))


def test_who_does_not_write_asks_for_the_same_and_touches_no_file(model: Decoder, tmp_path: Path) -> None:
    asked: list[list[tuple[str, ShardBox | None]]] = [[], []]

    def value(name: str, box: ShardBox | None = None) -> torch.Tensor:
        asked[0].append((name, box))
        return model.get_parameter(name) * 2

    def helps(name: str, box: ShardBox | None = None) -> None:
        asked[1].append((name, box))

    save(model, tmp_path / "one", value=value, shard_bytes=50_000)
    save(model, tmp_path / "two", value=helps, shard_bytes=50_000, writes=False)
    assert asked[0] == asked[1] == list(dict.fromkeys(asked[0]))
    assert len(asked[0]) == len(list(model.parameters()))
    assert not (tmp_path / "two").exists()
    assert torch.equal(load(tmp_path / "one").norm.weight, model.norm.weight * 2)


def test_the_tokenizer_goes_along_byte_for_byte(model: Decoder, tokenizer: Path, tmp_path: Path) -> None:
    save(model, tmp_path / "out", tokenizer_from=tokenizer)
    saved, source = content(tmp_path / "out"), content(tokenizer)
    assert {name for name in saved if name in source} == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert all(saved[name] == source[name] for name in saved if name in source)
    assert json.loads(saved["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": 2}
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    save(model, tmp_path / "out", tokenizer_from=tokenizer)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"eos_token_id": [2, 9]}'


def test_the_exported_folder_is_a_transformers_tokenizer_too(model: Decoder, shared_data: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = shared_data / "tokenizers" / "minimind"
    save(model, tmp_path / "out", tokenizer_from=source)
    text = "<|im_start|>user\n丹炉 furnace<|im_end|>"
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", source))
    assert ours(text).input_ids == theirs(text).input_ids
    assert ours.chat_template == theirs.chat_template


def test_everything_that_a_tokenizer_folder_may_hold_goes_along(model: Decoder, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    names = [pattern.replace("*", "v3") for pattern in TOKENIZER_FILES]
    assert {"vocab.txt", "spiece.model", "tekken.json", "additional_chat_templates/v3.jinja"} <= set(names)
    for name in (*names, "model.safetensors", "notes.txt", "additional_chat_templates/notes.txt"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(f"bytes of {name}\r\n".encode())
    save(model, tmp_path / "out", tokenizer_from=source)
    found = {str(file.relative_to(tmp_path / "out")): file for file in (tmp_path / "out").rglob("*") if file.is_file()}
    assert set(found) == {*names, "config.json", "generation_config.json", "model.safetensors"}
    assert all(found[name].read_bytes() == (source / name).read_bytes() for name in names)


@pytest.mark.parametrize("name", VOCABULARY_FILES)
def test_any_vocabulary_makes_a_folder_one_with_a_tokenizer(name: str, model: Decoder, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    save(model, tmp_path / "out", tokenizer_from=tmp_path)
    assert (tmp_path / "out" / name).read_text() == "x"


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}]
TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.mark.parametrize("given", [None, "given {{ messages[0].content }}"])
def test_the_exported_folder_renders_the_same(
    given: str | None, model: Decoder, shared_data: Path, tmp_path: Path
) -> None:
    """By danlu and by transformers, with tools and without, where the tokenizer has templates for both."""
    from transformers import AutoTokenizer

    from danlu.data.tokenizer import load_tokenizer

    source = tmp_path / "tokenizer"
    shutil.copytree(shared_data / "tokenizers" / "torchtitan-test", source)
    (source / NAMED_TEMPLATES).mkdir()
    (source / NAMED_TEMPLATES / "tool_use.jinja").write_text("tools {{ tools[0].function.name }}")
    (source / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    file = None if given is None else tmp_path / "given.jinja"
    if file is not None and given is not None:
        file.write_text(given)
    save(model, tmp_path / "out", tokenizer_from=source, chat_template=given)
    before = load_tokenizer(str(source), None if file is None else str(file))
    after = load_tokenizer(str(tmp_path / "out"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    expected = ("own Hi", "tools weather") if given is None else ("given Hi", "given Hi")
    for tools, text in zip((None, TOOLS), expected, strict=True):
        assert before.template(bool(tools)).render(TURNS, tools) == text
        assert after.template(bool(tools)).render(TURNS, tools) == text
        assert theirs.apply_chat_template(TURNS, tools, tokenize=False) == text


def test_a_folder_without_a_tokenizer_is_refused_before_anything_is_written(model: Decoder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: no tokenizer here: none of tokenizer.json"):
        save(model, tmp_path / "out", tokenizer_from=tmp_path / "empty")
    assert not (tmp_path / "out").exists()


def test_a_model_is_replaced_but_nothing_else_is(model: Decoder, tmp_path: Path) -> None:
    save(model, tmp_path / "out")
    (tmp_path / "out" / "stale.safetensors").write_text("x")
    save(model, tmp_path / "out")
    assert sorted(content(tmp_path / "out")) == ["config.json", "generation_config.json", "model.safetensors"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.tex").write_text("x")
    with pytest.raises(ModelError, match="thesis: not written: the folder holds something other than a model"):
        save(model, other)
    with pytest.raises(ModelError, match=r"chapter1.tex: a model folder cannot be written here, this is a file"):
        save(model, other / "chapter1.tex")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "thesis"]


def test_a_full_disk_leaves_the_old_model(model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model, tmp_path / "out")
    before = content(tmp_path / "out")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(
        ResourceError,
        match=r"the disk has 100,000 bytes free, the model takes [1-9].* bytes: [1-9][\d,]* bytes are missing. N",
    ):
        save(model, tmp_path / "out", dtype=torch.float32)
    monkeypatch.undo()

    def full(handle: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving.os, "fsync", full)
    with pytest.raises(ResourceError, match="out: the model cannot be written: the disk is full"):
        save(model, tmp_path / "out")
    assert content(tmp_path / "out") == before
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_model_that_a_killed_save_moved_away_comes_back(model: Decoder, tmp_path: Path) -> None:
    save(model, tmp_path / "out")
    before = content(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    (tmp_path / ".out.writing").mkdir()
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(ModelError):
        save(model, tmp_path / "out")
    assert content(tmp_path / "out") == before
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_weights_that_are_not_finite_are_not_exported(model: Decoder, tmp_path: Path) -> None:
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    with pytest.raises(ModelError, match=r"norm.weight: not finite as torch.float32; the model is not written"):
        save(model, tmp_path / "out")
    with torch.no_grad():
        model.norm.weight[3] = 1e6
    with pytest.raises(ModelError, match=r"norm.weight: not finite as torch.float16"):
        save(model, tmp_path / "out", dtype=torch.float16)
    assert list(tmp_path.iterdir()) == []
    save(model, tmp_path / "out", dtype=torch.bfloat16)


def test_a_place_that_cannot_be_made_is_said(model: Decoder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match=r"the model cannot be written: .*Not a directory|exists"):
        save(model, tmp_path / "file" / "out")
