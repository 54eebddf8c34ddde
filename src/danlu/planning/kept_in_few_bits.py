"""The values that layers with products in 8 bits keep in 8 bits (`numerics.arithmetic`), and the bytes that such a
product takes while it is computed from decoded numbers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from danlu.models.operations import Operation, Value, is_gate

KEEPING = ("tile", "tensor")
"""Recipes that keep inputs in 8 bits; the others keep them as they are."""
CODES = ".codes"
"""The end of the name of a value that is kept in 8 bits."""
_TILE, _FLOAT32 = 128, 4
_ACTIVATION = "gated_activation"


def codes_of(value: Value, width: int) -> Value:
    """A value, or the first `width` of its numbers, in 8 bits with scales."""
    return replace(value, name=value.name + CODES, width=width, type="codes")


def code_bytes(recipe: str, width: int, count: int) -> int:
    """Bytes of `count` rows of `width` numbers in 8 bits with their float32 scales."""
    return count * (width + 4 * -(-width // _TILE)) if recipe == "tile" else count * width + 4


def travelling_bytes(width: int) -> int:
    """Bytes of a row of `width` numbers by tile on its way to another rank: codes, and a byte for each tile's scale."""
    return width + -(-width // _TILE)


class ProductSize(NamedTuple):
    """Numbers of the matrices of a product y = x W^T; of stacked layers, all rows and one of the weights."""

    x: int
    weight: int
    y: int
    element_bytes: int
    """Bytes of an activation."""
    groups: int = 1
    """Stacked layers, which share the rows evenly and are multiplied one after the other."""

    def _float32_bytes(self, numbers: int) -> int:
        """Bytes of a float32 copy of numbers, where activations have another type."""
        return numbers * _FLOAT32 if self.element_bytes < _FLOAT32 else 0

    def forward_bytes(self) -> int:
        """Bytes of the codes of both factors and of the decoded numbers, besides x and y.

        A factor is encoded from a float32 copy. Decoding E4M3 takes two bytes more of each number for a moment.
        """
        narrow = self.weight * self.element_bytes if self.element_bytes < _FLOAT32 else 0
        encoding = self.x + narrow + (_FLOAT32 + 1) * self.weight
        y = self.y // self.groups
        multiplying = self.x + _FLOAT32 * self.x // self.groups + (1 + _FLOAT32) * self.weight
        multiplying += max(2 * self.weight - y * self.element_bytes, self._float32_bytes(y))
        return max((_FLOAT32 + 1) * self.x, encoding, multiplying)

    def backward_bytes(self, recipe: str) -> int:
        """Bytes besides x as it was kept, the gradient of y, and the two results."""
        x, y = self.x // self.groups, self.y // self.groups
        of_x = self.y + _FLOAT32 * y + (1 + _FLOAT32) * self.weight + self._float32_bytes(x)
        if recipe == "row-with-bf16-weight-gradient":
            return max(of_x, self.weight * self.element_bytes)
        decoded = _FLOAT32 * self.x if recipe in KEEPING else self._float32_bytes(self.x)
        of_weight = y + (1 + _FLOAT32) * x + _FLOAT32 * y + (decoded if self.groups > 1 else 0)
        if recipe != "tensor":  # what was decoded is there while a copy of it is divided by other scales
            of_weight = max(of_weight, y + decoded + (_FLOAT32 + 1) * x)
        return max(of_x, of_weight)


def in_few_bits(
    operations: Sequence[Operation], values: dict[str, Value], recipe: str, adapted: Sequence[str]
) -> Iterator[Operation]:
    """The operations with the inputs of products in 8 bits among what they save, and such values added to `values`.

    A gated activation in front of a product is one operation with it: both are computed from gate and up in 8 bits.
    adapted: names of products with adapters, which keep what these need.
    """
    makers = {value.name: each for each in operations if each.name.endswith(_ACTIVATION) for value in each.makes}
    fused = {
        makers[each.reads[0]].name
        for each in operations
        if has_few_bits(each)
        and each.name not in adapted
        and each.reads[0] in makers
        and _is_gated(makers[each.reads[0]])
    }

    def kept(name: str, width: int | None = None) -> str:
        codes = codes_of(values[name], values[name].width if width is None else width)
        values[codes.name] = codes
        return codes.name

    for each in operations:
        if each.name in fused:
            saves = tuple(kept(name) for name in each.reads)
            yield replace(each, saves=saves, factors=(), elementwise=None, selective=None)
        elif not has_few_bits(each) or _is_behind_attention(each, recipe):
            yield each
        elif each.reads[0] in makers and makers[each.reads[0]].name in fused:
            yield replace(each, saves=each.saves[1:])
        else:
            inputs = each.weights[0][1][-1]
            yield replace(each, saves=(kept(each.saves[0], inputs), *each.saves[1:]))


def has_few_bits(operation: Operation) -> bool:
    """Whether the products of an operation are in 8 bits."""
    half, _, name = operation.name.partition(".")
    is_linear = operation.kind in ("product", "grouped") and half in ("attention", "mlp")
    return is_linear and not operation.in_float32 and not is_gate(name)


def _is_behind_attention(operation: Operation, recipe: str) -> bool:
    """Whether its input is attention's output, which tile keeps as it is."""
    return recipe == "tile" and operation.name == "attention.o_proj"


def _is_gated(operation: Operation) -> bool:
    return len(operation.reads) == 2
