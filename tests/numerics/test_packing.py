"""Codes in bytes and in the orders of other tools' files, against a plain loop over bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from danlu.numerics.packing import (
    pack,
    pack_awq,
    pack_gptq_zeros,
    pack_int32,
    packed_width,
    unpack,
    unpack_awq,
    unpack_gptq_zeros,
    unpack_int32,
)

COUNTS = [1, 7, 8, 32, 45, 129]


def drawn(*shape: int, bits: int) -> Tensor:
    return torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)


def run_of_bits(codes: Tensor, bits: int) -> np.ndarray:
    """[R, C] -> the bits of each row, the lowest of the first code first, in whole bytes."""
    run = (codes.numpy()[..., None] >> np.arange(bits)) & 1
    return np.packbits(run.reshape(len(codes), -1), axis=1, bitorder="little")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_a_row_is_one_run_of_bits(bits: int, count: int) -> None:
    codes = drawn(5, count, bits=bits)
    packed = pack(codes, bits)
    assert packed.shape == (5, packed_width(count, bits)) and np.array_equal(packed.numpy(), run_of_bits(codes, bits))
    assert torch.equal(unpack(packed, bits, count), codes)
    assert torch.equal(unpack(pack(codes[None], bits), bits, count)[0], codes)
    assert not torch.equal(unpack(packed.flip(0), bits, count), codes)
    words = pack_int32(codes, bits)
    whole = np.zeros((5, words.shape[1] * 4), np.uint8)
    whole[:, : packed.shape[1]] = packed
    assert np.array_equal(words.numpy(), whole.view("<i4")) and words.shape[1] == -(-count * bits // 32)
    assert torch.equal(unpack_int32(words, bits, count), codes)
    one_row = codes[:1].t().contiguous().t()  # contiguous, with a stride of 1 between rows
    assert torch.equal(pack_int32(one_row, bits), words[:1])


def test_awq_has_even_outputs_first() -> None:
    codes = torch.arange(16, dtype=torch.uint8).expand(2, 16).contiguous()
    words = pack_awq(codes)
    assert [f"{int(word) & 0xFFFFFFFF:08x}" for word in words[0]] == ["75316420", "fdb9eca8"]
    random = drawn(3, 64, bits=4)
    assert torch.equal(unpack_awq(pack_awq(random)), random)
    assert not torch.equal(unpack_int32(pack_awq(random), 4, 64), random)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_zeros_of_gptq_are_stored_less_one(bits: int) -> None:
    zeros = drawn(3, 64, bits=bits)
    stored = pack_gptq_zeros(zeros, bits, minus_one=True)
    assert torch.equal(unpack_gptq_zeros(stored, bits, 64, minus_one=True), zeros)
    assert torch.equal((unpack_int32(stored, bits, 64) + 1) & (2**bits - 1), zeros)
    assert not torch.equal(unpack_gptq_zeros(stored, bits, 64, minus_one=False), zeros)
    symmetric = torch.full((1, 32), 2 ** (bits - 1), dtype=torch.uint8)
    assert torch.equal(unpack_int32(pack_gptq_zeros(symmetric, bits, minus_one=True), bits, 32), symmetric - 1)
