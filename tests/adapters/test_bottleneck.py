"""Bottleneck adapters against autograd over their definition written out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from builders.tiny_adapters import adapter_set, hidden_states, logits, perturb
from builders.tiny_run import tiny_model
from torch import Tensor

from danlu.adapters.adapter_config import open_adapter
from danlu.adapters.bottleneck import Activation, Bottleneck
from danlu.adapters.peft_folder import add_adapter, write_adapter
from danlu.recipe import sections

ACTIVATIONS = {"gelu": F.gelu, "relu": torch.relu, "silu": lambda x: x * torch.sigmoid(x)}


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
def test_outputs_and_gradients_are_those_of_the_definition(activation: Activation) -> None:
    module = Bottleneck(10, 4, activation)
    module.reset_parameters(torch.Generator().manual_seed(0))
    module = module.double()
    x = torch.randn(7, 10, dtype=torch.float64, requires_grad=True)
    assert torch.equal(module(x), x)
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data += torch.randn_like(parameter)
    inner = ACTIVATIONS[activation](x @ module.down_weight.t() + module.down_bias)
    plain = x + inner @ module.up_weight.t() + module.up_bias
    torch.testing.assert_close(module(x), plain, rtol=1e-12, atol=1e-12)
    wanted = [x, *module.parameters()]
    for one, other in zip(
        torch.autograd.grad(module(x).square().sum(), wanted),
        torch.autograd.grad(plain.square().sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_each_sits_behind_the_branch_it_is_named_for() -> None:
    """What is added to the residual stream after attention and MLP is what the module makes of them."""
    model = tiny_model()
    adapters = adapter_set(model)
    adapters.add("one", sections.Bottleneck(width=4))
    adapters.train_only("one")
    perturb(adapters, "one")
    modules = adapters.added["one"].modules
    assert list(modules) == [f"layers.{layer}.{slot}" for layer in "01" for slot in ("after_attention", "after_mlp")]
    layer, seen = model.layers["0"], {}

    def note(name: str) -> object:
        return lambda module, inputs, output: seen.update({name: (inputs[0], output)})

    for name in ("attention", "mlp"):
        layer.get_submodule(name).register_forward_hook(note(name))
    layer.mlp_norm.register_forward_hook(note("between"))
    layer.register_forward_hook(note("whole"))
    hidden_states(model)
    after_attention, after_mlp = (modules[f"layers.0.after_{one}"] for one in ("attention", "mlp"))
    between = seen["whole"][0] + after_attention(seen["attention"][1])
    torch.testing.assert_close(seen["between"][0], between)
    torch.testing.assert_close(seen["whole"][1], between + after_mlp(seen["mlp"][1]))


def test_layers_of_experts_have_the_places_of_other_layers(tmp_path: Path) -> None:
    """Those of experts are named one deeper than others: what sits behind a half does not."""
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    made = []
    for changes in ({}, mixture):
        model = tiny_model(**changes)
        adapters = adapter_set(model)
        adapters.add("one", sections.Bottleneck(width=4))
        before = logits(model)
        perturb(adapters, "one")
        made.append(list(adapters.added["one"].modules))
        assert not torch.allclose(logits(model), before, atol=1e-2)
    assert made[0] == made[1]
    write_adapter(adapters, "one", tmp_path, base="base", base_fingerprint=None)
    again = tiny_model(**mixture)
    fresh = adapter_set(again, seed=9)
    add_adapter(fresh, "back", open_adapter(tmp_path))
    assert torch.equal(logits(again), logits(model))


def test_pfeiffer_leaves_attention_alone() -> None:
    adapters = adapter_set(tiny_model())
    adapters.add("one", sections.Bottleneck(placement="pfeiffer"))
    assert list(adapters.added["one"].modules) == ["layers.0.after_mlp", "layers.1.after_mlp"]


def test_several_go_through_each_other_and_are_switched() -> None:
    model = tiny_model()
    base = logits(model)
    adapters = adapter_set(model)
    alone: dict[str, Tensor] = {}
    for name in ("one", "three"):
        adapters.add(name, sections.Bottleneck(width=4, placement="pfeiffer" if name == "one" else "houlsby"))
        adapters.train_only(name)
        perturb(adapters, name, seed=len(name))
        adapters.activate(name)
        alone[name] = logits(model)
    adapters.activate("one", "three")
    both = logits(model)
    adapters.activate("three", "one")
    assert not torch.allclose(logits(model), both, rtol=1e-3)  # which comes first matters
    adapters.activate("three")
    assert torch.equal(logits(model), alone["three"]) and not torch.equal(alone["one"], alone["three"])
    adapters.activate()
    assert torch.equal(logits(model), base)


def test_first_values_depend_on_seed_and_place() -> None:
    found = []
    for seed in (0, 0, 1):
        adapters = adapter_set(tiny_model(), seed=seed)
        adapters.add("one", sections.Bottleneck(width=4))
        found.append(adapters.tensors("one"))
    name = "layers.1.after_mlp.one.down_weight"
    assert torch.equal(found[0][name], found[1][name]) and not torch.equal(found[0][name], found[2][name])
    assert not torch.equal(found[0][name], found[0]["layers.0.after_mlp.one.down_weight"])
    assert found[0][name].abs().max() <= 1 / 32**0.5
