"""Weights of the layers in a file on a local disk; a few layers at a time are in memory.

The NVMe offload of parameters of ZeRO-Infinity (arXiv:2104.07857), by a mapped file. A layer's weights are prefetched
while the layers before it compute, forward and backward, and released behind it. The file is scratch: a run that is
killed leaves nothing of it, and goes on from its checkpoint.

The system keeps released pages in its cache while there is room, so a model that fits into memory is not slowed by the
disk; the gain is that memory can be taken away. It works on a CPU, alone or sharded by FSDP2: the file has the shard
that this process keeps between uses. Where rows are not dealt out evenly, the smaller shards stay in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from danlu.core.dtensor import is_dtensor
from danlu.core.errors import RecipeError
from danlu.memory.pages import Extent, PageFile, whole_pages
from danlu.models.decoder import Decoder

_MIN_BYTES = 4096
"""Tensors of no more bytes stay where they are: a page would be as large."""


class MappedTensors:
    """Tensors of one kind by name, each in pages of its own of one file.

    Args:
        tensors: by name; their shapes and types are taken, not yet their values (see `move`).
        what: a description for messages.
    Raises ResourceError when the file cannot be made there.
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path, *, what: str) -> None:
        self._extents: dict[str, Extent] = {}
        self.bytes = 0
        for name, tensor in tensors.items():
            self._extents[name] = Extent(self.bytes, whole_pages(tensor.nbytes))
            self.bytes += self._extents[name].size
        self._file = PageFile(self.bytes, folder, what=what, field="memory.folder")

    def move(self, name: str, tensor: Tensor) -> Tensor:
        """Copies a tensor to its place in the file; returns the mapped one, row-major."""
        mapped = self._file.tensor(self._extents[name].start, tensor.shape, tensor.dtype)
        mapped.copy_(tensor)
        self.release([name])
        return mapped

    def fetch(self, names: Iterable[str]) -> None:
        """Brings tensors into memory; they are there when it returns."""
        for name in names:
            self._file.fetch(*self._extents[name], to_write=False)

    def prefetch(self, names: Iterable[str]) -> None:
        """Begins to read tensors from the disk, without waiting."""
        for name in names:
            self._file.prefetch(*self._extents[name])

    def release(self, names: Iterable[str]) -> None:
        """Takes tensors from memory; whoever touches one of them gets it back, a page at a time."""
        for name in names:
            self._file.release(*self._extents[name])


class OffloadedLayers:
    """The weights of a decoder's layers in a mapped file, fetched and released by hooks on the layers.

    names: of the mapped tensors, by layer. prefetch_layers: how many are read before they are needed.
    """

    def __init__(self, mapped: MappedTensors, names: list[list[str]], prefetch_layers: int) -> None:
        self.mapped = mapped
        self._names = names
        self._prefetch_layers = prefetch_layers

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return self.mapped.bytes

    def release(self) -> None:
        """Releases all layers: after the optimizer's step, which touches all, and after a checkpoint."""
        for names in self._names:
            self.mapped.release(names)

    def install_hooks(self, index: int, layer: nn.Module) -> None:
        """Makes the layer's passes fetch and release its weights, outside of other hooks that use them (FSDP2's)."""
        layer.register_forward_pre_hook(lambda layer, args: self._begin(index, 1), prepend=True)
        layer.register_forward_hook(lambda layer, args, y: self._end_forward(index, args[0], _stream_of(y)))

    def _begin(self, index: int, direction: int) -> None:
        """Fetches a layer, and prefetches those that follow: direction 1 in the forward pass, -1 in the backward."""
        self.mapped.fetch(self._names[index])
        for following in range(index + direction, index + direction * (self._prefetch_layers + 1), direction):
            if 0 <= following < len(self._names):
                self.mapped.prefetch(self._names[following])

    def _end_forward(self, index: int, x: Tensor, y: Tensor) -> None:
        self.mapped.release(self._names[index])
        if torch.is_grad_enabled() and y.requires_grad:
            # The gradient of the output comes before the layer's backward pass, that of its input behind it.
            y.register_hook(lambda grad: self._begin(index, -1))
            if x.requires_grad:
                x.register_hook(lambda grad: self.mapped.release(self._names[index]))


def _stream_of(output: Any) -> Tensor:
    """The residual stream among what a layer returns."""
    stream: Tensor = output[0] if isinstance(output, tuple) else output
    return stream


def offload_parameters(model: Decoder, folder: Path, *, prefetch_layers: int = 1) -> OffloadedLayers:
    """Moves the weights of the layers, frozen and packed ones too, into a file in `folder`.

    They stay the same parameters with the same values, which an optimizer changes in place. The model has its weights
    and adapters, and is sharded, if it will be; it has not run yet.

    prefetch_layers: how many layers are read before they are needed.
    Raises ResourceError when the folder cannot hold them, RecipeError when the layers are not on a CPU: layers on a GPU
        do not take the host's memory.
    """
    named = dict(chain(model.layers.named_parameters(), model.layers.named_buffers()))  # each tensor once
    tensors = {name: local for name, tensor in named.items() if _can_move(tensor, local := _local(tensor))}
    if devices := sorted({local.device.type for local in tensors.values()} - {"cpu"}):
        raise RecipeError(
            f"memory.folder: the weights of the layers are on {devices[0]}, and only those in the host's memory can "
            "lie in a file. Use `memory: {offload: [parameters]}` with `parallel: {shard: zero3}`"
        )
    mapped = MappedTensors(tensors, folder, what="weights")
    with torch.no_grad():
        for name, local in tensors.items():
            tensor, moved = named[name], mapped.move(name, local)
            if is_dtensor(tensor):
                # FSDP2 takes up the local tensor before its first forward pass (`reset_sharded_param`).
                tensor._local_tensor = moved
            else:
                tensor.data = moved
    names = [[name for name in tensors if name.startswith(f"{layer}.")] for layer in model.layers]
    offloaded = OffloadedLayers(mapped, names, prefetch_layers)
    for index, layer in enumerate(model.layers.values()):
        offloaded.install_hooks(index, layer)
    return offloaded


def _local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, or the tensor itself; detached."""
    local: Any = tensor._local_tensor if is_dtensor(tensor) else tensor
    return local.detach()  # type: ignore[no-any-return]


def _can_move(tensor: Tensor, local: Tensor) -> bool:
    """Whether a tensor is worth a page and can be moved.

    A shard with fewer rows than others lies in a padded tensor of FSDP2's. In the file it would be a copy that FSDP2
    does not know, and that an optimizer would change for nothing.
    """
    is_padded = is_dtensor(tensor) and local.untyped_storage().nbytes() > local.nbytes
    return local.nbytes > _MIN_BYTES and not is_padded
