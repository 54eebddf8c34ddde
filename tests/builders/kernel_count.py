"""Counting the operations that would be kernels on a GPU."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    """Counts operations that would be a kernel on a GPU: those with at least `least` numbers that are no views."""

    VIEWS = (
        "alias",
        "as_strided",
        "detach",
        "select",
        "slice",
        "split",
        "squeeze",
        "unsqueeze",
        "view",
        "_unsafe_view",
    )

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.names = least, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [one for one in (result, *args) if isinstance(one, Tensor)]
        if name not in self.VIEWS and any(one.numel() >= self.least for one in tensors):
            self.names.append(name)
        return result
