"""Functions whose tensors are dropped after the forward pass and made again, once, in the backward pass.

A *frame* is one call of a function on its inputs. Autograd keeps the inputs; whatever the function saves inside, and
its output where a later operation saves that, are numbers and places to autograd, for which the frame runs the function
again when the first of them is asked for. Each tensor is let go of as soon as its operation has had it.

torch.utils.checkpoint does the first half of this. What it lacks is the second: without outputs that are dropped too, a
norm or an attention alone could not be made again for less than it saves, since the product behind it saves its output.
Its selective form, which watches every operator, refuses results that are changed in place, as those of adapters'
products are, and its watching takes six times as long as ours (torch 2.13, a step of five layers of width 32).

The same numbers come back only if the function is deterministic: no random numbers of torch's (danlu's dropout is
counted, not drawn), no state that changes between forward and backward. torch.compile cannot follow frames: a model is
one or the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from danlu.errors import TrainingError

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Pack and unpack of saved_tensors_hooks."""


class RecomputedFunction:
    """A function [tensors and whatever else] -> one tensor, each call of which is a frame.

    A class and no closure, so that a copy of a model has frames of its own.

    where: what it is part of, for messages. within: the layer in which outputs are dropped too.
    """

    def __init__(
        self, function: Callable[..., Tensor], where: str, within: OutputDroppingFunction | None = None
    ) -> None:
        self.function = function
        self.where = where
        self.within = within

    def __call__(self, *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.function(*args)
        frame = _Frame(self.function, self.where, args)
        with saved_tensors_hooks(frame.pack, _unpack):
            y = self.function(*args)
        offered = self.within is not None and self.within.outputs is not None and self.within.outputs.offer(frame, y)
        frame.close(offered)
        return y


class OutputDroppingFunction:
    """A function in which operations that save the output of a frame keep the frame instead."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.outputs: _Outputs | None = None

    def __call__(self, *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.function(*args)
        before, self.outputs = self.outputs, _Outputs()
        try:
            with saved_tensors_hooks(self.outputs.pack, _unpack):
                return self.function(*args)
        finally:
            self.outputs.close()
            self.outputs = before


class _Place(NamedTuple):
    """Where a tensor lies in the storage of another."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor, base: int = 0) -> _Place:
        return _Place(tensor.size(), tensor.stride(), int(tensor.storage_offset()) - base)

    def within(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class _Handle:
    """What autograd keeps for a tensor that a frame makes again; when it goes, so does the tensor."""

    __slots__ = ("__weakref__", "frame")

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame

    def tensor(self) -> Tensor:
        return self.frame.remade(self)


@dataclass(frozen=True)
class _PartOf:
    """A tensor that lies within the output of a frame, or within one of its inputs."""

    whole: _Handle | _Input
    place: _Place | None  # None: it is the whole

    def tensor(self) -> Tensor:
        whole = self.whole.tensor()
        return whole if self.place is None else self.place.within(whole)


@dataclass(frozen=True)
class _Input:
    frame: _Frame
    number: int

    def tensor(self) -> Tensor:
        return self.frame.input(self.number)


@dataclass(frozen=True)
class _PassedOn:
    """A tensor that is kept as it would be without us: by the hooks around, or as it is."""

    kept: Any
    unpack: Callable[[Any], Tensor] | None
    version: int = 0

    def tensor(self) -> Tensor:
        if self.unpack is not None:
            return self.unpack(self.kept)
        # Autograd checks this itself where it has no hooks to go through.
        assert self.kept._version == self.version, "a tensor that the backward pass needs was changed in place"
        return cast(Tensor, self.kept)


def _unpack(handle: _Handle | _PartOf | _PassedOn) -> Tensor:
    return handle.tensor()


class _Enough(Exception):
    """All that is still wanted has been made again."""


class _Frame:
    def __init__(self, function: Callable[..., Tensor], where: str, args: tuple[Any, ...]) -> None:
        self._function = function
        self._where = where
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        self._gradients = [tensor.requires_grad for tensor in tensors]
        self._args = tuple(None if isinstance(arg, Tensor) else arg for arg in args)
        self._places = [index for index, arg in enumerate(args) if isinstance(arg, Tensor)]
        self._around = hooks_around()
        self._kept: list[_PassedOn] | None = None  # the inputs, once there is something to be made of them
        # During the forward pass, inputs by their storage: what is saved of them needs not be made again.
        self._input_at: dict[int, tuple[int, Tensor]] = {
            tensor.untyped_storage()._cdata: (number, tensor) for number, tensor in enumerate(tensors)
        }
        self._tensors_in = tensors
        self._handles: list[weakref.ref[_Handle] | None] = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._output: weakref.ref[_Handle] | None = None
        self._output_place: _Place | None = None
        self._tensors: weakref.WeakKeyDictionary[_Handle, Tensor] = weakref.WeakKeyDictionary()

    # ── forward ──

    def pack(self, tensor: Tensor) -> _Handle | _PartOf:
        self.keep_inputs()
        self._shapes.append((tensor.shape, tensor.dtype))
        found = self._input_at.get(tensor.untyped_storage()._cdata)
        part = None if found is None else _part_of_input(tensor, *found)
        if part is not None:
            self._handles.append(None)
            number, place = part
            return _PartOf(_Input(self, number), place)
        handle = _Handle(self)
        self._handles.append(weakref.ref(handle))
        return handle

    def shares(self, y: Tensor) -> bool:
        """Whether the output lies in one of the inputs, which are kept anyway."""
        return y.untyped_storage()._cdata in self._input_at

    def output(self, y: Tensor) -> _Handle:
        handle = _Handle(self)
        self._output, self._output_place = weakref.ref(handle), _Place.of(y)
        return handle

    def close(self, offered: bool) -> None:
        """The function has run; with its output on offer, the inputs are held until it is known who saves it."""
        self._input_at = {}
        if not offered:
            self.let_go()

    def let_go(self) -> None:
        self._tensors_in, self._around = [], None

    def keep_inputs(self) -> None:
        if self._kept is None:
            self._kept = [_passed_on(tensor, self._around) for tensor in self._tensors_in]

    # ── backward ──

    def input(self, number: int) -> Tensor:
        assert self._kept is not None, "what is asked for was packed"
        return self._kept[number].tensor().detach()

    def remade(self, handle: _Handle) -> Tensor:
        if handle not in self._tensors:
            self._remake()
        return self._tensors[handle]

    def _remake(self) -> None:
        wanted = [None if ref is None else ref() for ref in self._handles]  # holds them until all are made
        output = None if self._output is None else self._output()
        last = max((number for number, handle in enumerate(wanted) if handle is not None), default=-1)
        count = 0

        def record(tensor: Tensor) -> None:
            nonlocal count
            number, count = count, count + 1
            if number >= len(wanted) or (tensor.shape, tensor.dtype) != self._shapes[number]:
                raise self._another()
            if (handle := wanted[number]) is not None:
                self._tensors[handle] = tensor.detach()
            if number == last and output is None:
                raise _Enough

        with torch.enable_grad(), saved_tensors_hooks(record, _never):
            try:
                y = self._function(*self._arguments())
            except _Enough:
                return
        if count != len(wanted):
            raise self._another()
        if output is not None:
            if _Place.of(y) != self._output_place:
                raise self._another()
            self._tensors[output] = y.detach()

    def _arguments(self) -> Iterator[Any]:
        args = list(self._args)
        for number, (place, gradient) in enumerate(zip(self._places, self._gradients, strict=True)):
            args[place] = self.input(number).requires_grad_(gradient)
        return iter(args)

    def _another(self) -> TrainingError:
        return TrainingError(
            f"{self._where}: recomputed in the backward pass, it did not do what it did in the forward pass. Something "
            "in it depends on what has changed since; train with `memory: {recompute: none}`, and please report this"
        )


def _never(_: Any) -> Tensor:
    raise AssertionError("what is recomputed for a backward pass has none of its own")


def _part_of_input(tensor: Tensor, number: int, whole: Tensor) -> tuple[int, _Place | None] | None:
    """Which input a saved tensor is part of, and where; None when it reaches beyond."""
    if tensor.dtype != whole.dtype:
        return None
    base = int(whole.storage_offset())
    place = _Place.of(tensor, base)
    if place == _Place.of(whole, base):
        return number, None
    reach = sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True))
    inside = tensor.numel() == 0 or (place.offset >= 0 and place.offset + reach < whole.numel())
    return (number, place) if inside and whole.is_contiguous() else None


class _Outputs:
    """The outputs of frames in one call of a layer, by their storages."""

    def __init__(self) -> None:
        self._around = hooks_around()
        # The weak reference keeps the address from being given to another storage, though not the memory itself.
        self._found: dict[int, tuple[StorageWeakRef, int, int, _Handle]] = {}

    def offer(self, frame: _Frame, y: Tensor) -> bool:
        """What saves y from here on keeps the frame."""
        if not y.requires_grad or frame.shares(y):
            return False
        storage = y.untyped_storage()
        found = StorageWeakRef(storage), y._version, int(y.storage_offset()), frame.output(y)
        self._found[storage._cdata] = found
        return True

    def close(self) -> None:
        """The layer has run."""
        for *_, handle in self._found.values():
            handle.frame.let_go()
        self._found, self._around = {}, None

    def pack(self, tensor: Tensor) -> _PartOf | _PassedOn:
        found = self._found.get(tensor.untyped_storage()._cdata)
        if found is not None:
            _, version, base, handle = found
            if tensor._version == version:  # else it has been changed in place since
                handle.frame.keep_inputs()
                return _PartOf(handle, _Place.of(tensor, base))
        return _passed_on(tensor, self._around)


def hooks_around() -> Hooks | None:
    """The innermost pair of saved_tensors_hooks that is in force; torch has no public name for it (2.8 to 2.13)."""
    return cast("Hooks | None", torch._C._autograd._top_saved_tensors_default_hooks(False))


def _passed_on(tensor: Tensor, around: Hooks | None) -> _PassedOn:
    if around is None:
        # Not the tensor itself: saved by the operation that made it, it would hold the graph that holds it.
        return _PassedOn(tensor.detach(), None, tensor._version)
    pack, unpack = around
    return _PassedOn(pack(tensor), unpack)
