"""Formats of few bits against float64: the nearest of all numbers that an element has, ties to the even code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from danlu.numerics.format import ELEMENTS, Format, Scaled, codes_of, encode

FORMATS = [
    Format("e4m3", (1, 128)),
    Format("e4m3", (128, 128), "power-of-two"),
    Format("e5m2", (0, 0)),
    Format("e5m6", (1, 128), "power-of-two"),
    Format("e2m1", (1, 32), "e8m0", rounding="floor"),
    Format("e2m1", (1, 16), "e4m3"),
    Format("int8", (1, 0)),
    Format("int4", (1, 128), "float16", "integer"),
    Format("int4", (1, 32), zero="float"),
    Format("int4", (32, 1), "bfloat16", "offset"),
    Format("int3", (2, 24), "bfloat16"),
]
OF_BLOCKS = ("scales", "zeros", "format")
BOXES = [(slice(64, 300), slice(32, 260)), (slice(3, 7), slice(5, 16)), (slice(0, 300), slice(0, 260))]


def floats_of(exponent_bits: int, mantissa_bits: int, largest: float) -> Tensor:
    """The numbers from zero on, in float64, in the order of their codes."""
    bias = 2 ** (exponent_bits - 1) - 1
    numbers = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        power = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
        numbers.append(power * (mantissa + (2**mantissa_bits if exponent else 0)))
    return torch.tensor([each for each in numbers if each <= largest], dtype=torch.float64)


def nearest(x: Tensor, numbers: Tensor) -> Tensor:
    """The nearest of some numbers to each of x, float64; of two that are as near the one with an even place."""
    upper = torch.searchsorted(numbers, x.abs()).clamp(1, len(numbers) - 1)
    below, above = x.abs() - numbers[upper - 1], numbers[upper] - x.abs()
    takes_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return numbers[upper - 1 + takes_upper.int()].copysign(x)


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e5m6", "e2m1"])
def test_floats_round_to_the_nearest_even(element: str) -> None:
    bits = {"e4m3": (4, 3), "e5m2": (5, 2), "e5m6": (5, 6), "e2m1": (2, 1)}[element]
    numbers = floats_of(*bits, ELEMENTS[element].largest)
    middles = (numbers[1:] + numbers[:-1]) / 2
    drawn = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * numbers[-1] / 2
    x = torch.cat((numbers, middles, drawn, numbers[-1:] * 3)).float()
    x = torch.cat((x, -x))
    form = Format(element, (0, 0))  # type: ignore[arg-type]
    own = encode(torch.tensor([[numbers[-1]]]), form)  # with a scale of 1
    decoded = replace(own, codes=codes_of(x.unsqueeze(0), form)).decode(torch.float64)[0]
    wanted = nearest(x.double(), numbers)
    assert torch.equal(decoded, wanted)
    assert not torch.equal(decoded, nearest(x.double() * (1 + 2.0**-9), numbers))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_boxes_have_the_numbers_of_the_whole(form: Format) -> None:
    x = torch.randn(300, 260, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 260)
    whole = encode(x, form)
    for rows, columns in BOXES:
        box = whole.box(rows, columns)
        assert torch.equal(box.decode(), whole.decode()[rows, columns])
    uncut = whole.box(slice(0, 4), slice(240, 251))  # with the scales of other blocks, where each row has its own
    moved = replace(whole.box(slice(3, 7), slice(245, 256)), **{name: getattr(uncut, name) for name in OF_BLOCKS})
    assert torch.equal(moved.decode(), whole.decode()[3:7, 245:256]) == (form.block[0] in (0, 128))


def test_an_offset_takes_blocks_far_from_zero_or_of_one_number() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    x[:, :32] += 1000
    x[:2] = torch.tensor([0.0, 3.7])[:, None]
    encoded = encode(x, Format("int4", (1, 32), "bfloat16", "offset"))
    steps = encoded.scales.float().repeat_interleave(32, dim=1)
    # Half a step, and at the ends what the scale lost as it was rounded to 8 bits.
    assert bool(((encoded.decode() - x).abs() <= (0.5 + 15 * 2.0**-8) * steps).all())
    assert torch.equal(encoded.decode()[0], x[0]) and torch.allclose(encoded.decode()[1], x[1], rtol=2.0**-14)
    assert steps[2:, :32].max() < 0.5  # 15 of them are the width of a block, 1000 is not in it
    with_zero = encode(x, Format("int4", (1, 32), "bfloat16", "integer"))
    assert with_zero.scales[2:, 0].min() > 50  # control: 0 is among the numbers


def test_every_code_of_e4m3_is_decoded_as_torch_casts_it() -> None:
    """NaN too, of both signs; and codes that lie in memory by columns stay so."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    decoded = Scaled(codes, torch.ones(2, 1), Format("e4m3", (1, 128))).decode()
    assert torch.equal(decoded.nan_to_num(1e9), codes.float().nan_to_num(1e9)) and int(decoded.isnan().sum()) == 2
    by_columns = Scaled(codes.t(), torch.ones(1, 2), Format("e4m3", (128, 1))).decode()
    assert torch.equal(by_columns.t().nan_to_num(1e9), decoded.nan_to_num(1e9)) and by_columns.stride() == (1, 128)
