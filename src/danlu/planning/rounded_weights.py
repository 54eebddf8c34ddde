"""The bytes, the seconds and the blocks of weights that are rounded for products (quantization-aware training).

Imports no torch.

O, I outputs and inputs of a layer · E experts
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Literal

from danlu.models.config import ModelConfig
from danlu.models.operations import Operation
from danlu.planning.kept_in_few_bits import has_few_bits
from danlu.planning.primitives import Dequantized, Moved, Primitive
from danlu.planning.rank_tensors import RankTensor
from danlu.recipe import Recipe, sections

_FLOAT32 = 4
_ENCODING_PASSES = 10
"""Passes over float32 numbers in which codes are found: magnitudes, their largest, quotients, rounding, packing."""
_BITS = {"fp8": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}
_SCALE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "mxfp8": 1, "mxfp4": 1, "nvfp4": 1}
_FP8_BLOCK = 128


def keeps_codes(recipe: Recipe) -> bool:
    """Whether codes are kept between updates: where weights are neither gathered of shards nor swapped."""
    return recipe.parallel.shard == "none" and not recipe.parallel.pipeline.updates_each_micro_batch


def rounded_linears(config: ModelConfig) -> frozenset[str]:
    """Names of the weights that are rounded."""
    from danlu.models.sites import sites_of

    return frozenset(f"{site.name}.weight" for site in sites_of(config) if site.layer is not None and site.shape[0] > 1)


def trained_block(section: sections.QuantizationSection) -> tuple[int, int]:
    """(rows, columns) of a weight that share a scale in the format of a section that is trained."""
    if isinstance(section, sections.Fp8):
        return _FP8_BLOCK, _FP8_BLOCK
    return 1, section.group  # type: ignore[union-attr]


def rounding_problems(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """Why weights of a model cannot be trained for a recipe's format, whole or as tensor ranks have them.

    Blocks that do not divide a layer's inputs have no form in a folder. A block on two tensor ranks would have two
    scales.
    """
    section = recipe.trained_quantization
    if section is None:
        return
    yield from _adapted_experts(recipe, config)
    rows, columns = trained_block(section)
    degree, shapes = recipe.parallel.tensor, _rounded_of_kinds(config)
    for name, (outputs, inputs) in shapes.items():
        if inputs % columns and not isinstance(section, sections.Fp8):
            yield (
                f"quantization.group: {columns} does not divide the {inputs} inputs of {name}. {_dividing(shapes, 1)}"
            )
            return
        # Which side is cut is the layer's own matter: both have to be whole blocks.
        if degree > 1 and (inputs % (columns * degree) or outputs % (rows * degree)):
            yield (
                f"parallel.tensor: {degree} ranks would have parts of the blocks of {rows} x {columns} weights of "
                f"{name} [{outputs}, {inputs}], and scales of their own for them. {_dividing(shapes, degree)}, or "
                "fewer ranks"
            )
            return


def _adapted_experts(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """Why an adapter on stacked experts does not go with rounding: it is not added up with them."""
    if recipe.adapter is None:
        return
    from danlu.adapters.targets import choose
    from danlu.models.sites import sites_of

    experts = [site.name for site in choose(sites_of(config), recipe.adapter) if site.experts is not None]
    if experts:
        yield (
            f"adapter.targets: {experts[0]} are the matrices of experts, and an adapter on these is not added to them "
            "before they are rounded (quantization.trained). Leave experts out, or train without an adapter"
        )


def _rounded_of_kinds(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Names and shapes [O, I] of the linear layers that are rounded, of the first layer of each kind."""
    from danlu.models.sites import sites_of

    first = {config.layers.index(kind) for kind in config.kinds}
    names = {name.removesuffix(".weight") for name in rounded_linears(config)}
    return {site.name: site.shape for site in sites_of(config) if site.layer in first and site.name in names}


def _dividing(shapes: Mapping[str, tuple[int, int]], degree: int) -> str:
    """The advice on groups that divide the inputs of all layers, as `degree` ranks have them."""
    groups = (256, 128, 64, 32, 16, 8, 4)
    dividing = [each for each in groups if all(inputs % (each * degree) == 0 for _, inputs in shapes.values())]
    return f"Use {', '.join(map(str, dividing))}" if dividing else "No group of 4 or more divides all of them"


def code_bytes(section: sections.QuantizationSection, shape: tuple[int, ...]) -> int:
    """Bytes of the codes, scales and zeros of a matrix [O, I], or of matrices [E, O, I]."""
    *stacked, outputs, inputs = shape
    if isinstance(section, sections.Fp8):
        blocks = -(-outputs // _FP8_BLOCK) * -(-inputs // _FP8_BLOCK)
        return math.prod(stacked) * (outputs * inputs + _FLOAT32 * blocks)
    group: int = section.group  # type: ignore[union-attr]
    groups = outputs * -(-inputs // group)
    scale, zero, of_matrix = _SCALE_BYTES.get(section.kind, 0), 0, _FLOAT32 if section.kind == "nvfp4" else 0
    if isinstance(section, sections.Int8 | sections.Int4 | sections.Int3 | sections.Int2):
        scale, zero = _SCALE_BYTES[section.scale], 0 if section.symmetric else 1
    bits = _BITS.get(section.kind) or int(section.kind.removeprefix("int"))
    return math.prod(stacked) * (outputs * -(-inputs * bits // 8) + groups * (scale + zero) + of_matrix)


def rounded_shapes(tensors: Iterable[RankTensor], names: Collection[str]) -> Iterator[tuple[int, ...]]:
    """The shapes of the weights among some tensors that are rounded, as one process multiplies with them."""
    return (each.cut for each in tensors if each.name in names)


def weight_work(rounded: Literal["kept", "encoded"], operation: Operation, elements: float) -> Iterator[Primitive]:
    """The work by which the weight of a product becomes a rounded dense one, from codes that are kept or not."""
    if has_few_bits(operation):
        if rounded == "encoded":
            yield encoding(elements)
        yield Dequantized(elements)


def encoding(elements: float) -> Moved:
    """The work of encoding so many numbers."""
    return Moved(2 * _FLOAT32 * elements, passes=_ENCODING_PASSES / 2)
