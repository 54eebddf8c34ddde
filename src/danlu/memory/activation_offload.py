"""Activations that wait for the backward pass off the device: in the host's memory, or on its disk.

Tensors that autograd saves are copied out when they are packed and copied back when they are unpacked. On CUDA copies
run on a stream of their own, parallel to the computation, and the backward pass prefetches the next tensors. On a CPU
saved tensors are in the host's memory already; with a folder they go to a mapped file without a name, of which the
system need hold nothing until the backward pass.

Weights are left where they are, small tensors too. It works together with recomputation, which then offloads the inputs
of recomputed functions: with `full`, one tensor a layer.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from danlu.memory.pages import PageFile, whole_pages
from danlu.recipe.sections import Memory

_MIN_BYTES = 1 << 16
"""Tensors of at most this many bytes stay on the device: the copies would take longer than they save."""
_PREFETCH = 2
"""Tensors that are prefetched before the backward pass asks for them."""
_MAX_COPIES = 8
"""Tensors that may be copied out at a time; the computation waits for the first of more, or nothing would be gained
where it is faster than the copies."""


def offload_for(device: torch.device, folder: Path | None, *, min_bytes: int = _MIN_BYTES) -> ActivationOffload | None:
    """The offload of activations of a run on this device; None where they stay (see `unused_notes`).

    folder: of the mapped files, for a run on a CPU. min_bytes: tensors of no more bytes stay where they are.
    """
    if device.type == "cuda":
        return ActivationOffload(lambda: _PinnedMemory(device), min_bytes)
    return None if folder is None else ActivationOffload(lambda: _MappedFiles(folder), min_bytes)


def unused_notes(section: Memory, device: torch.device) -> list[str]:
    """Notes for the console on parts of `memory.offload`, and on `memory.folder`, that change nothing on this
    device."""
    notes = []
    if "activations" in section.offload and device.type == "cuda" and section.folder is not None:
        notes.append("memory.folder: activations of a GPU go to the host's memory, not to the folder")
    if section.folder is not None:
        return notes
    if "activations" in section.offload and device.type != "cuda":
        notes.append(
            "memory.offload: on a CPU activations are in the host's memory already, and stay there; with memory.folder "
            "they would go to a file on that disk"
        )
    unmoved = [part for part in section.offload if part != "activations"]
    if unmoved and device.type == "cpu":
        notes.append(
            f"memory.offload: {', '.join(unmoved)}: on a CPU they are in the host's memory already, and stay there; "
            "with memory.folder they would go to a file on that disk"
        )
    return notes


class _Copy(Protocol):
    """The copy of one tensor off the device."""

    def prefetch(self) -> None: ...  # begins to copy it back

    def tensor(self) -> Tensor: ...  # it is back when this returns


class _Target(Protocol):
    """The destination of tensors of one forward pass."""

    def offload(self, tensor: Tensor) -> _Copy: ...

    def finish(self) -> None: ...  # the forward pass is over


class ActivationOffload:
    """Enter `active()` around every forward pass; the backward pass needs nothing."""

    def __init__(self, new_target: Callable[[], _Target], min_bytes: int) -> None:
        self._new_target = new_target
        self._min_bytes = min_bytes
        self.offloaded_bytes = 0
        """The bytes offloaded in the last forward pass."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Offloads the tensors that autograd saves in the block."""
        forward_pass = _ForwardPass(self._new_target(), self._min_bytes)
        with forward_pass.hooks():
            yield
        forward_pass.end()
        self.offloaded_bytes = forward_pass.offloaded_bytes


class _OffloadedStorage:
    """A storage that was copied out, and the tensor it was copied back to, while operations may need it."""

    def __init__(self, copy: _Copy, forward_pass: _ForwardPass) -> None:
        self.copy = copy
        self.forward_pass = forward_pass
        self._on_device: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._on_device is None:
            self.forward_pass.prefetch_before(self)
            self._on_device = self.copy.tensor()
        return self._on_device


@dataclass(frozen=True)
class _View:
    """A tensor within a storage that was offloaded."""

    storage: _OffloadedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return self.storage.tensor().view(self.dtype).as_strided(self.size, self.stride, self.offset)


class _ForwardPass:
    """The tensors that one forward pass offloads, each storage once however many operations save it."""

    def __init__(self, target: _Target, min_bytes: int) -> None:
        self._target = target
        self._min_bytes = min_bytes
        # Address of a storage -> (weak reference, version of its content, offloaded storage).
        self._by_storage: dict[int, tuple[StorageWeakRef, int, weakref.ref[_OffloadedStorage]]] = {}
        self._in_order: deque[weakref.ref[_OffloadedStorage]] = deque()
        self.offloaded_bytes = 0

    def hooks(self) -> AbstractContextManager[None]:
        """The saved_tensors_hooks of this pass."""
        return saved_tensors_hooks(self._pack, lambda saved: saved.tensor() if isinstance(saved, _View) else saved)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        # A parameter or a view of one: linear layers save their weight transposed.
        is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if storage.nbytes() <= self._min_bytes or is_weight or tensor.layout != torch.strided:
            return tensor.detach()
        # By the storage and its content: a tensor that was changed in place is another one. The weak reference keeps
        # the address from being given to another storage.
        _, version, ref = self._by_storage.get(storage._cdata, (None, -1, None))
        offloaded = None if ref is None else ref()
        if offloaded is None or version != tensor._version:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            offloaded = _OffloadedStorage(self._target.offload(flat), self)
            self._by_storage[storage._cdata] = StorageWeakRef(storage), tensor._version, weakref.ref(offloaded)
            self._in_order.append(weakref.ref(offloaded))
            self.offloaded_bytes += storage.nbytes()
        return _View(offloaded, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def end(self) -> None:
        """The pass is over: storages may be changed or freed from here on."""
        self._by_storage = {}
        self._target.finish()

    def prefetch_before(self, asked: _OffloadedStorage) -> None:
        """Prefetches the tensors that were offloaded just before this one: the backward pass asks in the
        reverse order.
        """
        while self._in_order and self._in_order[-1]() is None:  # used and freed
            self._in_order.pop()
        is_earlier = False
        prefetched = 0
        for ref in reversed(self._in_order):
            offloaded = ref()
            if is_earlier and offloaded is not None:
                offloaded.copy.prefetch()
                prefetched += 1
                if prefetched == _PREFETCH:
                    return
            is_earlier = is_earlier or offloaded is asked


# ── a file, for the CPU ──


@dataclass(frozen=True)
class _MappedFiles:
    """A file for each tensor, as their number and sizes are not known beforehand; it goes with the tensor."""

    folder: Path

    def offload(self, tensor: Tensor) -> _MappedCopy:
        return _MappedCopy(tensor, self.folder)

    def finish(self) -> None:
        pass


class _MappedCopy:
    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self._size = whole_pages(tensor.nbytes)
        self._file = PageFile(self._size, folder, what="activations", field="memory.folder")
        self._mapped = self._file.tensor(0, tensor.shape, tensor.dtype)
        self._mapped.copy_(tensor)
        self._file.release(0, self._size)

    def prefetch(self) -> None:
        self._file.prefetch(0, self._size)

    def tensor(self) -> Tensor:
        self._file.fetch(0, self._size, to_write=False)
        return self._mapped


# ── pinned memory, for CUDA ──


class _PinnedMemory:
    """The host's memory that a GPU copies to and from by itself, on another stream than the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = _copy_stream(device)
        # Tensors that are being copied out: their memory must not be given to others before it has been read.
        self._copying: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def offload(self, tensor: Tensor) -> _PinnedCopy:
        while self._copying and (len(self._copying) >= _MAX_COPIES or self._copying[0][0].query()):
            copied, _ = self._copying.popleft()
            torch.cuda.current_stream(self._device).wait_event(copied)
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self._device))  # until it has been computed
        with torch.cuda.stream(self.stream):
            on_host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self.stream)
        self._copying.append((copied, tensor))
        return _PinnedCopy(on_host, self._device, self.stream)

    def finish(self) -> None:
        """The stream that computes waits for the copies that are under way: from here on their memory is free."""
        torch.cuda.current_stream(self._device).wait_stream(self.stream)
        self._copying.clear()


class _PinnedCopy:
    def __init__(self, on_host: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._on_host = on_host
        self._device = device
        self._stream = stream
        self._on_device: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def prefetch(self) -> None:
        if self._on_device is not None:
            return
        # Made on the stream that computes, which is where it will be used and freed; the copy begins when whatever had
        # this memory before is done with it.
        self._on_device = torch.empty_like(self._on_host, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._on_device.copy_(self._on_host, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._stream)
        # Freed before it was used, its memory would be given away while the copy still writes.
        self._on_device.record_stream(self._stream)

    def tensor(self) -> Tensor:
        self.prefetch()
        assert self._on_device is not None and self._arrived is not None, "it was prefetched"
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return self._on_device


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One copy stream for all passes on a device: streams are few."""
    return torch.cuda.Stream(device)
