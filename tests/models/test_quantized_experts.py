"""Grouped products with quantized weights: the bits of dense ones, one expert at a time, and nothing kept of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from builders.scaled_formats import FORMATS
from torch import Tensor

from danlu.models.modules import GroupedLinear, Linear
from danlu.models.ops import grouped_linear, quantized_grouped_linear
from danlu.numerics import quantized_weight
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.numerics.quantized_weight import StackedWeight
from danlu.numerics.scaled_weight import ScaledWeight

KINDS: dict[str, Any] = {
    "nf4": FourBitWeight.quantize,
    "fp4": partial(FourBitWeight.quantize, kind="fp4", block=32, double=False),
    "int8": partial(ScaledWeight.quantize, form=FORMATS["int8"]),
    "int3": partial(ScaledWeight.quantize, form=FORMATS["int3"]),
    "nvfp4": partial(ScaledWeight.quantize, form=FORMATS["nvfp4"]),
}
COUNTS = torch.tensor([0, 5, 33, 0, 40, 1])
OUTPUTS, INPUTS = 24, 80


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stacked(kind: str = "nf4") -> StackedWeight:
    return StackedWeight([KINDS[kind](matrix) for matrix in drawn(len(COUNTS), OUTPUTS, INPUTS).bfloat16()])


def layers(weight: StackedWeight, *, bias: bool = False) -> GroupedLinear:
    module = GroupedLinear(weight.count, INPUTS, OUTPUTS, bias=bias)
    module.store(weight)
    if module.bias is not None:
        module.bias.data = drawn(len(COUNTS), OUTPUTS, seed=3)
    return module


def value_and_gradient(product: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    x = rows.clone().requires_grad_()
    y = product(x)
    y.backward(drawn(*y.shape, seed=2).to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_gradients_are_those_of_dense_weights_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    weight, rows = stacked(kind), drawn(int(COUNTS.sum()), INPUTS, seed=1).to(dtype)
    dense = weight.dense(dtype)
    ours = value_and_gradient(lambda x: layers(weight)(x, COUNTS), rows)
    theirs = value_and_gradient(lambda x: grouped_linear(x, dense, COUNTS), rows)
    others = value_and_gradient(lambda x: grouped_linear(x, dense.roll(1, 0), COUNTS), rows)  # control
    for one, same, other in zip(ours, theirs, others, strict=True):
        assert one.dtype == dtype and torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_is_a_linear_layer_with_the_same_codes(kind: str) -> None:
    weight, rows = stacked(kind), drawn(int(COUNTS.sum()), INPUTS, seed=1)
    experts = layers(weight, bias=True)
    assert experts.bias is not None
    seen = value_and_gradient(lambda x: experts(x, COUNTS), rows)
    linears = [Linear(INPUTS, OUTPUTS, bias=True) for _ in COUNTS]
    for index, (linear, matrix) in enumerate(zip(linears, drawn(len(COUNTS), OUTPUTS, INPUTS).bfloat16(), strict=True)):
        linear.store(KINDS[kind](matrix))
        assert linear.bias is not None
        linear.bias.data = experts.bias.data[index]

    def one_by_one(x: Tensor) -> Tensor:
        return torch.cat([linear(own) for linear, own in zip(linears, x.split(COUNTS.tolist()), strict=True)])

    for one, other in zip(seen, value_and_gradient(one_by_one, rows), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    linears.reverse()
    assert not torch.allclose(seen[0], one_by_one(rows), atol=0.1)


def test_nothing_dense_is_kept_for_the_backward_pass() -> None:
    weight, rows = stacked(), drawn(int(COUNTS.sum()), INPUTS, seed=1)
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        quantized_grouped_linear(rows.requires_grad_(), weight, COUNTS)
        assert sizes == [len(COUNTS)]
        grouped_linear(rows, weight.dense(torch.float32), COUNTS)  # control: this one keeps rows and weights
        assert sum(sizes[1:]) >= rows.numel() + len(COUNTS) * OUTPUTS * INPUTS


def test_experts_without_rows_are_not_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Tensor] = []
    write = FourBitWeight.write

    def watched(self: FourBitWeight, out: Tensor) -> None:
        written.append(self.absmax)
        write(self, out)

    weight = stacked()
    monkeypatch.setattr(FourBitWeight, "write", watched)
    quantized_weight._spare.clear()
    value_and_gradient(lambda x: layers(weight)(x, COUNTS), drawn(int(COUNTS.sum()), INPUTS, seed=1))
    with_rows = [index for index, count in enumerate(COUNTS.tolist()) if count]
    assert len(written) == 2 * len(with_rows)  # forward, and once more backward
    assert all(torch.equal(one, weight.absmax[index]) for one, index in zip(written, with_rows * 2, strict=True))
    assert quantized_weight.dense_workspace_bytes() == 4 * OUTPUTS * INPUTS  # one expert at a time


def test_rows_on_a_device_that_knows_the_counts_alone_take_all_experts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for a GPU: reading a count there raises."""
    weight = stacked().to("meta")
    rows = torch.empty(int(COUNTS.sum()), INPUTS, device="meta", dtype=torch.bfloat16)
    seen: list[torch.Size] = []

    def product(x: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
        seen.append(matrices.shape)
        return x.new_empty(len(x), matrices.shape[2])

    monkeypatch.setattr(F, "grouped_mm", product)
    monkeypatch.setattr(StackedWeight, "matrix", None)
    y = quantized_grouped_linear(rows.requires_grad_(), weight, COUNTS.to("meta"))
    y.sum().backward()
    assert seen == [(len(COUNTS), INPUTS, OUTPUTS), (len(COUNTS), OUTPUTS, INPUTS)]
