"""Moves between devices that stand for GPUs, recorded in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from danlu.core import device_moves


class Move(NamedTuple):
    """A tensor that went to a device, or whose gradient (forward: False) came back from it."""

    shape: tuple[int, ...]
    device: str
    forward: bool = True


class _Moved(torch.autograd.Function):
    """`x.to(device)`; what comes from the meta device, which has no values, is zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: str, record: list[Move]) -> Tensor:
        ctx.own, ctx.device, ctx.record = x.device, device, record
        record.append(Move(tuple(x.shape), str(device)))
        return _to(x, torch.device(device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.record.append(Move(tuple(grad.shape), str(ctx.device), forward=False))
        return _to(grad, ctx.own), None, None


def _to(x: Tensor, device: torch.device) -> Tensor:
    if x.is_meta and device.type != "meta":
        return torch.zeros_like(x, device=device)
    return x.to(device)


@contextmanager
def recorded() -> Iterator[list[Move]]:
    """A context in which all that moves is recorded, in order."""
    record: list[Move] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_moves, "move", lambda x, device: _Moved.apply(x, device, record))
        yield record
