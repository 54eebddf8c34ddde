from __future__ import annotations

from types import ModuleType

import pytest
import torch

from danlu.numerics import four_bit
from danlu.numerics.bitsandbytes_config import KINDS, Kind


@pytest.fixture(scope="module")
def functional() -> ModuleType:
    import bitsandbytes.functional  # seconds: not when tests are collected

    return bitsandbytes.functional


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_bitsandbytes(functional: ModuleType, kind: Kind) -> None:
    assert torch.equal(four_bit.codebook(kind), functional.get_4bit_type(kind, device="cpu"))
    assert torch.equal(four_bit.dynamic_map(), functional.create_dynamic_map())


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_is_two_codes_the_first_in_the_high_half(kind: Kind) -> None:
    table = four_bit.pairs(kind).view(torch.float32).view(256, 2)
    values = four_bit.codebook(kind)
    for byte in (0x00, 0x1E, 0xE1, 0xFF):
        assert table[byte].tolist() == [values[byte >> 4], values[byte & 15]]
    assert table[0x1E].tolist() != table[0xE1].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_order_sorts_the_values(kind: Kind) -> None:
    order = four_bit.order(kind)
    places = torch.arange(16) if order is None else order.int()
    assert sorted(places.tolist()) == list(range(16))
    assert (four_bit.codebook(kind)[places].diff() >= 0).all()


def test_steps_go_to_the_nearest_of_the_map_but_for_their_own_width() -> None:
    values, codes = four_bit.dynamic_map(), four_bit.dynamic_codes()
    steps = torch.linspace(-1, 1, 65536, dtype=torch.float64)
    nearest = (steps[::97, None] - values.double()).abs().min(dim=1).values
    chosen = (steps[::97] - values.double()[codes[::97].int()]).abs()
    assert torch.allclose(chosen, nearest, rtol=0, atol=2 / 65535)
    assert codes[0] == 0 and codes[-1] == 255 and (codes.int().diff() >= 0).all()
