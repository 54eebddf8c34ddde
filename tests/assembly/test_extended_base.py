"""A base with rows for new tokens: their values, the rows that no token has, and all that stays as it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders.peft_reference import TOKENS as TEXT
from builders.tiny_adapters import logits
from builders.tiny_run import tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from danlu.assembly import extended_base as module
from danlu.assembly.base_model import find_base
from danlu.assembly.extended_base import extended_base, extended_config
from danlu.core.added_token import AddedToken
from danlu.core.errors import ModelError
from danlu.core.safetensors_format import read_header
from danlu.models.hf_config import config_values, read_config_values
from danlu.models.hf_folder import read_config, read_tensors
from danlu.models.loading import load
from danlu.models.saving import save

TOKENS = [AddedToken("<plan>", 64), AddedToken("<act>", 65, special=True, of=(3, 5))]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MODELS", str(tmp_path / "cache"))


BIASED = {"model_type": "phimoe", "num_local_experts": 3, "lm_head_bias": True}


@pytest.mark.parametrize("changes", [{"tie_word_embeddings": True}, {}, BIASED], ids=["tied", "untied", "biased"])
@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 8_000])
def test_rows_start_at_means_and_the_rest_stays(tmp_path: Path, changes: dict[str, Any], shard_bytes: int) -> None:
    model = tiny_model(**changes)
    if model.config.head_bias:
        model.head_parameters()[1].data.normal_(generator=torch.Generator().manual_seed(1))
    save(model, tmp_path / "base", shard_bytes=shard_bytes)
    base = find_base(tmp_path / "base")
    wide = extended_base(base, TOKENS)
    assert (wide.named, wide.fingerprint, wide.tokens) == (base.named, base.fingerprint, tuple(TOKENS))
    config = read_config(wide.folder)
    assert (config.vocab_size, config.vocab_padding, config.vocab_rows) == (66, 6, 72)
    own, extended = load(base.folder), load(wide.folder)
    for name, parameter in own.named_parameters():
        rows = extended.get_parameter(name)
        if name not in ("embed_tokens.weight", "lm_head.weight", "lm_head.bias"):
            assert torch.equal(rows, parameter)
            continue
        assert torch.equal(rows[:64], parameter)
        assert torch.allclose(rows[64], parameter.mean(0), atol=1e-7)
        assert torch.allclose(rows[65], (parameter[3] + parameter[5]) / 2, atol=1e-7)
        assert torch.equal(rows[66:], rows[64].expand(6, *rows.shape[1:]))
    assert (extended.lm_head is None) == ("tie_word_embeddings" in changes)
    assert torch.equal(logits(extended, TEXT)[:, :64], logits(own, TEXT))
    theirs = AutoModelForCausalLM.from_pretrained(wide.folder)
    assert torch.equal(theirs.get_input_embeddings().weight, extended.embed_tokens.weight)
    # As vLLM and SGLang read a folder: every tensor of each file.
    every = [name for file in wide.folder.glob("*.safetensors") for name in read_header(file)]
    assert len(set(every)) == len(every) and set(every) == set(read_tensors(wide.folder))
    links = [file.is_symlink() for file in wide.folder.glob("*.safetensors")]
    assert any(links) == (shard_bytes < 5_000_000_000)
    assert extended_base(base, TOKENS).folder == wide.folder


def test_padding_rows_are_in_no_logits_and_no_head(tmp_path: Path) -> None:
    model = tiny_model(vocab_size=66, vocab_padding=0)
    padded = tiny_model(vocab_size=72, vocab_padding=6)
    for name, parameter in padded.named_parameters():
        own = model.get_parameter(name)
        parameter.data.fill_(1e4)[: len(own)].copy_(own)
    assert padded.config.vocab_size == model.config.vocab_size
    assert padded.head_weight.shape == model.head_weight.shape
    assert torch.equal(logits(padded), logits(model))
    save(padded, tmp_path / "padded")
    again = load(tmp_path / "padded")
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ModelError, match="vocab_padding: 72 of 72 rows"):
        read_config_values({**config_values(padded.config, torch_dtype="float32"), "vocab_padding": 72})


def test_rows_to_spare_are_used_before_new_ones(tmp_path: Path) -> None:
    assert extended_config(tiny_config(vocab_size=128), TOKENS) == tiny_config(vocab_size=128)
    padded = replace(tiny_config(), vocab_size=64, vocab_padding=8)
    wide = extended_config(padded, TOKENS)
    assert (wide.vocab_size, wide.vocab_padding) == (66, 6)
    save(tiny_model(vocab_size=128), tmp_path / "base")
    base = find_base(tmp_path / "base")
    rows = load(extended_base(base, TOKENS).folder).embed_tokens.weight
    own = load(base.folder).embed_tokens.weight
    assert torch.allclose(rows[64], own[:64].mean(0), atol=1e-7)
    assert torch.equal(rows[66:], own[66:])
    assert not torch.equal(rows[64:66], own[64:66])


def test_a_folder_that_cannot_be_read_leaves_nothing(tmp_path: Path) -> None:
    save(tiny_model(), tmp_path / "base")
    base = find_base(tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ModelError):
        extended_base(base, TOKENS)
    assert not list((tmp_path / "cache").glob("*"))


def test_the_cache_of_a_home_that_cannot_be_written_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(module, "MODELS", str(tmp_path / "file" / "cache"))
    save(tiny_model(), tmp_path / "base")
    assert read_config(extended_base(find_base(tmp_path / "base"), TOKENS).folder).vocab_rows == 72
