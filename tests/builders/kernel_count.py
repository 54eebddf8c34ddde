"""Counting the operations that would be kernels on a GPU."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):
    """Counts operations that would be a kernel on a GPU: tensors of `min_numel` numbers or more, no views."""

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

    def __init__(self, min_numel: int) -> None:
        super().__init__()
        self.min_numel, self.names = min_numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [value for value in (result, *args) if isinstance(value, Tensor)]
        if name not in self.VIEWS and any(tensor.numel() >= self.min_numel for tensor in tensors):
            self.names.append(name)
        return result
