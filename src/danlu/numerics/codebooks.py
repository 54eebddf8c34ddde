"""The values that 4-bit codes stand for, and the map that stores blocks' scales in 8 bits, as bitsandbytes has them.

Everything here is a constant, held once a device.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["nf4", "fp4"]
KINDS: tuple[Kind, ...] = ("nf4", "fp4")

CPU = torch.device("cpu")

# Quantiles of the standard normal distribution, scaled to [-1, 1], with an exact zero (QLoRA, arXiv:2305.14314,
# appendix E). The index is the code.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# One bit of sign, two of exponent, one of mantissa, over the largest value; code 8 is a second zero.
_FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 12 / 12, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
_FP4 = (*_FP4_MAGNITUDES, 0.0, *(-magnitude for magnitude in _FP4_MAGNITUDES[1:]))
# FP4's codes from the lowest value to the highest. Of its two zeros code 0 comes first, so what is just above zero gets
# code 8 and what is just below gets code 0: bitsandbytes' order on a CPU.
_FP4_ORDER = (11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3)


@cache
def codebook(kind: Kind, device: torch.device = CPU) -> Tensor:
    """[16] float32: the value of each code, in [-1, 1]."""
    return torch.tensor(_NF4 if kind == "nf4" else _FP4, device=device)


@cache
def pairs(kind: Kind, device: torch.device = CPU) -> Tensor:
    """[256] int64: the two float32 values of a byte of codes, the high half's first, as they lie in memory.

    One number, because looking up 8 bytes costs no more than looking up 4.
    """
    byte = torch.arange(256, device=device)
    values = codebook(kind, device)
    return torch.stack((values[byte >> 4], values[byte & 15]), dim=1).view(torch.int64).view(-1)


@cache
def order(kind: Kind, device: torch.device = CPU) -> Tensor | None:
    """[16] uint8: the codes from the lowest value to the highest; None where that is their own order."""
    return None if kind == "nf4" else torch.tensor(_FP4_ORDER, dtype=torch.uint8, device=device)


@cache
def midpoints(kind: Kind, device: torch.device = CPU) -> Tensor:
    """[15] float32, ascending: halfway between neighbouring values. A value on one belongs to the lower neighbour."""
    rising = codebook(kind, device).sort().values
    return (rising[:-1] + rising[1:]) / 2


@cache
def dynamic_map(device: torch.device = CPU) -> Tensor:
    """[256] float32, ascending from -0.993 to 1: seven decades of both signs, the higher the finer, and zero.

    The signed dynamic data type (arXiv:1511.04561) in bitsandbytes' form.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1)
        centres = (edges[:-1] + edges[1:]) / 2
        # A power of ten from Python, a product in float32: these bits are in every file that bitsandbytes writes.
        magnitudes = (10.0 ** (decade - 6) * centres).tolist()
        values += magnitudes + [-magnitude for magnitude in magnitudes]
    return torch.tensor(sorted(values), device=device)


STEPS = 65535


@cache
def dynamic_codes(device: torch.device = CPU) -> Tensor:
    """[65536] uint8: the entry of `dynamic_map` for each of 65536 even steps from -1 to 1.

    bitsandbytes' CPU kernel rounds a value to such a step before it looks for the nearest entry, so about one value in
    a thousand gets a neighbour of the entry that is nearest. We round as it does, to get its bits.
    """
    values = dynamic_map(device)
    steps = -1.0 + (2.0 * torch.arange(STEPS + 1, dtype=torch.float32, device=device)) / STEPS
    return torch.bucketize(steps, 0.5 * (values[:-1] + values[1:])).to(torch.uint8)
