"""Weights in memory that processes of one machine share: the trainer writes them, a rollout process reads them.

The memory is that of a file without a name, which goes when the last process that has it open ends, however it ends.
There is one copy. Who writes waits until everyone has read the weights before.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.core.errors import ResourceError

_ALIGNMENT = 64


@dataclass(frozen=True)
class StoredTensor:
    """The position of a tensor in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    """The offset of its first byte."""

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def stop(self) -> int:
        return self.start + self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """The file's inherited descriptor and its tensors, which another process needs to open the weights."""

    descriptor: int
    tensors: tuple[StoredTensor, ...]


class SharedWeights:
    """Tensors of a `WeightFile`, mapped into this process."""

    def __init__(self, file: WeightFile) -> None:
        self.file = file
        self._mapped = mmap.mmap(file.descriptor, max(1, _size_of(file.tensors)))
        self._views = {
            each.name: torch.frombuffer(self._mapped, dtype=each.dtype, count=each.elements, offset=each.start).view(
                each.shape
            )
            for each in file.tensors
            if each.elements
        }

    @classmethod
    def create(cls, shapes: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> SharedWeights:
        """Takes the memory for tensors of these shapes and types. Raises ResourceError where there is not enough."""
        tensors: list[StoredTensor] = []
        start = 0
        for name, (shape, dtype) in shapes.items():
            tensors.append(StoredTensor(name, tuple(shape), dtype, start))
            start = -(-tensors[-1].stop // _ALIGNMENT) * _ALIGNMENT
        descriptor = _file_without_a_name()
        try:
            size = max(1, _size_of(tensors))
            if hasattr(os, "posix_fallocate"):  # now, and not when the first weights are written
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise ResourceError(
                f"rollout.staleness: no memory for the {size / 2**30:.2f} GiB of weights that the rollout process is "
                f"handed ({error.strerror}). Use staleness: 0, which needs no second copy, or a smaller model"
            ) from error
        return cls(WeightFile(descriptor, tuple(tensors)))

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies values in; each tensor of the file is among them once."""
        missing = set(self._views)
        with torch.no_grad():
            for name, value in weights:
                if value.numel():
                    self._views[name].copy_(value)
                missing.discard(name)
        assert not missing, f"no values of {sorted(missing)[0]}"

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors by name, on the CPU; views of the memory, for as long as nobody writes."""
        yield from self._views.items()

    def close(self) -> None:
        """Closes this process's descriptor. Its memory is mapped as long as someone has a view."""
        os.close(self.file.descriptor)
        self._views = {}


def _size_of(tensors: Sequence[StoredTensor]) -> int:
    return max((each.stop for each in tensors), default=0)


def _file_without_a_name() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("danlu-weights")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
