"""Activations that wait for the backward pass elsewhere than on the device: in the host's memory, or on its disk.

What autograd keeps is copied away when it is saved and brought back when it is asked for. On CUDA copies run on a
stream of their own beside the computation, and the backward pass calls back what it will need next. On a CPU what is
kept is in the host's memory already; with a folder it goes to a file that is mapped into memory, without a name, of
which the system need hold nothing until the backward pass.

Weights are left where they are, small tensors too. It works together with recomputation, which then sends the inputs of
what is made again: with `full`, one tensor a layer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from danlu.memory.page_file import PageFile, whole_pages

_SMALL = 1 << 16
"""Bytes up to which a tensor stays: its way there and back would take longer than it is worth."""
_AHEAD = 2
"""Tensors that are called back before the backward pass asks for them."""
_LEAVING = 8
"""Tensors that may be on their way at a time; the computation waits for the first of more, or nothing would be gained
where it is faster than the way to the host."""


def offload_for(device: torch.device, folder: Path | None, *, small: int = _SMALL) -> ActivationOffload | None:
    """Where activations of a run on this device go; None where they stay (see `unused_note`).

    small: bytes up to which a tensor stays where it is.
    """
    if device.type == "cuda":
        return ActivationOffload(lambda: _PinnedMemory(device), small)
    return None if folder is None else ActivationOffload(lambda: _FilePlaces(folder), small)


def unused_note(device: torch.device, folder: Path | None) -> str | None:
    """What a user who asked for offloaded activations should be told."""
    if device.type != "cuda" and folder is None:
        return (
            "memory.offload: on a CPU activations are in the host's memory already, and stay there; with memory.folder "
            "they would go to a file on that disk"
        )
    if device.type == "cuda" and folder is not None:
        return "memory.folder: activations of a GPU go to the host's memory, not to the folder"
    return None


class _Away(Protocol):
    """One tensor that is elsewhere."""

    def call(self) -> None: ...  # begins to bring it back

    def tensor(self) -> Tensor: ...  # brings it back


class _Places(Protocol):
    """Where tensors of one forward pass go."""

    def send(self, tensor: Tensor) -> _Away: ...

    def settle(self) -> None: ...  # the forward pass is over


class ActivationOffload:
    """Enter `active()` around every forward pass; the backward pass needs nothing."""

    def __init__(self, places: Any, small: int) -> None:
        self._places = places
        self._small = small
        self.sent_bytes = 0
        """In the last forward pass."""

    @contextmanager
    def active(self) -> Iterator[None]:
        one_pass = _Pass(self._places(), self._small)
        with one_pass.hooks():
            yield
        one_pass.end()
        self.sent_bytes = one_pass.sent_bytes


class _Sent:
    """A storage that is elsewhere, and its tensor while it is back: for as long as an operation may need it."""

    def __init__(self, away: _Away, one_pass: _Pass) -> None:
        self.away = away
        self.one_pass = one_pass
        self._back: Tensor | None = None

    def tensor(self) -> Tensor:
        if self._back is None:
            self.one_pass.asked(self)
            self._back = self.away.tensor()
        return self._back


@dataclass(frozen=True)
class _View:
    """A tensor within a storage that is elsewhere."""

    sent: _Sent
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return self.sent.tensor().view(self.dtype).as_strided(self.size, self.stride, self.offset)


class _Pass:
    """One forward pass: what it sent, each storage once however many operations save it."""

    def __init__(self, places: _Places, small: int) -> None:
        self._places = places
        self._small = small
        self._known: dict[int, tuple[StorageWeakRef, int, weakref.ref[_Sent]]] = {}
        self._order: deque[weakref.ref[_Sent]] = deque()
        self.sent_bytes = 0

    def hooks(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self._pack, lambda kept: kept.tensor() if isinstance(kept, _View) else kept)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        storage = tensor.untyped_storage()
        if storage.nbytes() <= self._small or _is_weight(tensor) or tensor.layout != torch.strided:
            return tensor.detach()
        # By the storage and its content: a tensor that was changed in place is another one. The weak reference keeps
        # the address from being given to another storage.
        known = self._known.get(storage._cdata)
        sent, version = (None, -1) if known is None else (known[2](), known[1])
        if sent is None or version != tensor._version:
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)  # type: ignore[call-overload]
            sent = _Sent(self._places.send(flat), self)
            self._known[storage._cdata] = StorageWeakRef(storage), tensor._version, weakref.ref(sent)
            self._order.append(weakref.ref(sent))
            self.sent_bytes += storage.nbytes()
        return _View(sent, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def end(self) -> None:
        self._known = {}
        self._places.settle()

    def asked(self, sent: _Sent) -> None:
        """What was sent last is asked for first: those before it are called back."""
        while self._order and self._order[-1]() is None:
            self._order.pop()
        before = False
        called = 0
        for ref in reversed(self._order):
            one = ref()
            if before and one is not None:
                one.away.call()
                called += 1
                if called == _AHEAD:
                    return
            before = before or one is sent


def _is_weight(tensor: Tensor) -> bool:
    """A parameter or a view of one: linear layers save their weight transposed."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


# ── a file, for the CPU ──


class _FilePlaces:
    """A file for each tensor, as their number and sizes are not known beforehand; it goes with the tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def send(self, tensor: Tensor) -> _InFile:
        return _InFile(tensor, self._folder)

    def settle(self) -> None:
        pass


class _InFile:
    def __init__(self, tensor: Tensor, folder: Path) -> None:
        self._size = whole_pages(tensor.nbytes)
        self._file = PageFile(self._size, folder, what="activations", field="memory.folder")
        self._there = self._file.tensor(0, tensor.shape, tensor.dtype)
        self._there.copy_(tensor)
        self._file.release(0, self._size)

    def call(self) -> None:
        self._file.prefetch(0, self._size)

    def tensor(self) -> Tensor:
        self._file.fetch(0, self._size, to_write=False)
        return self._there


# ── pinned memory, for CUDA ──


class _PinnedMemory:
    """The host's memory that a GPU copies to and from by itself, on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = _stream(device)
        # Tensors on their way, which must not be given to others before they have been read.
        self._leaving: deque[tuple[torch.cuda.Event, Tensor]] = deque()

    def send(self, tensor: Tensor) -> _Pinned:
        while self._leaving and (len(self._leaving) >= _LEAVING or self._leaving[0][0].query()):
            left, _ = self._leaving[0]
            torch.cuda.current_stream(self._device).wait_event(left)
            self._leaving.popleft()
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(torch.cuda.current_stream(self._device))  # until it has been made
        with torch.cuda.stream(self.stream):
            there.copy_(tensor, non_blocking=True)
            left = torch.cuda.Event()
            left.record(self.stream)
        self._leaving.append((left, tensor))
        return _Pinned(there, self._device, self.stream)

    def settle(self) -> None:
        """The stream that computes waits for what is still under way: from here on its memory is free."""
        torch.cuda.current_stream(self._device).wait_stream(self.stream)
        self._leaving.clear()


class _Pinned:
    def __init__(self, there: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._there = there
        self._device = device
        self._stream = stream
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def call(self) -> None:
        if self._back is not None:
            return
        # Made on the stream that computes, which is where it will be used and freed; the copy begins when whatever had
        # this memory before is done with it.
        self._back = torch.empty_like(self._there, device=self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._back.copy_(self._there, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._stream)
        # Freed before it was used, its memory would be given away while the copy still writes.
        self._back.record_stream(self._stream)

    def tensor(self) -> Tensor:
        self.call()
        assert self._back is not None and self._arrived is not None, "it was called back"
        torch.cuda.current_stream(self._device).wait_event(self._arrived)
        return self._back


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all passes on a device: streams are few."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
