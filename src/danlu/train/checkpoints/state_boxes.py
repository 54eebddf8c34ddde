"""Which box of a whole an optimizer's state is, from the box of the parameter it belongs to."""

from __future__ import annotations

import math

from torch import Tensor

from danlu.train.checkpoints.shard_files import is_whole
from danlu.types import Piece


def state_piece(state: Tensor, parameter: Piece, *, block: int | None = None) -> Piece:
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
        first = parameter.writes and not any(parameter.start) and (is_whole(parameter) or all(parameter.size))
        return Piece((), (), (), parameter.copies, first)
    if shape == parameter.size:
        return parameter
    if is_whole(parameter):
        return Piece.all_of(shape, copies=parameter.copies, writes=parameter.writes)
    if block is not None and (rows := _rows_of_blocks(shape, parameter, block)) is not None:
        return rows
    return parameter


def _rows_of_blocks(shape: tuple[int, ...], parameter: Piece, block: int) -> Piece | None:
    width = math.prod(parameter.whole[1:])
    # Asked of the row alone, not of this box: all processes have to come to one answer.
    if width % block or parameter.size[1:] != parameter.whole[1:] or len(shape) != 1:
        return None
    in_row = width // block
    assert shape[0] == parameter.size[0] * in_row, f"{shape[0]} blocks for a box of {parameter.size}"
    whole, start = (parameter.whole[0] * in_row,), (parameter.start[0] * in_row,)
    return Piece(whole, start, shape, parameter.copies, parameter.writes)
