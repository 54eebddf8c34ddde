"""(IA)^3 against autograd over its definition written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from builders.tiny_adapters import adapter_set
from builders.tiny_run import tiny_model
from torch import Tensor

from danlu.adapters.adapter import DenseLinear
from danlu.adapters.dropout import Dropout, DropoutState
from danlu.adapters.ia3 import Ia3
from danlu.adapters.lora import LowRank
from danlu.adapters.slot import LinearSlot
from danlu.core.errors import RecipeError
from danlu.core.layer_types import Recomputed
from danlu.models import ops
from danlu.models.modules import Linear
from danlu.recipe import sections

TOKENS, INPUTS, OUTPUTS = 7, 10, 6


def base() -> Linear:
    torch.manual_seed(0)
    linear = Linear(INPUTS, OUTPUTS, bias=True).double()
    torch.nn.init.normal_(linear.weight)
    torch.nn.init.normal_(linear.bias)
    return linear.requires_grad_(False)


def ia3(*, of_inputs: bool) -> Ia3:
    module = Ia3((OUTPUTS, INPUTS), of_inputs=of_inputs).double()
    assert (module.ia3_l == 1).all() and len(module.ia3_l) == (INPUTS if of_inputs else OUTPUTS)
    torch.manual_seed(1)
    module.ia3_l.data += torch.randn_like(module.ia3_l)
    return module


def slot_of(linear: Linear, **modules: torch.nn.Module) -> LinearSlot:
    slot = LinearSlot()
    slot.update(modules)
    slot.active = tuple(modules)
    linear.adapter = slot
    return slot


def written_out(module: Ia3, x: Tensor, linear: Linear) -> Tensor:
    if module.of_inputs:
        return F.linear(x * module.ia3_l, linear.weight, linear.bias)
    return module.ia3_l * F.linear(x, linear.weight, linear.bias)


def gradients(y: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(9)
    return torch.autograd.grad((y * torch.randn_like(y)).sum(), wanted, retain_graph=True)


@pytest.mark.parametrize("of_inputs", [False, True])
def test_outputs_and_gradients_are_those_of_the_definition(of_inputs: bool) -> None:
    linear, module = base(), ia3(of_inputs=of_inputs)
    slot_of(linear, one=module)
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    ours, plain = linear(x), written_out(module, x, linear)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    for one, other in zip(gradients(ours, x, module.ia3_l), gradients(plain, x, module.ia3_l), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(ours, linear.base(x), rtol=1e-2)


@pytest.mark.parametrize("of_inputs", [False, True])
def test_merged_is_unmerged_with_the_bias(of_inputs: bool) -> None:
    linear, module = base(), ia3(of_inputs=of_inputs)
    merged = module.merged_into(DenseLinear(linear.weight, linear.bias))
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64)
    torch.testing.assert_close(F.linear(x, merged.weight, merged.bias), written_out(module, x, linear))
    assert torch.equal(merged.bias, linear.bias) == of_inputs


def test_what_rescales_inputs_does_so_for_all_that_lies_below_it() -> None:
    """LoRA, then inputs rescaled, then LoRA, then outputs rescaled; merged in the same order."""
    linear = base()
    dropout = Dropout(0, "", DropoutState(0))
    low, high = (LowRank((OUTPUTS, INPUTS), 2, 0.7, dropout).double() for _ in range(2))
    for module in (low, high):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
    inner, outer = ia3(of_inputs=True), ia3(of_inputs=False)
    x = torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True)
    slot = slot_of(linear, a=low, b=inner, c=high, d=outer)
    scaled = x * inner.ia3_l
    y = F.linear(scaled, linear.weight, linear.bias) + 0.7 * F.linear(F.linear(scaled, low.lora_A), low.lora_B)
    y = y + 0.7 * F.linear(F.linear(x, high.lora_A), high.lora_B)
    plain = y * outer.ia3_l
    wanted = (x, low.lora_A, inner.ia3_l, high.lora_A, high.lora_B, outer.ia3_l)
    for again in (None, Recomputed(lambda half: half * 2, (x.detach() / 2,))):
        ours = linear(x, again)
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
        for one, other in zip(gradients(ours, *wanted), gradients(plain, *wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    merged = slot.merged_into(DenseLinear(linear.weight, linear.bias))
    torch.testing.assert_close(F.linear(x, merged.weight, merged.bias), plain, rtol=1e-12, atol=1e-12)
    slot.active = ("b", "a", "c", "d")  # the negative control: the order matters
    assert not torch.allclose(linear(x), plain, rtol=1e-3)


def test_an_input_that_can_be_made_again_is_not_kept() -> None:
    linear, module = base(), ia3(of_inputs=True)
    slot_of(linear, one=module)
    gate, up = (torch.randn(TOKENS, INPUTS, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inner = ops.gated_mlp_activation(gate, up, "silu")
    again = Recomputed(lambda gate, up: ops.gated_mlp_activation(gate, up, "silu"), (gate, up))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours = linear(inner, again)
    known = {tensor.untyped_storage().data_ptr() for tensor in (gate, up, linear.weight, module.ia3_l)}
    assert all(tensor.untyped_storage().data_ptr() in known for tensor in kept)
    wanted = (gate, up, module.ia3_l)
    plain = written_out(module, inner, linear)
    for one, other in zip(gradients(ours, *wanted), gradients(plain, *wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_in_bfloat16_a_vector_near_one_still_counts() -> None:
    """bfloat16 has no number between 1 and 1 + 1/128: rounded first, the vector would do nothing."""
    module = Ia3((OUTPUTS, INPUTS), of_inputs=False)
    module.ia3_l.data.fill_(1 + 1 / 300)
    assert (module.ia3_l.bfloat16() == 1).all()
    y = torch.full((1, OUTPUTS), 255 / 128, dtype=torch.bfloat16)
    scaled = module.adapt_output(y, y, base())
    assert scaled.dtype == torch.bfloat16 and (scaled == 2).all()  # 1.9988, where numbers are 1/128 apart


def test_parts_of_a_fused_layer_share_what_rescales_their_inputs() -> None:
    adapters = adapter_set(tiny_model(model_type="phi3", pad_token_id=0))
    adapters.add("one", sections.Ia3(targets=["mlp"], feedforward=["gate_proj", "up_proj"]))
    modules = adapters.added["one"].modules
    assert modules["layers.0.mlp.gate_proj"].ia3_l is modules["layers.0.mlp.up_proj"].ia3_l
    assert len(modules["layers.0.mlp.down_proj"].ia3_l) == 32  # outputs: it is not in feedforward here
    with pytest.raises(RecipeError, match=r"adapter.feedforward: model.layers.0.mlp.gate_up_proj is one layer"):
        adapters.add("two", sections.Ia3(targets=["up_proj"], feedforward=["up_proj"]))
