"""Moving tensors to a device: from another one, where a model is on several devices of one process, and from
the host.
"""

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


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device, copied without the host waiting for the device."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
