"""Products of few rows with weights, as decoding makes them: a row a sequence, and the same weights all the time.

They are bound by how fast weights are read, and take other orders of the same arithmetic than training's large ones: so
they are made this way only where a `FewRowProducts` is active, which the rollout engine's fast numerics see to.

M rows · I in features · O out features
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS = 64
# MKL reads a weight two to four times as fast when its rows are those of the left matrix: float32, two threads, in us,
# x @ W.T against W @ x.T at 2, 8, 32 rows: [4096, 256] 862/121, 882/279, 882/688; [1376, 512] 480/76, 401/183, 436/382;
# of one row 498/121 and 273/76 where it is filled up to two. Smaller weights gain less, and nothing below this size.
LEAST_WEIGHT = 1 << 14


class FewRowProducts:
    """Makes the products of linear layers in a thread while it is active.

    Weights of another type than activations, such as a trainer's float32 ones, are cast once, not for every token: the
    copies are used as long as their weights do not change.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[int, Tensor, Tensor]] = {}  # by id: version, the weight itself, its copy

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context in which `ops.linear` asks `product`."""
        before = active_products()
        _thread.products = self
        try:
            yield
        finally:
            _thread.products = before

    def clear(self) -> None:
        """Gives the memory of copies back."""
        self._casts = {}

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, I] @ weight [O, I].T, plus bias [O] -> [M, O] in x's dtype."""
        weight = weight if weight.dtype == x.dtype else self._cast(weight, x.dtype)
        rows = x.shape[0]
        if (
            x.dtype != torch.float32
            or x.device.type != "cpu"
            or x.ndim != 2
            or rows > MOST_ROWS
            or weight.numel() < LEAST_WEIGHT
        ):
            return F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        if rows == 1:
            x = torch.cat((x, x))
        y = torch.mm(weight, x.t())[:, :rows].t().contiguous()
        return y if bias is None else y.add_(bias)

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        version, own, copy = self._casts.get(id(weight), (-1, weight, weight))
        if own is weight and version == weight._version and copy.dtype == dtype:
            return copy
        copy = weight.detach().to(dtype)
        self._casts[id(weight)] = (weight._version, weight, copy)
        return copy


class _Thread(threading.local):
    products: FewRowProducts | None = None


_thread = _Thread()


def active_products() -> FewRowProducts | None:
    """What is active in this thread."""
    return _thread.products
