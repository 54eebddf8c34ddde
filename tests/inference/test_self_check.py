"""The check of exact numerics at the start: silent where they hold, and else the name of what breaks them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders.covering import fast
from builders.tiny_adapters import adapter_set, perturb
from torch import Tensor

from danlu.core.errors import ResourceError
from danlu.inference import exact_paged, self_check
from danlu.inference.paged import PagedAttention
from danlu.inference.self_check import check_exact, variant_operation
from danlu.models.decoder import Decoder
from danlu.models.initialize import initialize
from danlu.models.rope_config import DynamicScaling
from danlu.recipe import sections

KINDS = ("llama", "window", "softcap", "qk-norm", "sinks", "latent", "factorized", "key-reuse", "experts")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    fast(
        itertools.product(KINDS, [torch.float32, torch.bfloat16]),
        *((kind, torch.float32) for kind in KINDS),
        ("softcap", torch.bfloat16),
        ("experts", torch.bfloat16),
    ),
    ids=str,
)
def test_it_is_silent_where_they_hold(small_decoder: Any, kind: str, dtype: torch.dtype) -> None:
    check_exact(small_decoder(kind), dtype)


def test_it_is_silent_where_the_context_is_short(small_decoder: Any) -> None:
    check_exact(small_decoder(context=40), torch.float32)


@pytest.mark.parametrize("section", [sections.Lora(rank=4), sections.Prefix(tokens=3)])
def test_adapters_are_part_of_it(small_decoder: Any, section: Any) -> None:
    model = small_decoder()
    adapters = adapter_set(model)
    adapters.add("one", section)
    perturb(adapters, "one")
    check_exact(model, torch.float32, virtual_token_ids=adapters.virtual_token_ids)


def plain_product(x: Tensor, weight: Tensor) -> Tensor:
    """One product of all rows, by the variant that is not overridden."""
    return torch.mm(x, weight.t(), out=torch.empty(len(x), len(weight)))


def test_a_product_that_hangs_on_the_number_of_rows_is_named(small_decoder: Any) -> None:
    model: Decoder = small_decoder()
    broken = model.get_submodule("layers.1.mlp.down_proj")
    broken.forward = lambda x, recomputed=None: plain_product(x, broken.weight)  # type: ignore[assignment]
    with pytest.raises(ResourceError) as error:
        check_exact(model, torch.float32)
    message = str(error.value)
    assert message.startswith("numerics: exact does not hold for this model on cpu, with torch ")
    assert "layers.1.mlp.down_proj, product [T, 48] x [48, 32]: other bits in " in message
    assert message.endswith("Use numerics: fast")


def test_an_adapters_product_is_found_at_what_it_makes(small_decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Decoder = small_decoder()
    adapters = adapter_set(model)
    adapters.add("one", sections.Lora(rank=4, targets=["q_proj"]))
    perturb(adapters, "one")
    calls = 0
    plain = F.linear

    def sometimes(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        nonlocal calls
        calls += 1
        return plain(x, weight, bias) * (1 + 2.0**-20 * (len(x) == 1))

    monkeypatch.setattr("danlu.adapters.low_rank.F.linear", sometimes)
    found = variant_operation(model, torch.float32)
    assert calls > 0
    assert found == (
        "layers.0.attention: its queries (projection, adapter, norm or rotation): other bits in prompts read in chunks "
        "than in training"
    )


def test_attention_by_other_kernels_is_named(small_decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "ExactPagedAttention", PagedAttention)
    found = variant_operation(small_decoder(), torch.float32)
    assert found == "layers.0.attention: attention over cached keys: other bits in a prompt's pass than in training"
    assert exact_paged.ExactPagedAttention is not PagedAttention


def test_another_softmax_of_the_sampler_is_named(small_decoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def whole_rows(logits: Tensor, targets: Tensor, *, temperature: float, slice_rows: int) -> Tensor:
        return (logits / temperature).log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)

    monkeypatch.setattr(self_check, "logprobs_of_logits", whole_rows)
    found = variant_operation(small_decoder(), torch.float32)
    assert found is not None
    assert found.startswith("the head, product [T, 32] x [32, 61], or its log-probabilities: other bits in a prompt")


def test_frequencies_that_follow_the_length_are_refused(small_decoder: Any) -> None:
    found = variant_operation(small_decoder(rope_scaling=DynamicScaling(2.0)), torch.float32)
    assert found is not None and "dynamic rotary scaling" in found


def test_a_fingerprint_sees_a_single_bit() -> None:
    rows = torch.randn(3, 40)
    other = rows.clone()
    other[1, 17] = torch.nextafter(other[1, 17], torch.tensor(9.0))
    assert self_check._bits(rows).eq(self_check._bits(other)).tolist() == [True, False, True]
    assert self_check._bits(rows.bfloat16()).eq(self_check._bits(rows.bfloat16() * 1.0)).all()


def test_rows_of_experts_are_not_rows_of_tokens(small_decoder: Any) -> None:
    """With one expert for each token there are as many of both, but in another order."""
    config = small_decoder("experts").config
    one_each = Decoder(config.with_layers(lambda layer: replace(layer, feed=replace(layer.feed, top_k=1))))
    initialize(one_each, 0)
    assert variant_operation(one_each, torch.float32) is None
