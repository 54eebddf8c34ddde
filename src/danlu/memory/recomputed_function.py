"""Activation checkpointing of functions: the tensors that they save are dropped after the forward pass, and recomputed.

A *frame* is one call of a function on its inputs, as in torch.utils.checkpoint. Autograd keeps the inputs; it keeps
only handles of the tensors that the function saves inside, and of its output where a later operation saves that. When
the first of them is unpacked in the backward pass, the frame runs the function again, once. Each tensor is freed as
soon as its operation has had it.

torch.utils.checkpoint does the first half of this. It lacks the second: without outputs that are dropped too, a norm or
an attention alone could not be recomputed for less than it saves, since the product behind it saves its output. Its
selective form, which watches every operator, refuses results that are changed in place, as those of adapters' products
are, and its watching takes six times as long as ours (torch 2.13, a step of five layers of width 32).

The same numbers come back only if the function is deterministic: no random numbers of torch's (danlu's dropout is
counted, not drawn), no state that changes between forward and backward. It gets back the values that it made by
`forward_values.from_forward`. torch.compile cannot trace frames: a model is either compiled or recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_unflatten

from danlu.core.errors import TrainingError
from danlu.models.forward_values import ForwardValues

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""The pack and unpack functions of torch.autograd.graph.saved_tensors_hooks."""


Surroundings = Callable[[], AbstractContextManager[None]]
"""Makes the context of a state, as a model with other adapters."""

_surroundings: Surroundings = nullcontext
"""The surroundings of the frames that are made now."""


@contextmanager
def recomputed_within(surroundings: Surroundings) -> Iterator[None]:
    """Enters the context of `surroundings` in the block, and in the backward pass of frames that are made in it.

    It is for a state that a forward pass needs and that is another one when the backward pass runs.
    """
    global _surroundings
    before, _surroundings = _surroundings, surroundings
    try:
        with surroundings():
            yield
    finally:
        _surroundings = before


@contextmanager
def recomputed_also_within(surroundings: Surroundings) -> Iterator[None]:
    """Enters the context of `surroundings` as `recomputed_within` does, inside that which frames have already."""

    @contextmanager
    def both() -> Iterator[None]:
        with before(), surroundings():
            yield

    global _surroundings
    before, _surroundings = _surroundings, both
    try:
        with surroundings():
            yield
    finally:
        _surroundings = before


class RecomputedFunction:
    """A function (tensors and other arguments) -> one tensor, each call of which is a frame.

    Without `within` it may also return several tensors in tuples and dicts, as a layer that gives keys does.

    A class and no closure, so that a copy of a model has frames of its own.

    Args:
        where:  the module it is part of, for messages.
        within: the layer in which operations behind it need not save its output either.
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
        with saved_tensors_hooks(frame.pack, _unpack), frame.forward_values.recorded():
            y = self.function(*args)
        outputs = None if self.within is None else self.within.outputs
        frame.close(output_may_be_saved=outputs is not None and outputs.register(frame, y))
        return y


class OutputDroppingFunction:
    """A function in which an operation that would save the output of a frame keeps a handle to recompute it instead."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.outputs: _FrameOutputs | None = None

    def __call__(self, *args: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return self.function(*args)
        outer_call, self.outputs = self.outputs, _FrameOutputs()  # a call within a call: segments run layers again
        try:
            with saved_tensors_hooks(self.outputs.pack, _unpack):
                return self.function(*args)
        finally:
            self.outputs.close()
            self.outputs = outer_call


class _ViewOf(NamedTuple):
    """A view as arguments of as_strided, its offset counted from that of the tensor it is a view of."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor, base: int = 0) -> _ViewOf:
        return _ViewOf(tensor.size(), tensor.stride(), int(tensor.storage_offset()) - base)

    def applied(self, tensor: Tensor) -> Tensor:
        """The same view of another tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class _Handle:
    """The object that autograd keeps for a tensor that a frame recomputes. Once it is freed, the frame frees the
    tensor.
    """

    __slots__ = ("__weakref__", "frame")

    def __init__(self, frame: _Frame) -> None:
        self.frame = frame

    def tensor(self) -> Tensor:
        return self.frame.recomputed(self)


@dataclass(frozen=True)
class _View:
    """A saved tensor that is a view of the output of a frame, or of one of its inputs."""

    base: _Handle | _Input
    view: _ViewOf | None  # None: it is the base itself

    def tensor(self) -> Tensor:
        base = self.base.tensor()
        return base if self.view is None else self.view.applied(base)


@dataclass(frozen=True)
class _Input:
    """A tensor argument of a frame, by its number among them."""

    frame: _Frame
    number: int

    def tensor(self) -> Tensor:
        return self.frame.input(self.number)


@dataclass(frozen=True)
class _SavedAsUsual:
    """A tensor that is saved as it would be without frames: by the hooks outside of them, or as it is."""

    kept: Any
    unpack: Callable[[Any], Tensor] | None
    version: int = 0

    def tensor(self) -> Tensor:
        if self.unpack is not None:
            return self.unpack(self.kept)
        # Autograd checks this itself where it has no hooks to go through.
        assert self.kept._version == self.version, "a tensor that the backward pass needs was changed in place"
        return cast(Tensor, self.kept)


def _unpack(handle: _Handle | _View | _SavedAsUsual) -> Tensor:
    return handle.tensor()


class _AllRecomputed(Exception):
    """Ends a recomputation early: all that is still wanted is there."""


class _Frame:
    """One call of a function: its inputs, and handles for the tensors that autograd saved inside and of its output."""

    def __init__(self, function: Callable[..., Tensor], where: str, args: tuple[Any, ...]) -> None:
        self._function = function
        self._where = where
        self._surroundings = _surroundings
        self.forward_values = ForwardValues()
        leaves, self._structure = tree_flatten(args)  # tensors may lie in tuples
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._requires_grad = [tensor.requires_grad for tensor in tensors]
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._tensor_indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._outer_hooks = hooks_in_force()
        self._kept: list[_SavedAsUsual] | None = None  # the inputs, once something is to be recomputed from them
        # During the forward pass, inputs by their storage: views of them that are saved need not be recomputed.
        self._input_at: dict[int, tuple[int, Tensor]] = {
            tensor.untyped_storage()._cdata: (number, tensor) for number, tensor in enumerate(tensors)
        }
        self._tensors_in = tensors
        self._handles: list[weakref.ref[_Handle] | None] = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._output: weakref.ref[_Handle] | None = None
        self._output_view: _ViewOf | None = None
        self._tensors: weakref.WeakKeyDictionary[_Handle, Tensor] = weakref.WeakKeyDictionary()

    # ── forward ──

    def pack(self, tensor: Tensor) -> _Handle | _View:
        """Returns the object that autograd keeps for a tensor that the function saves."""
        self.keep_inputs()
        self._shapes.append((tensor.shape, tensor.dtype))
        numbered_input = self._input_at.get(tensor.untyped_storage()._cdata)
        view = None if numbered_input is None else _view_of_input(tensor, numbered_input[1])
        if numbered_input is not None and view is not None:
            self._handles.append(None)
            number, whole = numbered_input
            return _View(_Input(self, number), None if view == _ViewOf.of(whole, int(whole.storage_offset())) else view)
        handle = _Handle(self)
        self._handles.append(weakref.ref(handle))
        return handle

    def is_view_of_input(self, y: Tensor) -> bool:
        """Whether the output lies in the storage of one of the inputs, which are kept anyway."""
        return y.untyped_storage()._cdata in self._input_at

    def output_handle(self, y: Tensor) -> _Handle:
        """A handle for the function's output, from which it is recomputed."""
        handle = _Handle(self)
        self._output, self._output_view = weakref.ref(handle), _ViewOf.of(y)
        return handle

    def close(self, *, output_may_be_saved: bool) -> None:
        """The function has run; inputs stay until it is known whether a later operation saves its output."""
        self._input_at = {}
        if not output_may_be_saved:
            self.release_inputs()

    def release_inputs(self) -> None:
        """Nothing more will be saved: inputs that nothing is recomputed from are freed."""
        self._tensors_in, self._outer_hooks = [], None

    def keep_inputs(self) -> None:
        """Saves the inputs for the backward pass, through the hooks outside of the frame (as for offload)."""
        if self._kept is None:
            self._kept = [_saved_as_usual(tensor, self._outer_hooks) for tensor in self._tensors_in]

    # ── backward ──

    def input(self, number: int) -> Tensor:
        """A tensor argument of the call, detached."""
        assert self._kept is not None, "what is asked for was packed"
        return self._kept[number].tensor().detach()

    def recomputed(self, handle: _Handle) -> Tensor:
        """The tensor of a handle; the function runs again if it is the first that is asked for."""
        if handle not in self._tensors:
            self._recompute()
        return self._tensors[handle]

    def _recompute(self) -> None:
        # Handles that autograd still keeps; strong references, so that none is freed before all are recomputed.
        wanted = [None if ref is None else ref() for ref in self._handles]
        output = None if self._output is None else self._output()
        last = max((number for number, handle in enumerate(wanted) if handle is not None), default=-1)
        count = 0

        def record(tensor: Tensor) -> None:
            nonlocal count
            number, count = count, count + 1
            if number >= len(wanted) or (tensor.shape, tensor.dtype) != self._shapes[number]:
                raise self._differs()
            if (handle := wanted[number]) is not None:
                self._tensors[handle] = tensor.detach()
            if number == last and output is None:
                raise _AllRecomputed

        # With gradients on the function saves the same tensors in the same order; no backward pass runs on them.
        with recomputed_within(self._surroundings), torch.enable_grad(), saved_tensors_hooks(record, _never_unpacked):
            arguments = self._arguments()  # of which outer frames may have to be recomputed
            try:
                with self.forward_values.repeated():
                    y = self._function(*arguments)
            except _AllRecomputed:
                return
        if count != len(wanted):
            raise self._differs()
        if output is not None:
            if _ViewOf.of(y) != self._output_view:
                raise self._differs()
            self._tensors[output] = y.detach()

    def _arguments(self) -> tuple[Any, ...]:
        leaves = list(self._leaves)
        for number, (index, requires_grad) in enumerate(zip(self._tensor_indices, self._requires_grad, strict=True)):
            leaves[index] = self.input(number).requires_grad_(requires_grad)
        arguments: tuple[Any, ...] = tree_unflatten(leaves, self._structure)
        return arguments

    def _differs(self) -> TrainingError:
        return TrainingError(
            f"{self._where}: recomputed in the backward pass, it did not do what it did in the forward pass. Something "
            "in it depends on what has changed since; train with `memory: {recompute: none}`, and please report this"
        )


def _never_unpacked(_: Any) -> Tensor:
    raise AssertionError("what is recomputed for a backward pass has none of its own")


def _view_of_input(tensor: Tensor, whole: Tensor) -> _ViewOf | None:
    """A saved tensor as a view of an input in the same storage; None where it reaches beyond the input."""
    if tensor.dtype != whole.dtype:
        return None
    base = int(whole.storage_offset())
    view = _ViewOf.of(tensor, base)
    if view == _ViewOf.of(whole, base):
        return view
    reach = sum((size - 1) * stride for size, stride in zip(view.size, view.stride, strict=True))
    is_inside = tensor.numel() == 0 or (view.offset >= 0 and view.offset + reach < whole.numel())
    return view if is_inside and whole.is_contiguous() else None


class _FrameOutputs:
    """The outputs of frames in one call of a layer, by their storages."""

    def __init__(self) -> None:
        self._outer_hooks = hooks_in_force()
        # Address of a storage -> (weak reference, version, offset, handle). The weak reference keeps the address from
        # being given to another storage, though not the memory itself.
        self._by_storage: dict[int, tuple[StorageWeakRef, int, int, _Handle]] = {}

    def register(self, frame: _Frame, y: Tensor) -> bool:
        """Whether an operation that saves y from here on keeps a handle of the frame instead."""
        if not y.requires_grad or frame.is_view_of_input(y):
            return False
        storage = y.untyped_storage()
        entry = StorageWeakRef(storage), y._version, int(y.storage_offset()), frame.output_handle(y)
        self._by_storage[storage._cdata] = entry
        return True

    def close(self) -> None:
        """The layer has run."""
        for *_, handle in self._by_storage.values():
            handle.frame.release_inputs()
        self._by_storage, self._outer_hooks = {}, None

    def pack(self, tensor: Tensor) -> _View | _SavedAsUsual:
        """Returns the object that autograd keeps for a tensor that the layer saves outside of frames."""
        entry = self._by_storage.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            _, version, base, handle = entry
            if tensor._version == version:  # else it has been changed in place since, and is another tensor
                handle.frame.keep_inputs()
                return _View(handle, _ViewOf.of(tensor, base))
        return _saved_as_usual(tensor, self._outer_hooks)


def hooks_in_force() -> Hooks | None:
    """The innermost pair of saved_tensors_hooks that is in force; torch has no public name for it (2.8 to 2.13)."""
    return cast("Hooks | None", torch._C._autograd._top_saved_tensors_default_hooks(False))


def _saved_as_usual(tensor: Tensor, outer_hooks: Hooks | None) -> _SavedAsUsual:
    if outer_hooks is None:
        # Not the tensor itself: saved by the operation that made it, it would hold the graph that holds it.
        return _SavedAsUsual(tensor.detach(), None, tensor._version)
    pack, unpack = outer_hooks
    return _SavedAsUsual(pack(tensor), unpack)
