"""Cached entries of tokens as 8-bit codes with scales: `rollout.cache: fp8` (E4M3) and `int8`.

A scale, float32, belongs to one token, one head and a tile of up to 128 features: a head's key or value has one, and
MLA's latent of 512 features with 64 rotated ones has four and one, as FlashMLA's FP8 cache divides them for
DeepSeek-V3.2. No number depends on another token, so neither neighbours nor chunks change what is stored. 8 bits need
no more; keys by channel are for 2 to 4 bits (KIVI, arXiv:2402.02750, section 3).

N blocks · B tokens of a block · T tokens of a pass · C width of an entry · S tiles of an entry
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from danlu.numerics.format import Format, Scaled, encode
from danlu.planning.cache_memory import TILE

CacheFormat = Literal["fp8", "int8"]
# int8 without -128: a scale of the largest over 127.5 would put that one on the border of two codes.
FORMATS = {"fp8": Format("e4m3", (1, TILE)), "int8": Format("int8", (1, TILE), narrow_range=True)}
# torch moves float8 by few operations: codes are stored as the bytes that they are.
CODE_DTYPES = {"fp8": torch.uint8, "int8": torch.int8}


@dataclass(frozen=True)
class EncodedBlocks:
    """The blocks of a layer's entries of one shape, in place of a tensor [N, *lead, B, C]."""

    codes: Tensor
    """[N, *lead, B, C] in the type of `CODE_DTYPES`."""
    scales: Tensor
    """[N, *lead, B, S] float32."""
    format: CacheFormat
    dtype: torch.dtype
    """The type of decoded entries."""
    newest: None = None
    """No token is kept as it is."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def new_empty(self, size: int) -> Tensor:
        """Returns uninitialised memory for so many decoded numbers."""
        return self.codes.new_empty(size, dtype=self.dtype)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Returns some blocks decoded, [U, *lead, B, C]; dim is 0."""
        assert dim == 0, "blocks are along the first dimension"
        return self._decoded(self.codes.index_select(0, index), self.scales.index_select(0, index))

    def of_heads(self, rows: Tensor) -> Tensor:
        """Returns blocks of single heads decoded, [rows, B * C], by their numbers among [N * heads]."""
        codes, scales = (x.flatten(0, -3).index_select(0, rows) for x in (self.codes, self.scales))
        return self._decoded(codes, scales).flatten(1)

    def rounded(self, entries: Tensor) -> Tensor:
        """Returns entries [T, *lead, C] as they are read once they are written."""
        return encode(entries, FORMATS[self.format]).decode(self.dtype)

    def write(self, slots: Tensor, entries: Tensor) -> Tensor:
        """Encodes entries [T, *lead, C] into slots [T * heads], and returns them as they are read."""
        encoded = encode(entries, FORMATS[self.format])
        for stored, new in ((self.codes, encoded.codes.view(self.codes.dtype)), (self.scales, encoded.scales)):
            stored.view(-1, stored.shape[-1]).index_copy_(0, slots, new.reshape(-1, stored.shape[-1]))
        return encoded.decode(self.dtype)

    def _decoded(self, codes: Tensor, scales: Tensor) -> Tensor:
        form = FORMATS[self.format]
        return Scaled(codes.view(form.of_element.dtype), scales, form).decode(self.dtype)
