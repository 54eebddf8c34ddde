"""A safetensors file written tensor by tensor, where sizes are known only when a tensor is made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from danlu.models.tensor_bytes import STORED_AS, raw_bytes
from danlu.models.tensor_file import encode_header

_METADATA = {"format": "pt"}
_ENTRY = 160
"""What an entry of the header takes at most beside the tensor's name: a type, two sides and two offsets in JSON."""


class TensorStream:
    """Tensors go to the file as they come. The header stands in front, so room is kept for it and filled at the end."""

    def __init__(self, file: Path, names: Iterable[str]) -> None:
        """names: of every tensor that may come."""
        self.file = file
        self.names: list[str] = []
        self.bytes = 0
        self._entries: list[tuple[str, str, tuple[int, ...]]] = []
        self._room = 64 + sum(_ENTRY + len(name) for name in names)
        self._room += -self._room % 8
        self._handle = file.open("wb")
        self._handle.seek(self._room)

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor; of floating-point numbers or bytes."""
        whole = tensor.detach().to("cpu").contiguous()
        kind = "U8" if whole.dtype == torch.uint8 else STORED_AS[whole.dtype]
        self._entries.append((name, kind, tuple(whole.shape)))
        self.names.append(name)
        self.bytes += whole.nbytes
        self._handle.write(raw_bytes(whole.view(-1)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._handle:
            if kind is None:
                header = encode_header(self._entries, _METADATA, self._room)
                assert len(header) == self._room, f"the header takes {len(header)} bytes, kept were {self._room}"
                self._handle.seek(0)
                self._handle.write(header)
