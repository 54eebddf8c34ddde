"""Optimizer state in pages that the system may take from memory and bring back, one parameter's state at a time in use.

The paged optimizers of QLoRA (arXiv:2305.14314, section 3) by other means: on CPU the pages are a file mapped into
memory: what is not in use counts as the file's cache, which the system writes out and drops when memory is short
(`page_file.py`). On CUDA the state lives in the host's memory, and that of a parameter visits the device for its
update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.nn import Parameter

from danlu.memory.page_file import PageFile, aligned, default_folder, whole_pages
from danlu.optim.moments import State, TensorSpecs


@dataclass(frozen=True)
class _Extent:
    """Where the state of a parameter lies in the file: whole pages, so that it comes and goes alone."""

    start: int
    bytes: int
    offsets: dict[str, int]  # of its tensors by name, from the start of the file


class PagedState:
    """`optim.moments.StatePages`: room for the state of some parameters, reserved at once, so that none fails later.

    Args:
        specs:  what is kept for each parameter.
        folder: where to put the file; None for the host's memory instead. The file has no name: when the process ends,
                however it does, nothing of it is left.
    Raises ResourceError when the file cannot be made there.
    """

    def __init__(self, specs: Mapping[Parameter, TensorSpecs], folder: Path | None) -> None:
        self._specs = dict(specs)
        self._extents: dict[Parameter, _Extent] = {}
        end = 0
        for parameter, tensor_specs in self._specs.items():
            self._extents[parameter] = extent = _lay_out(tensor_specs, end)
            end += extent.bytes
        self._file = PageFile(end, folder, what="state", field="optimizer.folder")
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
        """Within it the state of `parameter` is on its device; what is changed there is kept."""
        state = self.tensors(parameter)
        if parameter.device.type == "cpu":
            self._fetch(parameter)
            yield state
            self.release(parameter)
            return
        on_device = {name: tensor.to(parameter.device) for name, tensor in state.items()}
        yield on_device
        for name, tensor in state.items():
            tensor.copy_(on_device[name])

    def release(self, parameter: Parameter) -> None:
        """Lets go of the pages of a parameter; the file keeps them."""
        extent = self._extents[parameter]
        self._file.release(extent.start, extent.bytes)

    def _fetch(self, parameter: Parameter) -> None:
        following = self._next.get(parameter)
        if following is not None:
            self._file.prefetch(self._extents[following].start, self._extents[following].bytes)
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


def paged_state(specs: Mapping[Parameter, TensorSpecs], folder: str | None) -> PagedState:
    """Pages in a file in `folder` or, without one, in the default folder for parameters on CPU and in the host's memory
    for those on a GPU. Raises ResourceError when the file cannot be made there."""
    if folder is not None:
        return PagedState(specs, Path(folder).expanduser())
    on_cpu = all(parameter.device.type == "cpu" for parameter in specs)
    return PagedState(specs, default_folder() if on_cpu else None)


def _lay_out(tensor_specs: TensorSpecs, start: int) -> _Extent:
    """Aligned offsets of the tensors of one parameter's state, from `start` on."""
    offsets, end = {}, start
    for name, spec in tensor_specs.items():
        offsets[name] = end
        end += aligned(spec.bytes)
    return _Extent(start, whole_pages(end - start), offsets)
