"""Tensors from and to safetensors files by ranges of bytes; no file is mapped into memory, and no tensor held twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from danlu.core.safetensors_format import FLOAT_DTYPES, dtype_name, encode_header, raw_bytes, torch_dtype

DTYPES = {name: torch_dtype(name) for name in FLOAT_DTYPES}
"""The dtypes of weights, by safetensors' names."""
BUFFER_BYTES = 1 << 22
"""The size of the buffer that reading and writing need besides the model itself."""
_ENTRY_BYTES = 160
"""The largest size of a header's entry without the tensor's name: a type, two sides and two offsets in JSON."""


def read_exactly(handle: FileIO, values: Tensor) -> int:
    """Fills `values` from the file; returns how many bytes are missing because the file ended."""
    missing = raw_bytes(values)
    while missing:
        count = handle.readinto(missing)
        if not count:
            break
        missing = missing[count:]
    return len(missing)


def is_finite(values: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity. One pass without a temporary: minimum and maximum carry both."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, end) pairs that cut `total` into stretches of `step`."""
    return ((start, min(start + step, total)) for start in range(0, total, step))


class TensorStream:
    """A safetensors file written tensor by tensor, as they are made. Space for the header is reserved."""

    def __init__(self, file: Path, names: Iterable[str]) -> None:
        """names: of every tensor that may come."""
        self.file = file
        self.names: list[str] = []
        self.bytes = 0
        self._entries: list[tuple[str, str, tuple[int, ...]]] = []
        self._header_bytes = 64 + sum(_ENTRY_BYTES + len(name) for name in names)
        self._header_bytes += -self._header_bytes % 8
        self._handle = file.open("wb")
        self._handle.seek(self._header_bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes the next tensor: floating-point numbers or bytes."""
        whole = tensor.detach().to("cpu").contiguous()
        self._entries.append((name, dtype_name(whole.dtype), tuple(whole.shape)))
        self.names.append(name)
        self.bytes += whole.nbytes
        self._handle.write(raw_bytes(whole))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._handle:
            if kind is None:
                header = encode_header(self._entries, self._header_bytes)
                assert len(header) == self._header_bytes, (
                    f"the header takes {len(header)} bytes, kept were {self._header_bytes}"
                )
                self._handle.seek(0)
                self._handle.write(header)
