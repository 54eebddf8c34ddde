"""Shapes and bytes of what an optimizer keeps for each parameter, by its section of the recipe. Imports no torch.

The optimizers allocate from these functions, so that a plan counts what they will keep. Shapes are those of the part of
a parameter that a process has. A parameter's role is read from its name (`groups.role`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from danlu.optim.groups import role
from danlu.recipe import sections

Shape = tuple[int, ...]
StateShapes = dict[str, "StateTensor"]
"""Name of a state tensor ("exp_avg") -> its shape and type."""
BLOCK, SMALLEST = 256, 4096
"""Defaults of 8-bit moments: elements that share a scale, and the elements from which on a parameter has them."""
FLOAT32_BYTES = 4
_TYPE_BYTES = {"float32": FLOAT32_BYTES, "bfloat16": 2, "uint8": 1}


class StateTensor(NamedTuple):
    """Shape and type of a tensor that an optimizer keeps."""

    shape: Shape
    type: Literal["float32", "bfloat16", "uint8"] = "float32"

    @property
    def bytes(self) -> int:
        """Bytes of such a tensor."""
        return math.prod(self.shape) * _TYPE_BYTES[self.type]


class OptimizerBytes(NamedTuple):
    """Bytes of an optimizer over all of its parameters."""

    state: int
    """State once every parameter has been stepped."""
    resident: int
    """The part of it that stays in memory; of paged state, that of the largest parameter."""
    gradients: int
    """All gradients of a step; projected ones have a low rank, and one of them is whole at a time."""


def float32_moments(shape: Shape) -> StateShapes:
    """The moments of AdamW, and torch's step counter."""
    return {"step": StateTensor(()), "exp_avg": StateTensor(shape), "exp_avg_sq": StateTensor(shape)}


def bfloat16_moments(shape: Shape) -> StateShapes:
    """The moments of AdamW in bfloat16, and torch's step counter."""
    moment = StateTensor(shape, "bfloat16")
    return {"step": StateTensor(()), "exp_avg": moment, "exp_avg_sq": moment}


def eight_bit_moments(shape: Shape, block: int = BLOCK, smallest: int = SMALLEST) -> StateShapes:
    """The moments of AdamW as codes with a scale for each block; of a small parameter in float32."""
    count = math.prod(shape)
    if count < smallest:
        return float32_moments(shape)
    codes, absmax = StateTensor(shape, "uint8"), StateTensor((-(-count // block),))
    return {
        "step": StateTensor(()),
        "exp_avg": codes,
        "exp_avg_sq": codes,
        "exp_avg_absmax": absmax,
        "exp_avg_sq_absmax": absmax,
    }


class EightBits(NamedTuple):
    """How 8-bit moments are kept."""

    block: int = BLOCK
    smallest: int = SMALLEST


def eight_bits(section: sections.Optimizer) -> EightBits | None:
    """How a section's AdamW, or its AdamW part, keeps its moments in 8 bits; None: it does not."""
    match section:
        case sections.AdamW8bit():
            return EightBits(section.block, section.smallest)
        case sections.AdamW(moments="8bit") | sections.PagedAdamW(bits=8) | sections.GaLore(states="adamw8bit"):
            return EightBits()
    return None


def moments(section: sections.Optimizer, shape: Shape) -> StateShapes:
    """The moments that a section's AdamW, or its AdamW part, keeps of a parameter or projected gradient."""
    if has_bfloat16_moments(section):
        return bfloat16_moments(shape)
    bits = eight_bits(section)
    return float32_moments(shape) if bits is None else eight_bit_moments(shape, *bits)


def has_bfloat16_moments(section: sections.Optimizer) -> bool:
    """Whether a section's AdamW keeps its moments in bfloat16."""
    return isinstance(section, sections.AdamW) and section.moments == "bf16"


def low_rank_shape(shape: Shape, rank: int) -> Shape:
    """The gradient of a matrix [out, in] that GaLore has projected: [out, R] where out >= in, else [R, in]."""
    rows, columns = shape
    return (rows, rank) if rows >= columns else (rank, columns)


def is_hidden(name: str, dimensions: int) -> bool:
    """Whether Muon and GaLore take a parameter: a hidden matrix; stacked [E, out, in] weights are left to AdamW."""
    return dimensions == 2 and role(name, dimensions) == "matrix"


def parameter_state(section: sections.Optimizer, name: str, shape: Shape) -> StateShapes:
    """The state that the section's optimizer keeps for a parameter after its first step."""
    match section:
        case sections.SGD():
            return {"momentum_buffer": StateTensor(shape)} if section.momentum else {}
        case sections.Adafactor() if len(shape) > 1:
            by_row, by_column = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
            return {"step": StateTensor(()), "row_var": StateTensor(by_row), "col_var": StateTensor(by_column)}
        case sections.Adafactor():
            return {"step": StateTensor(()), "variance": StateTensor(shape)}
        case sections.Lion():
            return {"exp_avg": StateTensor(shape)}
        case sections.Muon() if is_hidden(name, len(shape)):
            return {"momentum_buffer": StateTensor(shape)}
        case sections.GaLore() if is_hidden(name, len(shape)):
            rows, columns = shape
            projector = (section.rank, columns) if rows >= columns else (rows, section.rank)
            return {"projector": StateTensor(projector), **moments(section, low_rank_shape(shape, section.rank))}
    return moments(section, shape)


def projected_shape(section: sections.Optimizer, name: str, shape: Shape) -> Shape | None:
    """The gradient of a parameter as it waits for GaLore's step; None: nothing projects it."""
    if isinstance(section, sections.GaLore) and is_hidden(name, len(shape)):
        return low_rank_shape(shape, section.rank)
    return None


def optimizer_bytes(section: sections.Optimizer, shapes: Mapping[str, Shape], *, paged: bool) -> OptimizerBytes:
    """Bytes over trained parameters, all float32, by the shapes of their local parts.

    paged: whether state is in pages (`paged-adamw`, or AdamW's state that `memory` offloads), of which one parameter's
    is in memory at a time.
    """
    by_role = isinstance(section, sections.Muon | sections.GaLore)
    like: dict[tuple[bool, Shape], _ParameterBytes] = {}
    sizes = []
    for name, shape in shapes.items():  # most layers have parameters like those of the one before
        key = by_role and is_hidden(name, len(shape)), shape
        if key not in like:
            like[key] = _parameter_bytes(section, name, shape)
        sizes.append(like[key])
    state = sum(each.state for each in sizes)
    largest = max((each.projected for each in sizes), default=0)
    resident = max((each.state for each in sizes), default=0) if paged else state
    return OptimizerBytes(state, resident, sum(each.gradient for each in sizes) + largest)


class _ParameterBytes(NamedTuple):
    """Bytes of an optimizer for one parameter."""

    state: int
    gradient: int
    """Bytes of the gradient as it waits for the step."""
    projected: int
    """Bytes of the whole gradient, where it is projected; 0 where it is not."""


def _parameter_bytes(section: sections.Optimizer, name: str, shape: Shape) -> _ParameterBytes:
    state = sum(tensor.bytes for tensor in parameter_state(section, name, shape).values())
    whole, projected = math.prod(shape) * FLOAT32_BYTES, projected_shape(section, name, shape)
    if projected is None:
        return _ParameterBytes(state, whole, 0)
    return _ParameterBytes(state, math.prod(projected) * FLOAT32_BYTES, whole)


def average_bytes(shapes: Iterable[Shape]) -> int:
    """Bytes of the moving average of trained parameters (`ema`): one more copy of them in float32."""
    return sum(math.prod(shape) for shape in shapes) * FLOAT32_BYTES
