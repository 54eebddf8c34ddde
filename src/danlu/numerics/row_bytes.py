"""Rows in few bits as bytes, in which they travel between processes: gloo sends no float8, and NCCL's sums take none.

Of each row its codes, one byte each, and behind them the exponents of its scales, one byte for each block of features.
A power of two needs no more, so nothing is rounded on the way.

N rows · I features · Ib blocks of features
"""

from __future__ import annotations

import torch
from torch import Tensor

from danlu.numerics.format import Format, Scaled, exponents_to_scales


def travels_as_bytes(form: Format) -> bool:
    """Whether a row of a format has codes of a byte, and scales of its own that are powers of two."""
    is_byte = form.of_element.dtype.itemsize == 1
    return form.block[0] == 1 and form.block[1] > 0 and form.scale == "power-of-two" and is_byte


def to_bytes(scaled: Scaled) -> Tensor:
    """Returns rows [N, I] in a format of `travels_as_bytes` as [N, I + Ib] uint8."""
    rows, features = scaled.shape
    blocks = scaled.format.blocks(rows, features)[1]
    # The 8 bits behind the sign; of NaN, the scale of a block that is not finite, 255.
    exponents = (scaled.scales.view(torch.int32) >> 23).to(torch.uint8).view(rows, blocks)
    return torch.cat((scaled.codes.view(torch.uint8), exponents), dim=1)


def from_bytes(row_bytes: Tensor, form: Format, features: int) -> Scaled:
    """Returns the rows [N, I] of `to_bytes`, [N, I + Ib] uint8: the same codes and scales."""
    codes = row_bytes[:, :features].contiguous().view(form.of_element.dtype)
    return Scaled(codes, exponents_to_scales(row_bytes[:, features:]), form)
