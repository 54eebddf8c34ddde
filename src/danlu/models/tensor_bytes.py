"""Tensors as the bytes that `tensor_file` places: types, exact reads, and the check for spoilt values."""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO

import torch
from torch import Tensor

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
STORED_AS = {dtype: name for name, dtype in DTYPES.items()}
BUFFER_BYTES = 1 << 22
"""What reading and writing take beside the model itself."""


def raw_bytes(values: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, to read into or write from."""
    return values.view(torch.uint8).numpy().data


def read_exactly(handle: FileIO, values: Tensor) -> int:
    """Fills `values` from the file; returns how many bytes are missing because the file ended."""
    room = raw_bytes(values)
    while room:
        count = handle.readinto(room)
        if not count:
            break
        room = room[count:]
    return len(room)


def is_finite(values: Tensor) -> bool:
    """No NaN and no infinity. One pass without a temporary: minimum and maximum carry both."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, end) pairs that cut `total` into pieces of `step`."""
    return ((start, min(start + step, total)) for start in range(0, total, step))
