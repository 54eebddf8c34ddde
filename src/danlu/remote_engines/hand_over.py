"""Ways of weight sync to an engine: in buckets over a process group, as a folder, or the adapter alone.

An engine within the process has the trainer's tensors. A server has its own. It takes them over a process group that it
joins (`GroupHandOver`), or from files on a disk that both sides see (`FolderHandOver`, `AdapterHandOver`).
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from safetensors.torch import save_file

from danlu.core.atomic_write import sync_file
from danlu.core.errors import ModelError, ResourceError
from danlu.core.safetensors_format import read_header
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.hf_folder import INDEX
from danlu.models.hf_layout import HFTensor, hf_tensors
from danlu.remote_engines.server_interface import GroupServer, Route, WeightGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from danlu.remote_engines.fleet import ServerFleet

Weights = Iterable[tuple[str, "Tensor"]]

_MIB = 1 << 20


class HandOver(Protocol):
    """A way to servers. Called while they are paused; `label` is the version that their weights have afterwards."""

    @property
    def route(self) -> Route: ...

    @property
    def adapter(self) -> str | None: ...  # what requests without an adapter's name are answered with; None: the base

    def __call__(self, servers: ServerFleet, label: str, weights: Weights | None) -> None: ...

    def close(self) -> None: ...


class _FileHandOver(ABC):
    """Files on a disk that both sides see; those before are deleted when the servers have the new ones.

    Each version has a folder of its own, since servers know what they have loaded by its path.
    """

    route: Route
    adapter: str | None = None

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._last: Path | None = None

    def __call__(self, servers: ServerFleet, label: str, weights: Weights | None) -> None:
        folder = _fresh_folder(self._folder / f"{self._name}-{label}")
        self._write(folder, weights)
        self._load(servers, folder, label)
        if self._last is not None and self._last != folder:
            shutil.rmtree(self._last)
        self._last = folder

    @abstractmethod
    def _write(self, folder: Path, weights: Weights | None) -> None:
        """Writes the files into an empty folder."""

    @abstractmethod
    def _load(self, servers: ServerFleet, folder: Path, label: str) -> None:
        """Has the servers read them."""

    def close(self) -> None:
        """Deletes the files on the exchange disk."""
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)


class FolderHandOver(_FileHandOver):
    """The weights as safetensors files of a model folder.

    dtype: of the files; by default that of the weights.
    """

    route: Route = "folder"

    def __init__(self, config: ModelConfig, folder: Path, bucket_mib: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(folder, "weights")
        self._config, self._dtype = config, dtype
        self._bucket_bytes = bucket_mib * _MIB

    def _write(self, folder: Path, weights: Weights | None) -> None:
        tensors = folder_weights(self._config, _required(weights), self._dtype)
        for number, bucket in enumerate(buckets(tensors, self._bucket_bytes), start=1):
            file = folder / f"model-{number:05d}.safetensors"
            _write_tensors(file, {name: tensor.detach().to("cpu").contiguous() for name, tensor in bucket})
        _write_index(folder)

    def _load(self, servers: ServerFleet, folder: Path, label: str) -> None:
        servers.load(lambda server: server.load_folder(folder, label), label)


class GroupHandOver:
    """The weights over a process group of this process and the server's workers, a bucket of them at a time.

    dtype: in which they travel; by default that of the weights.
    """

    route: Route = "group"
    adapter = None

    def __init__(self, config: ModelConfig, address: str, bucket_mib: int, dtype: torch.dtype | None = None) -> None:
        self._config, self._address, self._dtype = config, address, dtype
        self._bucket_bytes = bucket_mib * _MIB
        self._group: WeightGroup | None = None

    def __call__(self, servers: ServerFleet, label: str, weights: Weights | None) -> None:
        tensors = folder_weights(self._config, _required(weights), self._dtype)
        (server,) = servers.connected
        assert isinstance(server, GroupServer), f"{server.address}: danlu serve takes files of weights"
        if self._group is None:
            self._group = server.open_group(self._address)
        try:
            server.begin_update()
            for bucket in buckets(tensors, self._bucket_bytes):
                server.send_bucket(self._group, bucket)
        except BaseException:
            self.close()  # the members may wait for different tensors now: the next update makes a new group
            raise
        server.finish_update(label)

    def close(self) -> None:
        """Leaves the process group."""
        if self._group is not None:
            self._group.close()
        self._group = None


class AdapterHandOver(_FileHandOver):
    """The trained adapter alone, as a PEFT folder; the base is the server's own.

    write: writes the adapter into an empty folder.
    """

    route: Route = "adapter"

    def __init__(self, name: str, folder: Path, write: Callable[[Path], None]) -> None:
        super().__init__(folder, name)
        self.adapter = name
        self._write_adapter = write

    def _write(self, folder: Path, weights: Weights | None) -> None:
        assert weights is None, "the adapter is written as a folder; the base stays as it is"
        self._write_adapter(folder)
        for file in folder.rglob("*"):
            if file.is_file():
                sync_file(file)

    def _load(self, servers: ServerFleet, folder: Path, label: str) -> None:
        servers.load(lambda server: server.load_adapter(self._name, folder), label)
        servers.label_version(label)


def folder_weights(
    config: ModelConfig, weights: Weights, dtype: torch.dtype | None = None, *, complete: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a model folder from a decoder's parameters, each as soon as all of its parts have come.

    dtype: the type that they are cast to, if any. complete: whether all parameters have to come.
    Raises ModelError for a parameter that the model does not have, and for one that is missing or has another shape.
    """

    shapes = parameter_shapes(config)
    tensors_of: dict[str, list[HFTensor]] = {}
    for tensor in hf_tensors(config):
        for name in tensor.parameters:
            tensors_of.setdefault(name, []).append(tensor)
    waiting: dict[str, Tensor] = {}
    missing = set(tensors_of)
    for name, parameter in weights:
        if name not in missing:
            known = name in tensors_of
            raise ModelError(f"hand-over: {name} is {'there twice' if known else 'no parameter of this model'}")
        if tuple(parameter.shape) != shapes[name]:
            first = tensors_of[name][0]
            stored = first.name if first.shape == shapes[name] else f"{name} ({first.name})"
            raise ModelError(
                f"hand-over: {stored} is {list(parameter.shape)}, and the server's model has {list(shapes[name])}"
            )
        missing.remove(name)
        waiting[name] = parameter.detach() if dtype is None else parameter.detach().to(dtype)
        whole = [tensor for tensor in tensors_of[name] if not missing.intersection(tensor.parameters)]
        for tensor in whole:
            yield tensor.name, tensor.assembled(waiting.__getitem__)
        for part in {part for tensor in whole for part in tensor.parameters}:
            if not any(missing.intersection(tensor.parameters) for tensor in tensors_of[part]):
                del waiting[part]
    if missing and complete:
        raise ModelError(f"hand-over: {len(missing)} parameters are missing, {sorted(missing)[0]} among them")


def buckets(tensors: Weights, bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields lists of tensors in order, each of at most `bucket_bytes` bytes; a larger tensor is alone."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _required(weights: Weights | None) -> Weights:
    """The weights. Raises ModelError where there are none."""
    if weights is None:
        raise ModelError("hand-over: no weights were given; a server has tensors of its own, and not the trainer's")
    return weights


def _fresh_folder(folder: Path) -> Path:
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    except OSError as error:
        raise ResourceError(f"{folder}: weights cannot be handed over here (exchange_folder): {error}") from error
    return folder


def _write_index(folder: Path) -> None:
    """Says which file has which tensor, as Hugging Face folders do."""
    files = sorted(folder.glob("*.safetensors"))
    weight_map = {name: file.name for file in files for name in read_header(file)}
    try:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
        sync_file(folder / INDEX)
    except OSError as error:
        raise ResourceError(f"{folder / INDEX}: cannot be written: {error}") from error


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
        sync_file(file)
    except OSError as error:
        raise ResourceError(f"{file}: cannot be written: {error}") from error
