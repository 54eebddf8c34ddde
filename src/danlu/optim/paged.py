"""Optimizer state in pages that the system may take from memory and bring back, one parameter of it at hand at a time.

On CPU the pages are a file mapped into memory: what is not in use counts as the file's cache, which the system writes
out and drops when memory is short (`page_file.py`). On CUDA the state lives in the host's memory, and a parameter's
share of it visits the device for its update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.nn import Parameter

from danlu.optim.moments import Specs, State
from danlu.optim.page_file import PageFile, aligned, whole_pages


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
        self._file = PageFile(end, folder, what="state", field="optimizer.folder")
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
        extent = self._extents[parameter]
        self._file.let_go(extent.start, extent.bytes)

    def _fetch(self, parameter: Parameter) -> None:
        following = self._next.get(parameter)
        if following is not None:
            self._file.ahead(self._extents[following].start, self._extents[following].bytes)
        extent = self._extents[parameter]
        self._file.fetch(extent.start, extent.bytes, to_write=True)

    def tensors(self, parameter: Parameter) -> State:
        """The state of a parameter in its pages, whatever they hold."""
        if parameter not in self._state:
            offsets = self._extents[parameter].offsets
            self._state[parameter] = {
                name: self._file.tensor(offsets[name], spec.shape, spec.dtype)
                for name, spec in self._specs[parameter].items()
            }
        return self._state[parameter]


def _lay_out(kept: Specs, start: int) -> _Extent:
    offsets, end = {}, start
    for name, spec in kept.items():
        offsets[name] = end
        end += aligned(spec.bytes)
    return _Extent(start, whole_pages(end - start), offsets)
