"""Shapes of the tensors that hold a quantized matrix, whole or the part of a tensor rank. Imports no torch.

O outputs · I inputs · E experts
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from danlu.core.shard_box import ShardBox
from danlu.recipe.sections.model import Fp4, Nf4, QuantizationSection

NESTED_BLOCK = 256
"""Blocks of four-bit numbers that share one float32 for their scales under double quantization."""
_STORED = {
    **{f"int{bits}": (bits, 4) for bits in (8, 4, 3, 2)},
    "fp8": (8, 4),
    "mxfp8": (8, 1),
    "mxfp4": (4, 1),
    "nvfp4": (4, 1),
}
"""Bits of a number, and bytes of the scale of a group."""
_OF_MATRIX = {"nvfp4": 4}
"""Bytes of a matrix's own scale."""


@dataclass(frozen=True)
class StoredCodes:
    """How a weight's own folder stores it, of which a frozen base keeps the codes."""

    kind: str
    """The layout, for messages."""
    bits: int
    block: tuple[int, int]
    """Rows and columns that share a scale; 0: all of them."""
    scale_bytes: int
    zero_bytes: int = 0
    """Bytes of the zero of a block."""
    has_tensor_scale: bool = False
    ordered_groups: int = 0
    """Groups of inputs that are not neighbours (GPTQ's act_order); 0: all are."""


Packing = QuantizationSection | StoredCodes
"""The section of the recipe that packs a weight, or its form in its own folder."""


class PackedShape(NamedTuple):
    """The tensors of a packed matrix [O, I], or of several [E, O, I]."""

    codes: tuple[int, ...]
    """The shape of the codes, bytes, which data ranks may shard by their first dimension."""
    constants: int
    """Bytes of scales and offsets, which each process has whole."""

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return math.prod(self.codes) + self.constants


def packed_shape(shape: Sequence[int], packing: Packing, box: ShardBox | None = None) -> PackedShape:
    """The tensors of a matrix [O, I], or of several [E, O, I], that a section of the recipe packs, or their folder.

    box: the part of it that a rank has. A block or group is never of two blocks of the whole matrix, so blocks get
    smaller where the box cuts them.
    """
    box = box or ShardBox.full(shape)
    stacked, (outputs, inputs) = box.sizes[:-2], box.sizes[-2:]
    if isinstance(packing, StoredCodes):
        of_matrix = _stored(packing, shape, box)
    else:
        of_matrix = (_four_bit if isinstance(packing, Nf4 | Fp4) else _groups)(packing, shape[-1], box)
    assert outputs and inputs, f"a part without numbers of {shape}"
    return PackedShape((*stacked, *of_matrix.codes), math.prod(stacked) * of_matrix.constants)


def packed_bytes(shape: Sequence[int], packing: Packing) -> int:
    """Bytes of codes, and of the scales of blocks or groups, of a whole matrix or of several."""
    return packed_shape(shape, packing).bytes


def _stored(codes: StoredCodes, shape: Sequence[int], box: ShardBox) -> PackedShape:
    (rows, columns), (row, column) = box.sizes[-2:], box.offsets[-2:]
    high = math.gcd(codes.block[0] or shape[-2], row)
    wide = math.gcd(codes.block[1] or shape[-1], column)
    blocks = -(-rows // high) * (codes.ordered_groups or -(-columns // wide))
    constants = (codes.scale_bytes + codes.zero_bytes) * blocks
    constants += 4 * codes.has_tensor_scale + (4 * columns if codes.ordered_groups else 0)
    return PackedShape((rows, -(-columns * codes.bits // 8)), constants)


def _groups(section: QuantizationSection, inputs: int, box: ShardBox) -> PackedShape:
    assert not isinstance(section, Nf4 | Fp4)
    (rows, columns), start = box.sizes[-2:], box.offsets[-1]
    bits, scale_bytes = _STORED[section.kind]
    groups = rows * -(-columns // math.gcd(section.group, start))
    return PackedShape((rows, -(-columns * bits // 8)), scale_bytes * groups + _OF_MATRIX.get(section.kind, 0))


def _four_bit(section: QuantizationSection, inputs: int, box: ShardBox) -> PackedShape:
    assert isinstance(section, Nf4 | Fp4)
    (rows, columns), (row, column) = box.sizes[-2:], box.offsets[-2:]
    block: int = section.block
    count, start = rows * columns, row * inputs + column
    # Double quantization keeps a byte for each block, a float32 for each 256 of those, and one float32 offset
    # (arXiv:2305.14314, section 3); a part that begins within such a block has float32 scales.
    has_whole_blocks = columns == inputs and start % block == 0
    is_double = section.double and has_whole_blocks and start // block % NESTED_BLOCK == 0
    if not has_whole_blocks:
        block = math.gcd(block, start) if columns == inputs else math.gcd(block, inputs, column, columns)
    blocks = -(-count // block)
    return PackedShape((-(-count // 2), 1), blocks + 4 * -(-blocks // NESTED_BLOCK) + 4 if is_double else 4 * blocks)
