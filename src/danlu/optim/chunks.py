"""Cutting a tensor into views, so that work on it needs temporaries of a chunk instead of the whole."""

from __future__ import annotations

import torch
from torch import Tensor


def chunks(tensor: Tensor, elements: int) -> tuple[Tensor, ...]:
    """Views along the first dimension of about `elements` elements each, at least one row; the tensor if it is small.

    Along a dimension, not flat, so that any strides will do: a gradient is often a transposed product. Tensors of one
    shape are always cut alike.
    """
    if tensor.ndim == 0 or tensor.numel() <= elements:
        return (tensor,)
    return torch.split(tensor, max(1, elements * tensor.shape[0] // tensor.numel()))
