from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danlu.core.layer_types import Keys
from danlu.models.attend import PackedAttention
from danlu.models.attention import Attention
from danlu.models.decoder import Decoder
from danlu.models.modules import MLP
from danlu.models.tensor_cut import OF_VOCABULARY

LENGTHS = [5, 1, 12, 7]


def packed(lengths: list[int]) -> tuple[Tensor, Tensor, PackedAttention]:
    tokens = torch.randint(0, 131, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return tokens, positions, PackedAttention((0, *torch.tensor(lengths).cumsum(0).tolist()))


@pytest.mark.parametrize("case", ["gemma2", "llama-dynamic", "mistral", "phi3-partial", "qwen3"])
def test_packed_documents_equal_documents_alone(case: str, tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model(case).double()  # products of other sizes round differently, and a kernel's order is the CPU's
    tokens, positions, attend = packed(LENGTHS)
    together = model(tokens, positions, attend, torch.float64)
    alone = [
        model(one, torch.arange(len(one)), PackedAttention((0, len(one))), torch.float64)
        for one in tokens.split(LENGTHS)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-13, rtol=1e-12)
    leaking = model(tokens, positions, PackedAttention((0, len(tokens))), torch.float64)
    assert (leaking - together).abs().max() > 1e-2


def test_packed_gradients_equal_the_sum_of_documents_alone(tiny_model: Callable[..., Decoder]) -> None:
    model = tiny_model("qwen2-windows")
    tokens, positions, attend = packed(LENGTHS)
    model.logits(model(tokens, positions, attend)).logsumexp(-1).sum().backward()
    together = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert together.keys() == dict(model.named_parameters()).keys()
    model.zero_grad()
    for one in tokens.split(LENGTHS):
        hidden = model(one, torch.arange(len(one)), PackedAttention((0, len(one))))
        model.logits(hidden).logsumexp(-1).sum().backward()
    for name, one in model.named_parameters():
        assert one.grad is not None
        torch.testing.assert_close(one.grad, together[name], atol=1e-4, rtol=1e-4, msg=name)


def test_activations_are_narrow_while_weights_and_their_gradients_are_float32(
    tiny_model: Callable[..., Decoder],
) -> None:
    model = tiny_model("gemma2")
    tokens, positions, attend = packed(LENGTHS)
    exact = model.logits(model(tokens, positions, attend))
    hidden = model(tokens, positions, attend, torch.bfloat16)
    assert hidden.dtype == torch.bfloat16
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    assert 0 < (logits - exact).abs().max() < 0.1
    logits.sum().backward()
    assert all(one.grad is not None and one.grad.dtype == torch.float32 for one in model.parameters())


def test_a_tied_head_is_one_parameter(tiny_model: Callable[..., Decoder]) -> None:
    tied, untied = tiny_model("llama-2", tie_word_embeddings=True), tiny_model("llama-2")
    assert tied.head_weight is tied.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert untied.lm_head is not None
    assert untied.head_weight is untied.lm_head.weight


def test_the_attend_strategy_is_asked_with_each_layers_own_settings(tiny_model: Callable[..., Decoder]) -> None:
    seen: list[dict[str, Any]] = []

    def attend(layer: int, q: Tensor, keys: Keys, **settings: Any) -> Tensor:
        k, v = keys.stored
        seen.append({"layer": layer, "q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape), **settings})
        return torch.zeros_like(q)

    model = tiny_model("gemma2")
    model(torch.arange(9), torch.arange(9), attend)
    common = {"q": (9, 4, 16), "k": (9, 2, 16), "v": (9, 2, 16), "scale": 12**-0.5, "softcap": 3.0, "sinks": None}
    assert [one.pop("scale") for one in seen] == [pytest.approx(common.pop("scale"))] * 3
    assert seen == [{"layer": layer, "window": window, **common} for layer, window in enumerate((6, None, 6))]


def test_every_matrix_has_a_role(tiny_model: Callable[..., Decoder]) -> None:
    def declared(module: nn.Module, prefix: str = "") -> Iterator[str]:
        if isinstance(module, (Attention, MLP)):
            yield from (f"{prefix}{name}.weight" for name in module.tensor_cut.roles)
        for name, child in module.named_children():
            yield from declared(child, f"{prefix}{name}.")

    model = tiny_model("qwen3")
    vocabulary = {f"{name}.weight" for name in OF_VOCABULARY if name != "embed_tokens_per_layer"}  # of Gemma 4 alone
    assert vocabulary | set(declared(model)) == {name for name, one in model.named_parameters() if one.dim() == 2}
