"""Products of few rows with integers as they are stored, by torch's kernels for CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from danlu.adapters.low_rank import Branch, LowRankFactors, low_rank_linears
from danlu.models.modules import Linear
from danlu.models.ops import quantized_grouped_linear
from danlu.models.packed_weights import FEW_ROWS, PackedWeights
from danlu.numerics import few_row_products
from danlu.numerics.eight_bit_weight import IntegerWeight
from danlu.numerics.few_row_products import few_row_product, one_row_product
from danlu.numerics.format import WHOLE, Format, Scaled, encode
from danlu.numerics.quantized_weight import StackedWeight
from danlu.numerics.scaled_weight import ScaledWeight

OUTPUTS, INPUTS = 32, 256
FORMATS = {
    "int8": Format("int8", (1, WHOLE), narrow_range=True),
    "int4": Format("int4", (1, 64), narrow_range=True),
    "int4 with float16 scales": Format("int4", (1, 32), "float16"),
    "int4 with zeros": Format("int4", (1, 128), zero="integer"),
}


def matrix(form: Format, seed: int = 0) -> Scaled:
    generator = torch.Generator().manual_seed(seed)
    return encode(torch.randn(OUTPUTS, INPUTS, generator=generator) + 0.5, form)


def rows(count: int) -> Tensor:
    return torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def error(y: Tensor, x: Tensor, weight: Scaled) -> float:
    wanted = x.double() @ weight.decode(torch.float64).t()
    return float((y.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_the_product_is_as_near_as_that_of_a_dequantized_matrix(name: str) -> None:
    """To float64 of the stored numbers; the control has the code of a neighbour in one column."""
    weight = matrix(FORMATS[name])
    product = few_row_product(weight)
    assert product is not None
    for count in (1, 5, FEW_ROWS):
        x = rows(count)
        dequantized = x @ weight.decode(torch.bfloat16).t()
        assert error(product.multiply(x), x, weight) < 1.5 * error(dequantized, x, weight) + 1e-3
    off = weight.codes.clone()
    off[:, 7] = off[:, 8]
    other = few_row_product(replace(weight, codes=off))
    assert other is not None and error(other.multiply(x), x, weight) > 5e-3
    copied = 0.5 * OUTPUTS * INPUTS + 4 * weight.scales.numel() if "int4" in name else 2 * OUTPUTS
    assert product.copied_bytes == copied


def test_matrices_below_each_other_have_the_outputs_of_each() -> None:
    """To the bit, which matrices in another order have not; int8 is not copied for it."""
    matrices, x = [matrix(FORMATS["int4"], seed) for seed in range(3)], rows(3)
    both, apart = few_row_product(*matrices), [few_row_product(each) for each in matrices]
    assert both is not None
    expected = torch.cat([product.multiply(x) for product in apart if product is not None], dim=1)
    assert torch.equal(both.multiply(x), expected)
    assert not torch.equal(both.multiply(x), expected.roll(OUTPUTS, 1))
    assert few_row_product(matrices[0], encode(torch.randn(OUTPUTS, INPUTS), Format("int3", (1, 64)))) is None
    assert few_row_product(matrix(FORMATS["int8"]), matrix(FORMATS["int8"], 1)) is None


@pytest.mark.skipif(not few_row_products._sums_embeddings(), reason="this CPU sums no embeddings in registers of AVX2")
@pytest.mark.parametrize("outputs", [OUTPUTS, 200])
def test_one_row_is_a_weighted_sum_of_embeddings(outputs: int) -> None:
    """In float32, rounded once: nearer to float64 than with scales in bfloat16. The control misses an input."""
    generator = torch.Generator().manual_seed(4)
    weights = [encode(torch.randn(outputs, INPUTS, generator=generator) + 0.5, FORMATS["int8"]) for _ in range(2)]
    x = rows(1) * 1e4
    product = one_row_product(*weights)
    assert product is not None
    both = torch.cat([weight.decode(torch.float64) for weight in weights])
    wanted = (x.double() @ both.t()).to(torch.bfloat16)
    assert (product.multiply(x) != wanted).sum() <= 2, "numbers between two of bfloat16"
    x[0, -1] = 0
    assert (product.multiply(x) != wanted).sum() > outputs / 4
    apart = [one_row_product(weight) for weight in weights]
    expected = torch.cat([each.multiply(x) for each in apart if each is not None], dim=1)
    assert torch.equal(product.multiply(x), expected)
    assert one_row_product(weights[0], matrix(FORMATS["int4"])) is None
    stored, few = (ScaledWeight.of(weights[0], torch.bfloat16), rows(2))
    packed, without_room = PackedWeights(product.copied_bytes), PackedWeights(2 * outputs)
    by_codes = few_row_product(weights[0])
    assert by_codes is not None and not torch.equal(by_codes.multiply(x), expected[:, :outputs])
    assert torch.equal(packed.quantized_product(x, stored), expected[:, :outputs])
    assert torch.equal(packed.quantized_product(few, stored), by_codes.multiply(few))
    assert torch.equal(without_room.quantized_product(x, stored), by_codes.multiply(x))


@pytest.mark.parametrize("name", ["int4", "int4 with zeros"])
def test_groups_of_columns_in_any_order_are_brought_together(name: str) -> None:
    """As GPTQ's act_order leaves them; the control takes columns for neighbours."""
    weight, x = matrix(FORMATS[name]), rows(5)
    groups = torch.arange(INPUTS, dtype=torch.int32) % weight.scales.shape[1]
    weight = replace(weight, groups=groups, scales=weight.scales * torch.logspace(0, 1, weight.scales.shape[1]))
    product = few_row_product(weight)
    assert product is not None
    dequantized = x @ weight.decode(torch.bfloat16).t()
    assert error(product.multiply(x), x, weight) < 1.5 * error(dequantized, x, weight) + 1e-3
    neighbours = few_row_product(replace(weight, groups=None))
    assert neighbours is not None and error(neighbours.multiply(x), x, weight) > 0.1
    assert few_row_product(weight, replace(weight, groups=groups.flip(0).contiguous())) is None, "another order of x"


def test_other_formats_and_sizes_have_no_kernel() -> None:
    uneven = torch.arange(INPUTS, dtype=torch.int32).clamp_max(3)
    for weight in (
        matrix(Format("int8", (1, 64))),
        matrix(Format("int8", (1, WHOLE), zero="integer")),
        matrix(Format("int4", (1, 16))),
        matrix(Format("int4", (2, 64))),
        matrix(Format("int3", (1, 64))),
        matrix(Format("e4m3", (1, WHOLE))),
        replace(matrix(FORMATS["int4"]), groups=uneven),
        encode(torch.randn(24, INPUTS), FORMATS["int4"]),
        encode(torch.randn(OUTPUTS, 200), FORMATS["int4"]),
    ):
        assert few_row_product(weight) is None


def test_rollouts_take_it_for_few_rows_where_there_is_room() -> None:
    weight = ScaledWeight.of(matrix(FORMATS["int4 with zeros"]), torch.bfloat16)
    own = weight.few_row_product()
    assert own is not None
    packed, without_room = PackedWeights(1 << 20), PackedWeights(own.copied_bytes - 1)
    few, many = rows(2), rows(FEW_ROWS + 1)
    dequantized = weight.product(few)
    assert torch.equal(packed.quantized_product(few, weight), own.multiply(few))
    assert not torch.equal(own.multiply(few), dequantized), "two orders of the sums would show"
    assert torch.equal(without_room.quantized_product(few, weight), dequantized)
    assert torch.equal(packed.quantized_product(many, weight), weight.product(many))
    assert torch.equal(packed.quantized_product(few.float(), weight), weight.product(few.float()))
    other = ScaledWeight.of(matrix(FORMATS["int4 with zeros"], 1), torch.bfloat16)
    both = torch.cat([own.multiply(few), other.few_row_product().multiply(few)], 1)
    assert torch.equal(packed.quantized_product(few, weight, other), both)
    assert torch.equal(torch.cat(packed.quantized_products(few, [weight, other], [None, None]), 1), both)
    of_one = PackedWeights(own.copied_bytes)  # both have no room, and the second one none behind the first
    assert torch.equal(
        of_one.quantized_product(few, weight, other), torch.cat([own.multiply(few), other.product(few)], 1)
    )
    of_one.clear_trained()  # an update leaves weights in few bits as they are
    assert torch.equal(of_one.quantized_product(few, weight), own.multiply(few))
    assert torch.equal(of_one.quantized_product(few, other), other.product(few))
    of_one.clear()
    assert torch.equal(of_one.quantized_product(few, other), other.few_row_product().multiply(few))
    rounding = IntegerWeight.of(matrix(FORMATS["int8"]), torch.bfloat16)
    assert torch.equal(packed.quantized_product(few, rounding), rounding.product(few))
    weight.share_codes()  # as FSDP shards them
    assert torch.equal(PackedWeights(1 << 20).quantized_product(few, weight), dequantized)


def test_experts_with_few_rows_are_multiplied_as_they_are_stored() -> None:
    """Each by the number of its own rows; the control has the rows of another one."""
    matrices = [ScaledWeight.of(matrix(FORMATS["int4"], seed), torch.bfloat16) for seed in range(4)]
    stack, counts = StackedWeight(matrices), torch.tensor([3, 0, FEW_ROWS + 4, 1])
    x = torch.randn(int(counts.sum()), INPUTS, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = []
    for weight, group in zip(matrices, x.split(counts.tolist()), strict=True):
        own = weight.few_row_product()
        assert own is not None
        expected.append(own.multiply(group) if len(group) <= FEW_ROWS else weight.product(group))
    packed = PackedWeights(1 << 20)
    with packed.active():
        y = quantized_grouped_linear(x, stack, counts)
    assert torch.equal(y, torch.cat(expected))
    assert not torch.equal(packed.quantized_grouped_product(x, stack, counts.flip(0)), y)
    assert not torch.equal(quantized_grouped_linear(x, stack, counts), y), "without a rollout they are dequantized"
    no_room = PackedWeights(0).quantized_grouped_product(x, stack, counts)
    assert torch.equal(no_room, quantized_grouped_linear(x, stack, counts))
    stack.share_codes()  # as FSDP shards them
    assert torch.equal(packed.quantized_grouped_product(x, stack, counts), y), "products are kept"
    assert torch.equal(PackedWeights(1 << 20).quantized_grouped_product(x, stack, counts), no_room)


@torch.no_grad()
def test_adapters_leave_a_base_of_few_rows_as_it_is_stored() -> None:
    """The product of codes, plus the low-rank one; DoRA has norms of the dense matrix."""
    weight = ScaledWeight.of(matrix(FORMATS["int4"]), torch.bfloat16)
    linear = Linear(INPUTS, OUTPUTS, bias=True)
    linear.store(weight)
    assert linear.bias is not None
    linear.bias.copy_(torch.arange(OUTPUTS))
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(shape, generator=generator) / 16 for shape in ((4, INPUTS), (OUTPUTS, 4)))
    branches = [Branch(linear, LowRankFactors(a, b, 2.0)), Branch(linear, None)]
    few, many = rows(2), rows(FEW_ROWS + 1)
    own = weight.few_row_product()
    assert own is not None
    with PackedWeights(1 << 20).active():
        adapted, plain = low_rank_linears(few, branches)
        by_many, _ = low_rank_linears(many, branches)
    base = own.multiply(few) + linear.bias.bfloat16()
    low = (few @ a.bfloat16().t()) @ (b * 2.0).bfloat16().t()
    assert torch.equal(plain, base) and torch.allclose(adapted, base + low, rtol=2**-7)
    assert not torch.allclose(adapted, base, rtol=2**-7)
    dequantized, _ = low_rank_linears(few, branches)
    assert torch.equal(by_many, low_rank_linears(many, branches)[0])
    assert not torch.equal(adapted, dequantized)
