"""Gradients of which most rows are zero: an embedding's, when a step sees few of its words.

A step of 1024 tokens touches at most 1024 of 128256 rows. Held as rows, that gradient takes 2 MB instead of 260, and it
is made whole only while the optimizer uses it. They are torch's COO tensors: V rows, n of them kept, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

# Above this share of rows, the rows and their numbers are no smaller than the whole while both are summed.
MOST_ROWS = 0.25


@torch.no_grad()
def compact(parameters: Iterable[Parameter]) -> None:
    """Sums rows that are in a gradient twice, as after several micro-batches; makes a well-filled gradient whole."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            grad = parameter.grad.coalesce()
            parameter.grad = grad.to_dense() if grad._nnz() > MOST_ROWS * grad.shape[0] else grad


def numbers(grad: Tensor) -> Tensor:
    """The stored elements of a gradient that is whole or `compact`: [n, D] of rows, else the gradient itself."""
    return grad._values() if grad.is_sparse else grad


@torch.no_grad()
def make_whole(parameter: Parameter) -> None:
    """Replaces a gradient of rows by [V, D]."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def is_rows(parameter: Parameter) -> bool:
    """Whether the gradient is one of rows."""
    return parameter.grad is not None and parameter.grad.is_sparse
