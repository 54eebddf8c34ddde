"""Every kind of adapter upon every kind of attention: drawn with a cache, in full passes, and merged into weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.parallel_steps import LINEAR_ATTENTION
from builders.rollout_requests import requests, slowly
from builders.tiny_adapters import adapter_set, logits, perturb, wide_logits, widen
from builders.tiny_run import tiny_model

from danlu.adapters.merge import UNMERGEABLE_KINDS, merge_weights
from danlu.core.errors import ModelError, RecipeError
from danlu.inference.embedded import EmbeddedEngine
from danlu.models.decoder import Decoder
from danlu.recipe import sections

ATTENTION = ("window", "softcap", "sinks", "latent", "factorized", "key-reuse", "linear", "experts")
ADAPTERS: dict[str, Any] = {
    "lora": sections.Lora(rank=2),
    "dora": sections.Dora(rank=2),
    "vera": sections.Vera(rank=8),
    "mora": sections.Mora(rank=2),
    "ia3": sections.Ia3(),
    "bottleneck": sections.Bottleneck(width=4),
    "prefix": sections.Prefix(tokens=3),
    "prompt": sections.Prompt(tokens=3),
}
NO_HEADS = "a prefix takes the place of keys and values of heads, which this model's latent or factorized attention has"
REFUSED = {
    ("prefix", "latent"): NO_HEADS,
    ("prefix", "factorized"): NO_HEADS,
    ("prefix", "key-reuse"): NO_HEADS,
    ("prefix", "linear"): "which this model's linear attention do not keep",
    ("ia3", "latent"): "'k_proj' matches no layer of this model",
    ("ia3", "key-reuse"): "'v_proj' matches no layer of this model",
}
PAIRS = [(adapter, attention) for adapter in ADAPTERS for attention in ATTENTION]


def decoder_of(small_decoder: Any, attention: str) -> Decoder:
    model = tiny_model(**LINEAR_ATTENTION["model"]["config"]) if attention == "linear" else small_decoder(attention)
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("adapter", "attention"),
    fast([pair for pair in PAIRS if pair not in REFUSED], *[pair for pair in PAIRS if pair not in REFUSED][::2]),
)
def test_an_adapter_upon_an_attention(small_decoder: Any, adapter: str, attention: str) -> None:
    model, (request,) = decoder_of(small_decoder, attention), requests(count=3, prompts=[(11, 12, 13, 14)])
    base = logits(model)
    adapters = adapter_set(model)
    adapters.add("own", ADAPTERS[adapter])
    perturb(adapters, "own")
    virtual = adapters.virtual_token_ids
    (completion,) = EmbeddedEngine(model, virtual_token_ids=virtual).generate([request])
    tokens, logprobs = slowly(model, request, 0, virtual, guess=completion.tokens)
    assert completion.tokens == tokens
    torch.testing.assert_close(completion.logprobs, logprobs, atol=5e-5, rtol=5e-5)
    apart = logits(model, virtual_token_ids=virtual)
    assert (apart - base).abs().max() > 1e-2  # the control
    if adapter in UNMERGEABLE_KINDS:
        with pytest.raises(ModelError, match="cannot be merged"):
            merge_weights(adapters)
    else:
        model.double()  # where sums in another order make no difference to see
        widen(adapters)
        apart = wide_logits(model)
        merge_weights(adapters)
        torch.testing.assert_close(wide_logits(model), apart, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("adapter", "attention"), REFUSED)
def test_an_adapter_that_an_attention_has_no_place_for(small_decoder: Any, adapter: str, attention: str) -> None:
    with pytest.raises(RecipeError, match=REFUSED[adapter, attention]):
        adapter_set(decoder_of(small_decoder, attention)).add("own", ADAPTERS[adapter])


@pytest.mark.parametrize("attention", ["window", "latent", "linear"])
def test_an_engine_draws_with_the_adapters_that_are_active_now(small_decoder: Any, attention: str) -> None:
    """What an engine keeps of one call (graphs, absorbed matrices, cached beginnings) is nothing to the next."""
    model, (request,) = decoder_of(small_decoder, attention), requests(count=4, prompts=[(11, 12, 13, 14)])
    adapters, engine = adapter_set(model), EmbeddedEngine(model)
    for name in ("one", "two"):
        adapters.add(name, sections.Lora(rank=2))
        perturb(adapters, name, seed=len(name) + ord(name[0]))
    drawn = []
    for version, active in enumerate([("one",), ("two",), (), ("one", "two"), ("one",)]):
        adapters.activate(*active)
        engine.update(version)
        (completion,) = engine.generate([replace(request, number=version)])
        tokens, logprobs = slowly(model, request, guess=completion.tokens)
        assert completion.tokens == tokens, active
        torch.testing.assert_close(completion.logprobs, logprobs, atol=5e-5, rtol=5e-5)
        drawn.append(logprobs)
    assert drawn[0] == drawn[4] and len({tuple(each) for each in drawn}) == 4  # the control
