"""Codes of 2 to 8 bits in bytes, and the orders in which files of other tools hold them.

In memory a row of codes is one run of bits, the lowest bit of the first code first: code i has the bits from i b on.
compressed-tensors' pack-quantized has the same run in little-endian int32, of each row; GPTQ of each column; AWQ has
eight codes of four bits of neighbouring outputs in an int32, the even ones first.

C codes of a row · b bits of each
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TOGETHER = 8
"""Codes that fill whole bytes, whatever their bits."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output of each code of an int32, the lowest bits first."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each output's code in its int32."""


def packed_width(count: int, bits: int) -> int:
    """Returns the bytes of a row of `count` codes."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [.., C] uint8, each below 2^bits, into uint8 [.., ceil(C bits / 8)]."""
    count = codes.shape[-1]
    if bits == 8:
        return codes.clone()
    if 8 % bits == 0:
        share = 8 // bits
        parts = F.pad(codes, (0, -count % share)).unflatten(-1, (-1, share)).unbind(-1)
        packed = parts[0].clone()
        for place, part in enumerate(parts[1:], 1):
            packed |= part << (place * bits)
        return packed
    octets = F.pad(codes, (0, -count % _TOGETHER)).unflatten(-1, (-1, _TOGETHER)).to(torch.int64)
    run = (octets << (torch.arange(_TOGETHER, device=codes.device) * bits)).sum(-1, keepdim=True)
    packed = ((run >> (8 * torch.arange(bits, device=codes.device))) & 255).to(torch.uint8)
    return packed.flatten(-2)[..., : packed_width(count, bits)].contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Returns the codes [.., count] uint8 that `pack` packed."""
    if bits == 8:
        return packed[..., :count].clone()
    if 8 % bits == 0:
        places = range(0, 8, bits)
        parts = torch.stack([(packed >> place) & (2**bits - 1) for place in places], dim=-1)
        return parts.flatten(-2)[..., :count].contiguous()
    octets = F.pad(packed, (0, -packed.shape[-1] % bits)).unflatten(-1, (-1, bits)).to(torch.int64)
    run = (octets << (8 * torch.arange(bits, device=packed.device))).sum(-1, keepdim=True)
    codes = ((run >> (torch.arange(_TOGETHER, device=packed.device) * bits)) & (2**bits - 1)).to(torch.uint8)
    return codes.flatten(-2)[..., :count].contiguous()


def to_int32(packed: Tensor) -> Tensor:
    """Bytes [.., n] -> little-endian int32 [.., ceil(n / 4)], with zeros at the end."""
    # A copy: a single row counts as contiguous with any stride between rows, and `view` does not take all of them.
    padded = F.pad(packed, (0, -packed.shape[-1] % 4))
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)


def from_int32(packed: Tensor, width: int) -> Tensor:
    """Little-endian int32 [.., n] -> the first `width` bytes [.., width]."""
    return packed.contiguous().view(torch.uint8)[..., :width].contiguous()


def pack_int32(codes: Tensor, bits: int) -> Tensor:
    """Packs codes [.., C] uint8 into int32 [.., ceil(C bits / 32)], as compressed-tensors does along inputs."""
    return to_int32(pack(codes, bits))


def unpack_int32(packed: Tensor, bits: int, count: int) -> Tensor:
    """Returns the codes [.., count] uint8 that `pack_int32` packed."""
    return unpack(from_int32(packed, packed_width(count, bits)), bits, count)


def pack_awq(codes: Tensor) -> Tensor:
    """Packs codes of 4 bits [R, outputs] uint8, of a multiple of 8 outputs, into int32 [R, outputs / 8], as AWQ."""
    return pack_int32(_reordered(codes, _AWQ_ORDER), 4)


def unpack_awq(packed: Tensor) -> Tensor:
    """Returns the codes [R, outputs] uint8 that `pack_awq` packed."""
    return _reordered(unpack_int32(packed, 4, 8 * packed.shape[-1]), _AWQ_PLACES)


def pack_gptq_zeros(zeros: Tensor, bits: int, *, minus_one: bool) -> Tensor:
    """Packs the zeros [G, outputs] uint8 of groups of inputs into int32 [G, outputs bits / 32].

    minus_one: as GPTQ's first format has them, which adds one again in b bits: 0 is stored as the largest code.
    """
    return pack_int32((zeros - int(minus_one)) & (2**bits - 1), bits)


def unpack_gptq_zeros(packed: Tensor, bits: int, outputs: int, *, minus_one: bool) -> Tensor:
    """Returns the zeros [G, outputs] uint8 that `pack_gptq_zeros` packed."""
    return (unpack_int32(packed, bits, outputs) + int(minus_one)) & (2**bits - 1)


def _reordered(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """codes [R, C] with the codes of each eight in another order."""
    return codes.unflatten(-1, (-1, len(order)))[..., list(order)].flatten(-2)
