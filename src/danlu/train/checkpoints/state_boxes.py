"""Which box of a whole an optimizer's state is, from the box of the parameter it belongs to."""

from __future__ import annotations

import math

from torch import Tensor

from danlu.shard_box import ShardBox


def state_box(state: Tensor, parameter: ShardBox, *, block: int | None = None) -> ShardBox:
    """The box of one state tensor: the parameter's own, where it has its shape.

    A number for all (shape []) is saved once, by whoever has the first element of the parameter. What has another shape
    stays with the parameter's box and cannot be cut into others: it loads at the same layout alone.

    Args:
        block  for maxima of 8-bit moments, one for each so many elements of the flattened box. Where a row of the
               parameter is a whole number of blocks, cuts by rows go between blocks, so codes and maxima mean the same
               numbers in boxes of any rows, and load exactly at any layout that cuts by rows. Only for a parameter
               whose moments are kept so in all of its boxes: `smallest` judged by the whole parameter.
    """
    shape = tuple(state.shape)
    if not shape:
        first = parameter.is_writer and not any(parameter.offsets) and (parameter.is_full or all(parameter.sizes))
        return ShardBox((), (), (), parameter.replicas, first)
    if shape == parameter.sizes:
        return parameter
    if parameter.is_full:
        return ShardBox.full(shape, replicas=parameter.replicas, is_writer=parameter.is_writer)
    if block is not None and (rows := _rows_of_blocks(shape, parameter, block)) is not None:
        return rows
    return parameter


def _rows_of_blocks(shape: tuple[int, ...], parameter: ShardBox, block: int) -> ShardBox | None:
    width = math.prod(parameter.global_shape[1:])
    # Asked of the row alone, not of this box: all processes have to come to one answer.
    if width % block or parameter.sizes[1:] != parameter.global_shape[1:] or len(shape) != 1:
        return None
    in_row = width // block
    assert shape[0] == parameter.sizes[0] * in_row, f"{shape[0]} blocks for a box of {parameter.sizes}"
    whole, start = (parameter.global_shape[0] * in_row,), (parameter.offsets[0] * in_row,)
    return ShardBox(whole, start, shape, parameter.replicas, parameter.is_writer)
