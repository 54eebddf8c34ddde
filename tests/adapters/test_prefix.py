"""Prefixes: keys and values against their definition written out, first values, and the projection."""

from __future__ import annotations

import pytest
import torch
from builders.tiny_adapters import adapter_set, logits, perturb
from builders.tiny_run import tiny_model
from torch import Tensor

from danlu.adapters.prefix import LayerPrefix, PrefixTokens, Projection, to_peft
from danlu.models.initialize import named_generator
from danlu.recipe import sections

P, HEADS, WIDTH, HIDDEN = 3, 2, 4, 5
TOKENS = torch.tensor([64, 65, 66, 1, 2, 64, 65, 66, 3])


def made(hidden: int | None) -> tuple[PrefixTokens, LayerPrefix]:
    tokens = PrefixTokens(64, P, 32)
    projection = None if hidden is None else Projection(P, HEADS * WIDTH, hidden, device="cpu")
    layer = LayerPrefix(tokens, HEADS * WIDTH, projection, device="cpu")
    for module in (projection, layer):
        if module is not None:
            module.reset_parameters(lambda name: named_generator(0, name))
    return tokens, layer.double()


def written_out(layer: LayerPrefix) -> Tensor:
    """[P, 2, K, C]"""
    if layer.projection is None:
        return layer.embedding.weight.view(P, 2, HEADS, WIDTH)
    hidden = torch.tanh(layer.projection.embedding.weight @ layer.projection.weight.t() + layer.projection.bias)
    return (hidden @ layer.weight.t() + layer.bias).view(P, 2, HEADS, WIDTH)


@pytest.mark.parametrize("hidden", [None, HIDDEN])
def test_keys_values_and_gradients_are_those_of_the_definition(hidden: int | None) -> None:
    tokens, layer = made(hidden)
    tokens.embeddings(tokens.positions(TOKENS), torch.float64)
    torch.manual_seed(0)
    k, v = (torch.randn(len(TOKENS), HEADS, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2))
    ours = layer(k, v)
    table = written_out(layer)
    plain = [
        torch.stack(
            [table[int(token) - 64, which] if token >= 64 else own for token, own in zip(TOKENS, x, strict=True)]
        )
        for which, x in enumerate((k, v))
    ]
    wanted = [k, v, *layer.parameters()]
    assert len(wanted) == (3 if hidden is None else 7)
    found, expected = (
        torch.autograd.grad(sum((y * (index + y)).sum() for index, y in enumerate(ys)), wanted) for ys in (ours, plain)
    )
    for one, other in zip((*ours, *found), (*plain, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not found[0][:3].any() and found[0][3:5].all()  # keys that are replaced get no gradient


def test_without_its_tokens_nothing_is_replaced() -> None:
    tokens, layer = made(None)
    tokens.embeddings(tokens.positions(torch.tensor([1, 2])), torch.float64)
    k, v = torch.randn(2, HEADS, WIDTH), torch.randn(2, HEADS, WIDTH)
    assert all(one is other for one, other in zip(layer(k, v), (k, v), strict=True))


def test_first_values_are_those_of_pefts_modules() -> None:
    """N(0, 1) for the table; for a projection N(0, 1), then torch's linear layers: U(-1, 1) over the root of inputs."""
    model = tiny_model()
    adapters = adapter_set(model)
    adapters.add("plain", sections.Prefix(tokens=50))
    adapters.add("through", sections.Prefix(tokens=50, projection=9))
    plain, through = adapters.tensors("plain"), adapters.tensors("through")
    assert [tuple(tensor.shape) for tensor in plain.values()] == [(50, 32)] * 2  # keys and values of two heads of 8
    assert all(0.9 < tensor.std() < 1.1 and tensor.mean().abs() < 0.1 for tensor in plain.values())
    first = "layers.0.attention.prefix.through"
    shapes = {name: tuple(tensor.shape) for name, tensor in through.items()}
    assert {name.removeprefix(f"{first}."): shape for name, shape in shapes.items() if first in name} == {
        "projection.embedding.weight": (50, 16), "projection.weight": (9, 16), "projection.bias": (9,),
        "weight": (32, 9), "bias": (32,),
    }  # fmt: skip
    assert len(through) == 7  # the projection is there once for both layers
    assert 0.9 < through[f"{first}.projection.embedding.weight"].std() < 1.1
    for name, inputs in (("projection.weight", 16), ("projection.bias", 16), ("weight", 9), ("bias", 9)):
        assert 0.7 / inputs**0.5 < through[f"{first}.{name}"].abs().max() <= 1 / inputs**0.5
    tables = list(plain.values())
    assert not torch.equal(tables[0], tables[1])
    again = adapter_set(tiny_model())
    again.add("plain", sections.Prefix(tokens=50))
    assert all(torch.equal(one, plain[name]) for name, one in again.tensors("plain").items())


def test_a_projection_is_folded_into_a_plain_prefix() -> None:
    model = tiny_model()
    adapters = adapter_set(model)
    adapters.add("through", sections.Prefix(tokens=3, projection=4))
    adapters.train_only("through")
    perturb(adapters, "through")
    expected = logits(model, virtual_token_ids=adapters.virtual_token_ids)
    added = adapters.added["through"]
    values, tensors = to_peft(added.section, added.modules, adapters.sites)
    assert values["prefix_projection"] is False and list(tensors) == ["prompt_embeddings"]
    assert tensors["prompt_embeddings"].shape == (3, 2 * 32)
    adapters.activate()
    adapters.add("plain", sections.Prefix(tokens=3))
    for layer, table in enumerate(tensors["prompt_embeddings"].split(32, 1)):
        adapters.tensors("plain")[f"layers.{layer}.attention.prefix.plain.embedding.weight"].data.copy_(table)
    torch.testing.assert_close(
        logits(model, virtual_token_ids=adapters.virtual_token_ids), expected, rtol=1e-5, atol=1e-5
    )
