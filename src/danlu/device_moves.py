"""The one place where tensors of a step go from device to device, where a model lies on several of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def move(x: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on another device; in the backward pass its gradient goes back the same way."""
    return x.to(device)


def move_beside(x: Tensor, other: Tensor) -> Tensor:
    """A tensor on the device of another one; itself where it is there."""
    return x if x.device == other.device else move(x, other.device)
