"""What soft prompts start as."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders.tiny_adapters import adapter_set
from builders.tiny_run import tiny_model
from torch import Tensor

from danlu.core.errors import RecipeError
from danlu.core.layer_types import QuantizedWeight
from danlu.models.hf_folder import read_config
from danlu.models.loading import load_into, meta_decoder
from danlu.models.saving import save
from danlu.recipe import sections

WEIGHT = "embed_tokens.adapter.one.embedding.weight"


def started(section: sections.Prompt, *, seed: int = 0, **model: object) -> tuple[Tensor, Tensor]:
    """The soft prompt, and the embedding it was made from."""
    decoder = tiny_model(**model)
    adapters = adapter_set(decoder, seed=seed)
    adapters.build_context = replace(adapters.build_context, encode=lambda text: [ord(letter) - 96 for letter in text])
    adapters.add("one", section)
    return adapters.tensors("one")[WEIGHT], decoder.embed_tokens.weight * decoder.embed_tokens.multiplier


def test_a_text_is_repeated_or_cut_to_length() -> None:
    prompt, embedding = started(sections.Prompt(tokens=5, text="abc"))
    assert torch.equal(prompt, embedding[[1, 2, 3, 1, 2]])
    prompt, embedding = started(sections.Prompt(tokens=2, text="abc"))
    assert torch.equal(prompt, embedding[[1, 2]])


def test_otherwise_words_by_seed_and_name() -> None:
    (prompt, embedding), (again, _), (other, _) = (started(sections.Prompt(tokens=6), seed=seed) for seed in (0, 0, 1))
    assert all(any(torch.equal(row, word) for word in embedding) for row in prompt)
    assert torch.equal(prompt, again) and not torch.equal(prompt, other)
    assert len({tuple(row.tolist()) for row in prompt}) > 3


def test_gemmas_multiplier_is_in_the_prompt() -> None:
    """So that the prompt is what the first layer sees, as in PEFT."""
    prompt, embedding = started(sections.Prompt(tokens=3, text="abc"), model_type="gemma2", head_dim=8)
    assert torch.equal(prompt, embedding[1:4])
    model = tiny_model(model_type="gemma2", head_dim=8)
    adapters = adapter_set(model)
    adapters.add("one", sections.Prompt(tokens=3))
    tokens = torch.tensor(adapters.virtual_token_ids)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        found = model.embed_tokens(tokens, dtype)
        torch.testing.assert_close(found.float(), adapters.tensors("one")[WEIGHT].detach(), rtol=tolerance, atol=0)


def no_packed_weight(*_: object) -> QuantizedWeight:
    raise AssertionError("this model has none")


def test_it_waits_for_the_weights(tmp_path: Path) -> None:
    save(tiny_model(), tmp_path / "base")
    empty = meta_decoder(read_config(tmp_path / "base"))
    adapters = adapter_set(empty)
    adapters.add("one", sections.Prompt(tokens=3))
    load_into(empty, tmp_path / "base", take=lambda _, value: value, unpack=no_packed_weight)
    adapters.finish_loading()
    prompt = adapters.tensors("one")[WEIGHT].detach().clone()
    assert torch.equal(prompt, started(sections.Prompt(tokens=3))[0])
    adapters.tensors("one")[WEIGHT].data += 1
    adapters.finish_loading()  # a second time it is left alone
    assert torch.equal(adapters.tensors("one")[WEIGHT], prompt + 1)


def test_a_text_of_nothing_is_said() -> None:
    with pytest.raises(RecipeError, match="adapter.text: '' is not a single token"):
        started(sections.Prompt(text=""))
