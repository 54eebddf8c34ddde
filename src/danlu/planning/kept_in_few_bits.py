"""The values that layers with products in 8 bits keep in 8 bits (`numerics.arithmetic`). Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from danlu.models.operations import Operation, Value

KEEPING = ("tile", "tensor")
"""Recipes that keep inputs in 8 bits; the others keep them as they are."""
GATES = ("shared_gate", "a_proj", "b_proj")
"""Products that stay in the type of activations, by the last part of their names."""
_TILE = 128
_ACTIVATION = "gated_activation"


def codes_of(value: Value, width: int) -> Value:
    """A value, or the first `width` of its numbers, in 8 bits with scales."""
    return replace(value, name=f"{value.name}.codes", width=width, type="codes")


def code_bytes(recipe: str, width: int, count: int) -> int:
    """Bytes of `count` rows of `width` numbers in 8 bits with their float32 scales."""
    return count * (width + 4 * -(-width // _TILE)) if recipe == "tile" else count * width + 4


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
    return is_linear and not operation.in_float32 and name.rpartition(".")[2] not in GATES


def _is_behind_attention(operation: Operation, recipe: str) -> bool:
    """Whether its input is attention's output, which tile keeps as it is."""
    return recipe == "tile" and operation.name == "attention.o_proj"


def _is_gated(operation: Operation) -> bool:
    return len(operation.reads) == 2
