"""Distinguishing torch's DTensors from plain tensors without importing them.

`torch.distributed.tensor` imports sympy and takes 40 MiB of resident memory (measured 2026-11-23), while only processes
that shard a model with FSDP2, which imports it, ever have one.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a shard of one that several processes have."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def sharded_dim(tensor: Tensor) -> int:
    """The dimension along which FSDP2 shards a DTensor."""
    assert is_dtensor(tensor), "a plain tensor is not sharded"
    placement: Any = tensor.placements[-1]  # those before it are copies
    return int(placement.dim)
