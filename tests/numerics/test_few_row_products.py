"""Products of few rows with integers as they are stored, by torch's kernels for CPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from danlu.models.packed_weights import FEW_ROWS, PackedWeights
from danlu.numerics.eight_bit_weight import IntegerWeight
from danlu.numerics.few_row_products import few_row_product
from danlu.numerics.format import WHOLE, Format, Scaled, encode
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


def test_other_formats_and_sizes_have_no_kernel() -> None:
    columns = torch.arange(INPUTS, dtype=torch.int32) % 4
    for weight in (
        matrix(Format("int8", (1, 64))),
        matrix(Format("int8", (1, WHOLE), zero="integer")),
        matrix(Format("int4", (1, 16))),
        matrix(Format("int4", (2, 64))),
        matrix(Format("int3", (1, 64))),
        matrix(Format("e4m3", (1, WHOLE))),
        replace(matrix(FORMATS["int4"]), groups=columns),
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
    rounding = IntegerWeight.of(matrix(FORMATS["int8"]), torch.bfloat16)
    assert torch.equal(packed.quantized_product(few, rounding), rounding.product(few))
    weight.share_codes()  # as FSDP shards them
    assert torch.equal(PackedWeights(1 << 20).quantized_product(few, weight), dequantized)
