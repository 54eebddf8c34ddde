"""The box of a tensor of optimizer state, from the box of the parameter that it belongs to."""

from __future__ import annotations

from torch import Tensor

from danlu.core.shard_box import ShardBox


def state_box(state: Tensor, parameter: ShardBox) -> ShardBox:
    """The box of one state tensor: the parameter's own, where it has its shape.

    A number for all of the parameter (shape [], a step counter) is saved once, by whoever saves its first element.
    State of another shape belongs to the parameter's box and cannot be cut further (`cannot_be_cut`).
    """
    shape = tuple(state.shape)
    if not shape:
        first = parameter.is_writer and not any(parameter.offsets) and (parameter.is_full or all(parameter.sizes))
        return ShardBox((), (), (), parameter.replicas, first)
    if parameter.is_full and shape != parameter.sizes:
        return ShardBox.full(shape, replicas=parameter.replicas, is_writer=parameter.is_writer)
    return parameter


def cannot_be_cut(box: ShardBox, tensor: Tensor) -> bool:
    """Whether a tensor belongs to a part of a parameter without having its shape, as moments in blocks do.

    Nobody can say which of its numbers are of which rows, so it loads into the same box alone.
    """
    return not box.is_full and tuple(tensor.shape) != box.sizes
