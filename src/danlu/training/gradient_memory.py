"""The place of gradients in the host's memory while activations of several micro-batches are allocated and freed."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

_ALIGNMENT = 64  # bytes, as torch aligns its own


def move_out_of_the_heap(parameters: Iterable[Parameter]) -> None:
    """Moves the gradients in the host's memory into pages of their own; called once, after the first backward pass.

    That pass makes gradients while it frees activations, one layer after the other, so they come to lie between all of
    these, and the next micro-batch does not fit into the free memory. Sparse gradients stay where they are. The pages
    are given back with the last gradient in them.
    """
    gradients = [(parameter, gradient) for parameter in parameters if _is_dense_on_host(gradient := parameter.grad)]
    sizes = [-(-gradient.nbytes // _ALIGNMENT) * _ALIGNMENT for _, gradient in gradients]
    if not sum(sizes):
        return
    pages = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = 0
    for place, size in enumerate(sizes):
        parameter, gradient = gradients[place]
        gradients[place] = parameter, gradient.new_empty(0)  # or all would be there twice
        if gradient.numel():
            flat = torch.frombuffer(pages, dtype=gradient.dtype, count=gradient.numel(), offset=start)
            parameter.grad = flat.view(gradient.shape).copy_(gradient)
        start += size


def _is_dense_on_host(gradient: Tensor | None) -> TypeGuard[Tensor]:
    return gradient is not None and gradient.layout == torch.strided and gradient.device.type == "cpu"
