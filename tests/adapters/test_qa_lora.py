"""QA-LoRA: PEFT's arithmetic and folder, its merge into zeros, and its parts on tensor ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.small_layers import small_decoder
from builders.tiny_adapters import adapter_set, perturb
from torch import Tensor, nn

from danlu.adapters.adapter import DenseLinear
from danlu.adapters.adapter_config import open_adapter
from danlu.adapters.dropout import Dropout, DropoutState
from danlu.adapters.peft_folder import add_adapter, write_adapter
from danlu.adapters.qa_lora import QaLora
from danlu.adapters.shapes import adapter_shapes
from danlu.core.errors import ModelError, RecipeError
from danlu.core.layer_types import LinearShard
from danlu.models.modules import Linear
from danlu.models.sites import sites_of
from danlu.numerics.format import Format, Scaled, encode
from danlu.recipe import sections

OUTPUTS, INPUTS, GROUP, RANK = 24, 128, 32, 4


def layer(group: int = GROUP) -> tuple[Linear, QaLora]:
    generator = torch.Generator().manual_seed(5)
    linear = Linear(INPUTS, OUTPUTS, bias=False)
    adapter = QaLora((OUTPUTS, INPUTS), RANK, 2.0, Dropout(0.0, "a", DropoutState(0)), group=group)
    with torch.no_grad():
        assert linear.weight is not None
        linear.weight.normal_(generator=generator)
        adapter.reset_parameters(generator)
        adapter.lora_B.normal_(std=0.3, generator=generator)
    return linear, adapter


def by_peft(x: Tensor, adapter: QaLora) -> Tensor:
    """The change that PEFT's own variant computes, without a base of gptqmodel, which alone may have it there."""
    from peft.tuners.lora.variants import QALoraLinearVariant

    module = SimpleNamespace(
        lora_A={"a": SimpleNamespace(weight=adapter.lora_A)},
        lora_B={"a": SimpleNamespace(weight=adapter.lora_B)},
        lora_dropout={"a": nn.Identity()},
        scaling={"a": adapter.scale},
        qalora_group_size={"a": adapter.group},
        in_features=x.shape[1],
        training=True,
    )
    return QALoraLinearVariant.forward(module, "a", x, torch.zeros(len(x), len(adapter.lora_B)))


def test_outputs_and_gradients_are_peft_s() -> None:
    """The control has other groups."""
    linear, adapter = layer()
    slot = small_slot(linear, adapter)
    x = torch.randn(9, INPUTS, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = slot(x, linear)
    assert torch.allclose(y, x @ linear.stored_weight.t() + by_peft(x, adapter), atol=1e-5)
    parameters = (adapter.lora_A, adapter.lora_B, x)
    got = torch.autograd.grad(y.square().sum(), parameters)
    want = torch.autograd.grad((x @ linear.stored_weight.t() + by_peft(x, adapter)).square().sum(), parameters)
    for one, right in zip(got, want, strict=True):
        assert float((one - right).norm() / right.norm()) < 1e-5
    _, other = layer(group=64)
    with torch.no_grad():
        other.lora_A.copy_(adapter.lora_A[:, ::2])
        other.lora_B.copy_(adapter.lora_B)
    assert not torch.allclose(small_slot(linear, other)(x, linear), y, atol=1e-2)


def small_slot(linear: Linear, adapter: QaLora) -> Any:
    from danlu.adapters.slot import LinearSlot

    slot = LinearSlot()
    slot["a"], slot.active = adapter, ("a",)
    linear.stored_weight.requires_grad_(False)
    return slot


def with_shifted_zeros(base: Scaled, change: Tensor) -> Scaled:
    """The matrix plus one number for each group, by the same codes and scales (arXiv:2309.14717, section 3.3)."""
    codes, zeros = base.codes, base.zeros
    if zeros is None:
        half = 2 ** (base.format.bits - 1)
        codes, zeros = (codes.to(torch.int16) + half).to(torch.uint8), torch.full_like(base.scales, half)
    form = replace(base.format, zero="float", narrow_range=False)
    return Scaled(codes, base.scales, form, zeros.float() - change / base.wide_scales())


@pytest.mark.parametrize("form", [Format("int4", (1, GROUP), zero="integer"), Format("int3", (1, GROUP))])
@torch.no_grad()
def test_it_merges_into_zeros(form: Format) -> None:
    """Exactly into zeros that are no integers; rounded to integers they are several percent off, and LoRA's change
    of single inputs does not fit at all."""
    linear, adapter = layer()
    base = encode(linear.stored_weight, form)
    merged = adapter.merged_into(DenseLinear(base.decode(), None)).weight
    change = (merged - base.decode())[:, ::GROUP]
    shifted = with_shifted_zeros(base, change)
    assert float((shifted.decode() - merged).norm() / merged.norm()) < 4e-7
    assert shifted.format.zero == "float" and torch.equal(shifted.scales, base.scales)
    assert shifted.zeros is not None
    rounded = replace(shifted, zeros=shifted.zeros.round())
    assert float((rounded.decode() - merged).norm() / merged.norm()) > 0.02


def test_ranks_with_a_part_of_the_inputs_add_up() -> None:
    """A is whole on each, and has a part of its gradient."""
    _, adapter = layer()
    x = torch.randn(5, INPUTS)
    whole = x @ adapter.factors().a.t() @ adapter.lora_B.t() * adapter.scale
    (want,) = torch.autograd.grad(whole.sum(), adapter.lora_A)
    total, gradient = torch.zeros_like(whole), torch.zeros_like(want)
    for part in (slice(0, 48), slice(48, INPUTS)):  # one group is on both
        _, own = layer()
        own.narrow(LinearShard("inputs", slice(0, OUTPUTS), part, None, first=part.start == 0))  # type: ignore[arg-type]
        y = x[:, part] @ own.factors().a.t() @ own.lora_B.t() * own.scale
        total += y.detach()
        gradient += torch.autograd.grad(y.sum(), own.lora_A)[0]
    assert torch.allclose(total, whole, atol=1e-5) and torch.allclose(gradient, want, atol=1e-4)


def test_a_folder_is_peft_s_and_is_read_again(tmp_path: Path) -> None:
    model = small_decoder(None, None, 1)
    adapters = adapter_set(model)
    section = sections.QaLora(rank=RANK, group=GROUP, targets=["q_proj", "down_proj"])
    adapters.add("default", section)
    perturb(adapters, "default")
    write_adapter(adapters, "default", tmp_path, base="base", base_fingerprint=None)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["use_qalora"], config["qalora_group_size"]) == ("LORA", True, GROUP)
    from peft import LoraConfig

    read = LoraConfig.from_pretrained(str(tmp_path))
    assert read.use_qalora and read.qalora_group_size == GROUP
    again = adapter_set(small_decoder(None, None, 1))
    add_adapter(again, "default", open_adapter(tmp_path))
    assert isinstance(again.added["default"].section, sections.QaLora)
    for name, tensor in adapters.tensors("default").items():
        assert torch.equal(again.tensors("default")[name], tensor)
    config["qalora_group_size"] = 48
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="qalora_group_size is 48, which does not divide the 128 inputs"):
        add_adapter(adapter_set(small_decoder(None, None, 1)), "default", open_adapter(tmp_path))


def test_shapes_of_the_plan_and_layers_that_do_not_fit() -> None:
    model = small_decoder(None, None, 1)
    section = sections.QaLora(rank=RANK, group=GROUP)
    (site,) = [site for site in sites_of(model.config) if site.name.endswith("down_proj")]
    shapes = {name: tensor.shape for name, tensor in adapter_shapes(site, section).items()}
    assert shapes == {"lora_A": (RANK, 384 // GROUP), "lora_B": (128, RANK)}
    with pytest.raises(RecipeError, match=r"adapter.group: 48 does not divide the 128 inputs of .*q_proj"):
        adapter_set(model).add("a", sections.QaLora(group=48))
    with pytest.raises(RecipeError, match=r"adapter.targets: .* is no linear layer of its own"):
        adapter_set(model).add("a", sections.QaLora(group=32, targets=["embed_tokens"]))
