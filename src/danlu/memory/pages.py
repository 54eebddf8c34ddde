"""Files mapped into memory (mmap(2)), and optimizer state in their pages, one parameter's in use at a time.

Pages that are not in use the system may write out and drop when memory is short, and bring back. Other memory of a
process can only go to swap, or end the run when there is none left. The file has no name: when the process ends,
however it does, nothing of it is left, and nobody else can find it.

These are the paged optimizers of QLoRA (arXiv:2305.14314, section 3) by other means. On CUDA the state lives in the
host's memory, and that of a parameter visits the device for its update.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from danlu.core.errors import ResourceError
from danlu.optim.adamw import State, TensorSpecs

# Linux 5.14 and later: make pages present, to be read or to be written, at once. Without them each page of 4 KiB is a
# fault of its own.
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_ALIGNMENT = 64  # of a tensor, in bytes: what torch gives its own


class Extent(NamedTuple):
    """The place of a tensor's bytes in a file: whole pages, so that they can be released alone."""

    start: int
    size: int


class PageFile:
    """A mapped file of `size` bytes, all of them reserved at once, so that it does not fail halfway.

    Args:
        folder: where the file is; None for the host's memory instead, which does not come and go.
        what, field: for messages: the content, and the field of the recipe that names the folder.
    Raises ResourceError when the file cannot be made there.
    """

    def __init__(self, size: int, folder: Path | None, *, what: str, field: str) -> None:
        self.in_file = folder is not None
        size = max(size, 1)
        self._map = mmap.mmap(-1, size) if folder is None else _mapped_file(folder, size, what, field)

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A tensor on the bytes from an aligned offset on, whatever they hold; pages never written hold zeros."""
        count = shape.numel()
        if not count:  # torch takes no buffer for nothing
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def fetch(self, start: int, size: int, *, to_write: bool) -> None:
        """Brings pages into memory; they are there when this returns. to_write: they are about to be changed."""
        if not self.in_file or not size:
            return
        try:
            self._map.madvise(_POPULATE_WRITE if to_write else _POPULATE_READ, start, size)
        except OSError:  # an older kernel: pages come one by one, as they are touched
            self._map.madvise(mmap.MADV_WILLNEED, start, size)

    def prefetch(self, start: int, size: int) -> None:
        """Begins to read pages from the disk, if they are no longer in the system's cache; does not wait."""
        if self.in_file and size:
            self._map.madvise(mmap.MADV_WILLNEED, start, size)

    def release(self, start: int, size: int) -> None:
        """Takes pages from this process's memory; the file keeps them, in the system's cache or on the disk."""
        if self.in_file and size:
            self._map.madvise(mmap.MADV_DONTNEED, start, size)


def aligned(size: int) -> int:
    """Bytes that a tensor of `size` takes, so that the next begins where torch's own would."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def whole_pages(size: int) -> int:
    """Returns the bytes of the pages that `size` touches: tensors that share no page can be released alone."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def default_folder() -> Path:
    """TMPDIR, or the system's folder for large temporary files: /tmp is often memory, which would be no page file."""
    if (tmpdir := os.environ.get("TMPDIR")) is not None:
        return Path(tmpdir)
    large = Path("/var/tmp")
    return large if os.access(large, os.W_OK) else Path(tempfile.gettempdir())


def _mapped_file(folder: Path, size: int, what: str, field: str) -> mmap.mmap:
    """A new file without a name in `folder`, which is made where it is missing, mapped to be read and written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserved now: a disk that fills up later would end the process by a signal, in the middle of a step.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS cannot reserve
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        amount = f"{size / 2**30:.2f} GiB" if size >= 2**24 else f"{size:,} bytes"
        raise ResourceError(
            f"{field}: {folder} cannot hold {amount} of {what}: {error.strerror or error}. Name a folder "
            "on a disk with that much room."
        ) from error


class PagedState:
    """`optim.adamw.StatePages`: room for the state of some parameters, reserved at once, so that none fails later.

    Args:
        specs: the tensors kept for each parameter. field: the field of the recipe that names the folder, for messages.
        folder: where to put the file; None for the host's memory instead. The file has no name: when the process ends,
                however it does, nothing of it is left.
    Raises ResourceError when the file cannot be made there.
    """

    def __init__(
        self, specs: Mapping[Parameter, TensorSpecs], folder: Path | None, *, field: str = "optimizer.folder"
    ) -> None:
        self._specs = dict(specs)
        self._extents: dict[Parameter, Extent] = {}
        end = 0
        for parameter, tensor_specs in self._specs.items():
            size = whole_pages(sum(aligned(spec.bytes) for spec in tensor_specs.values()))
            self._extents[parameter] = Extent(end, size)
            end += size
        self._file = PageFile(end, folder, what="state", field=field)
        self._state: dict[Parameter, State] = {}
        self._next = dict(zip(self._extents, list(self._extents)[1:], strict=False))

    def zeros(self, parameter: Parameter) -> State:
        """The state of a parameter at its beginning; pages that were never written are zeros and take no memory."""
        is_used = parameter in self._state
        state = self.tensors(parameter)
        for tensor in state.values() if is_used else ():
            tensor.zero_()
        return state

    def fill(self, parameter: Parameter, saved: Mapping[str, Tensor]) -> State:
        """The state of a parameter as it was saved; no copy where `saved` holds the pages themselves."""
        state = self.tensors(parameter)
        for name, tensor in state.items():
            if saved[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(saved[name])
        self.release(parameter)
        return state

    @contextmanager
    def fetched(self, parameter: Parameter) -> Iterator[State]:
        """Puts the state of `parameter` on its device within the block; changes to it are kept."""
        state = self.tensors(parameter)
        if parameter.device.type == "cpu":
            if (following := self._next.get(parameter)) is not None:
                self._file.prefetch(*self._extents[following])
            self._file.fetch(*self._extents[parameter], to_write=True)
            yield state
            self.release(parameter)
            return
        on_device = {name: tensor.to(parameter.device) for name, tensor in state.items()}
        yield on_device
        for name, tensor in state.items():
            tensor.copy_(on_device[name])

    def release(self, parameter: Parameter) -> None:
        """Lets go of the pages of a parameter; the file keeps them."""
        self._file.release(*self._extents[parameter])

    def tensors(self, parameter: Parameter) -> State:
        """The state of a parameter in its pages, whatever they hold."""
        if parameter not in self._state:
            self._state[parameter] = state = State()
            offset = self._extents[parameter].start
            for name, spec in self._specs[parameter].items():
                state[name] = self._file.tensor(offset, spec.shape, spec.dtype)
                offset += aligned(spec.bytes)
        return self._state[parameter]


def paged_state(
    specs: Mapping[Parameter, TensorSpecs], folder: str | None, *, field: str = "optimizer.folder"
) -> PagedState:
    """Pages in a file in `folder` or, without one, in the default folder for parameters on CPU and in the host's memory
    for those on a GPU. Raises ResourceError when the file cannot be made there."""
    if folder is not None:
        return PagedState(specs, Path(folder).expanduser(), field=field)
    on_cpu = all(parameter.device.type == "cpu" for parameter in specs)
    return PagedState(specs, default_folder() if on_cpu else None, field=field)
