"""Row-sparse gradients: an embedding's, of which a step fills the rows of the tokens it sees.

A step of 1024 tokens touches at most 1024 of 128256 rows. As a sparse COO tensor of torch, with n stored rows of D
columns out of V, that gradient takes 2 MB instead of 260. It is made dense only while the optimizer uses it, if at all.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

# Above this share of rows, indices and values are no smaller than the dense gradient while both are summed.
MAX_ROW_SHARE = 0.25


@torch.no_grad()
def coalesce_gradients(parameters: Iterable[Parameter]) -> None:
    """Sums rows that are stored twice, as after several micro-batches, and makes a well-filled gradient dense."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            grad = parameter.grad.coalesce()
            parameter.grad = grad.to_dense() if grad._nnz() > MAX_ROW_SHARE * grad.shape[0] else grad


def stored_values(grad: Tensor) -> Tensor:
    """The elements that a gradient stores: [n, D] of a coalesced row-sparse one, else the gradient itself."""
    return grad._values() if grad.is_sparse else grad


@torch.no_grad()
def densify_gradient(parameter: Parameter) -> None:
    """Replaces a row-sparse gradient by a dense one [V, D]."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def has_sparse_gradient(parameter: Parameter) -> bool:
    """Whether the parameter's gradient is row-sparse."""
    return parameter.grad is not None and parameter.grad.is_sparse
