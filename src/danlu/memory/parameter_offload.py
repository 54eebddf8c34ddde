"""Weights of the layers in a file on a local disk, of which a few layers at a time are in memory.

A layer's weights are read ahead while the layers before it are at work, forward and backward, and let go of behind it.
The file is scratch: a run that is killed leaves nothing of it, and goes on from its checkpoint, which is the truth.

The system keeps what a process lets go of in its cache while there is room, so a model that fits into memory is not
slowed by the disk; what is gained is that memory can be taken away. On a CPU, alone or sharded by FSDP: what lies in
the file is the share that this process holds between uses. Where rows are not dealt out evenly, the smaller shares stay
in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.errors import RecipeError
from danlu.memory.page_file import PageFile, aligned, whole_pages
from danlu.models.decoder import Decoder

_SMALL = 4096
"""Bytes up to which a tensor stays where it is: a page would be as large."""


@dataclass(frozen=True)
class _Extent:
    start: int
    bytes: int


class MappedTensors:
    """Tensors of one kind by name, each in pages of its own of one file.

    Args:
        tensors: their shapes and types are taken, not yet their values.
        what: for messages.
    Raises ResourceError when the file cannot be made there.
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path, *, what: str) -> None:
        self._extents: dict[str, _Extent] = {}
        end = 0
        for name, tensor in tensors.items():
            self._extents[name] = _Extent(end, whole_pages(aligned(tensor.nbytes)))
            end += self._extents[name].bytes
        self.bytes = end
        self._file = PageFile(end, folder, what=what, field="memory.folder")

    def moved(self, name: str, tensor: Tensor) -> Tensor:
        """The same values, of the same shape and type, in the file; row-major."""
        there = self._file.tensor(self._extents[name].start, tensor.shape, tensor.dtype)
        there.copy_(tensor)
        self.done([name])
        return there

    def fetch(self, names: Iterable[str]) -> None:
        """These are in memory when it returns."""
        for extent in self._places(names):
            self._file.fetch(extent.start, extent.bytes, to_write=False)

    def ahead(self, names: Iterable[str]) -> None:
        """These are read from the disk meanwhile."""
        for extent in self._places(names):
            self._file.prefetch(extent.start, extent.bytes)

    def done(self, names: Iterable[str]) -> None:
        """Lets go of these; whoever touches one of them gets it back, a page at a time."""
        for extent in self._places(names):
            self._file.release(extent.start, extent.bytes)

    def _places(self, names: Iterable[str]) -> Iterator[_Extent]:
        yield from (self._extents[name] for name in names)


class OffloadedLayers:
    """The weights of a decoder's layers in a file, by layer."""

    def __init__(self, mapped: MappedTensors, names: list[list[str]], ahead: int) -> None:
        self.mapped = mapped
        self._names = names
        self._ahead = ahead

    @property
    def bytes(self) -> int:
        """Of the file."""
        return self.mapped.bytes

    def let_go(self) -> None:
        """Nothing of it is in use: after the optimizer's step, which touches all, and after a checkpoint."""
        for names in self._names:
            self.mapped.done(names)

    def watch(self, place: int, layer: nn.Module) -> None:
        """From here on the layer's passes fetch and let go. Outside of other hooks, as FSDP's, that use the weights."""
        layer.register_forward_pre_hook(lambda layer, args: self._begin(place, 1), prepend=True)
        layer.register_forward_hook(lambda layer, args, y: self._forward_done(place, args[0], y))

    def _begin(self, place: int, direction: int) -> None:
        self.mapped.fetch(self._names[place])
        for next_place in range(place + direction, place + direction * (self._ahead + 1), direction):
            if 0 <= next_place < len(self._names):
                self.mapped.ahead(self._names[next_place])

    def _forward_done(self, place: int, x: Tensor, y: Tensor) -> None:
        self.mapped.done(self._names[place])
        if torch.is_grad_enabled() and y.requires_grad:
            y.register_hook(lambda grad: self._begin(place, -1))
            if x.requires_grad:
                x.register_hook(lambda grad: self.mapped.done(self._names[place]))


def offload_parameters(model: Decoder, folder: Path, *, ahead: int = 1) -> OffloadedLayers:
    """Moves the weights of the layers, frozen and packed ones too, into a file in `folder`.

    They stay what they were: the same parameters with the same values, which an optimizer changes in place. The model
    has its weights and adapters, and is sharded, if it will be; it has not run yet.

    ahead: layers that are read before they are needed.
    Raises ResourceError when the folder cannot hold them, RecipeError when the layers are not on a CPU: there a GPU's
    memory is not what they take.
    """
    found = {name: held for name, tensor in _tensors(model.layers) if _goes(tensor, held := _local(tensor))}
    elsewhere = sorted({held.device.type for held in found.values()} - {"cpu"})
    if elsewhere:
        raise RecipeError(
            f"memory.folder: the weights of the layers are on {elsewhere[0]}, and only those in the host's memory can "
            "lie in a file. Use `memory: {offload: [parameters]}` with `parallel: {shard: zero3}`"
        )
    mapped = MappedTensors(found, folder, what="weights")
    with torch.no_grad():
        for name, tensor in _tensors(model.layers):
            if name in found:
                _put(tensor, mapped.moved(name, found[name]))
    names = [[name for name in found if name.startswith(f"{layer}.")] for layer in model.layers]
    offloaded = OffloadedLayers(mapped, names, ahead)
    for place, layer in enumerate(model.layers.values()):
        offloaded.watch(place, layer)
    return offloaded


def _tensors(layers: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, each once."""
    yield from layers.named_parameters()
    yield from layers.named_buffers()


def _local(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    held: Any = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return held.detach()  # type: ignore[no-any-return]


def _goes(tensor: Tensor, held: Tensor) -> bool:
    """Whether it is worth it, and can be: a share with fewer rows than others lies in a larger tensor of FSDP's, which
    fills it up. In the file it would be a copy that FSDP does not know, and that an optimizer would change for nothing.
    """
    filled_up = isinstance(tensor, DTensor) and held.untyped_storage().nbytes() > held.nbytes
    return held.nbytes > _SMALL and not filled_up


def _put(tensor: Tensor, there: Tensor) -> None:
    if isinstance(tensor, DTensor):
        # FSDP takes the local tensor up before its first forward pass (`reset_sharded_param`).
        tensor._local_tensor = there
    else:
        tensor.data = there
