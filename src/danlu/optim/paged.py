"""Optimizer state in pages that the system may take from memory and bring back, one parameter of it at hand at a time.

On CPU the pages are a file mapped into memory: what is not in use counts as the file's cache, which the system writes
out and drops when memory is short. State that a process holds otherwise can only go to swap, or end the run. On CUDA
the state lives in the host's memory, and a parameter's share of it visits the device for its update.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.errors import ResourceError
from danlu.optim.moments import Spec, Specs, State

# Linux 5.14 and later: makes pages present and writable at once. Without it each page of 4 KiB is a fault of its own.
_POPULATE_WRITE = 23
_ALIGNMENT = 64  # of a tensor, in bytes: what torch gives its own


@dataclass(frozen=True)
class _Extent:
    """Where the state of a parameter lies: whole pages, so that it comes and goes alone."""

    start: int
    bytes: int
    offsets: dict[str, int]  # from the start of the mapping


class Pages:
    """Room for the state of some parameters, all of it reserved at once, so that it does not fail halfway.

    Args:
        specs:  what is kept for each parameter.
        folder: where to put the file; None for the host's memory instead. The file has no name: when the process ends,
                however it does, nothing of it is left.
    Raises ResourceError when the file cannot be made there.
    """

    def __init__(self, specs: Mapping[Parameter, Specs], folder: Path | None) -> None:
        self._specs = dict(specs)
        self._extents: dict[Parameter, _Extent] = {}
        end = 0
        for parameter, kept in self._specs.items():
            self._extents[parameter] = extent = _lay_out(kept, end)
            end += extent.bytes
        self._in_file = folder is not None
        self._map = mmap.mmap(-1, max(end, 1)) if folder is None else _mapped_file(folder, max(end, 1))
        self._state: dict[Parameter, State] = {}
        self._next = dict(zip(self._extents, list(self._extents)[1:], strict=False))

    def zeros(self, parameter: Parameter) -> State:
        """The state of a parameter at its beginning; pages that were never written are zeros and take no memory."""
        used = parameter in self._state
        state = self.tensors(parameter)
        for tensor in state.values() if used else ():
            tensor.zero_()
        return state

    def fill(self, parameter: Parameter, saved: Mapping[str, Tensor]) -> State:
        """The state of a parameter as it was saved; no copy where `saved` holds the pages themselves."""
        state = self.tensors(parameter)
        for name, tensor in state.items():
            if saved[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(saved[name])
        self.put_away(parameter)
        return state

    @contextmanager
    def at_hand(self, parameter: Parameter) -> Iterator[State]:
        """Within it the state of `parameter` is on its device; what is changed there is kept."""
        state = self.tensors(parameter)
        if parameter.device.type == "cpu":
            self._fetch(parameter)
            yield state
            self.put_away(parameter)
            return
        there = {name: tensor.to(parameter.device) for name, tensor in state.items()}
        yield there
        for name, tensor in state.items():
            tensor.copy_(there[name])

    def put_away(self, parameter: Parameter) -> None:
        """Lets go of the pages of a parameter; the file keeps them."""
        if self._in_file:
            extent = self._extents[parameter]
            self._map.madvise(mmap.MADV_DONTNEED, extent.start, extent.bytes)

    def _fetch(self, parameter: Parameter) -> None:
        if not self._in_file:
            return
        following = self._next.get(parameter)
        if following is not None:  # is read from the disk meanwhile, if it is no longer in the cache
            extent = self._extents[following]
            self._map.madvise(mmap.MADV_WILLNEED, extent.start, extent.bytes)
        extent = self._extents[parameter]
        try:
            self._map.madvise(_POPULATE_WRITE, extent.start, extent.bytes)
        except OSError:  # an older kernel: pages come one by one, as they are touched
            self._map.madvise(mmap.MADV_WILLNEED, extent.start, extent.bytes)

    def tensors(self, parameter: Parameter) -> State:
        """The state of a parameter in its pages, whatever they hold."""
        if parameter not in self._state:
            offsets = self._extents[parameter].offsets
            self._state[parameter] = {
                name: _tensor_at(self._map, offsets[name], spec) for name, spec in self._specs[parameter].items()
            }
        return self._state[parameter]


def default_folder() -> Path:
    """TMPDIR, or the system's folder for large temporary files: /tmp is often memory, which would be no page file."""
    if (chosen := os.environ.get("TMPDIR")) is not None:
        return Path(chosen)
    large = Path("/var/tmp")
    return large if os.access(large, os.W_OK) else Path(tempfile.gettempdir())


def _lay_out(kept: Specs, start: int) -> _Extent:
    offsets, end = {}, start
    for name, spec in kept.items():
        offsets[name] = end
        end += -(-spec.bytes // _ALIGNMENT) * _ALIGNMENT
    return _Extent(start, -(-(end - start) // mmap.PAGESIZE) * mmap.PAGESIZE, offsets)


def _tensor_at(memory: mmap.mmap, offset: int, spec: Spec) -> Tensor:
    count = spec.shape.numel()
    if not count:  # torch takes no buffer for nothing
        return torch.empty(spec.shape, dtype=spec.dtype)
    return torch.frombuffer(memory, dtype=spec.dtype, count=count, offset=offset).view(spec.shape)


def _mapped_file(folder: Path, size: int) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserved now: a disk that fills up later would end the process by a signal, in the middle of a step.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS cannot reserve
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise ResourceError(
            f"optimizer.folder: {folder} cannot hold the paged optimizer's {size / 2**30:.2f} GiB of state: "
            f"{error.strerror or error}. Name a folder on a disk with that much room."
        ) from error
