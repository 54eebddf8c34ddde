"""Optimizer state in pages that the system may take from memory and bring back, one parameter's state at a time in use.

The paged optimizers of QLoRA (arXiv:2305.14314, section 3) by other means: on CPU the pages are a file mapped into
memory: state that is not in use counts as the file's cache, which the system writes out and drops when memory is short
(`page_file.py`). On CUDA the state lives in the host's memory, and that of a parameter visits the device for its
update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.nn import Parameter

from danlu.memory.page_file import Extent, PageFile, aligned, default_folder, whole_pages
from danlu.optim.moments import State, TensorSpecs


class PagedState:
    """`optim.moments.StatePages`: room for the state of some parameters, reserved at once, so that none fails later.

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
