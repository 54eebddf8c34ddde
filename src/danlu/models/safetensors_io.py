"""Tensors from and to safetensors files by ranges of bytes; no file is mapped into memory, and no tensor held twice.

`TensorReader` reads boxes of parameters from the tensors of a folder: only the bytes of these boxes are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.core.safetensors_format import (
    BUFFER_BYTES,
    FLOAT_DTYPES,
    TensorLocation,
    dtype_name,
    encode_header,
    raw_bytes,
    torch_dtype,
)
from danlu.core.shard_box import ShardBox
from danlu.models.block_scaled import CodedLocation, Codes, ScaledLocation, StoredBlocks, StoredLocation
from danlu.models.hf_layout import HFTensor, Part

DTYPES = {name: torch_dtype(name) for name in FLOAT_DTYPES}
"""The dtypes of weights, by safetensors' names."""
_ENTRY_BYTES = 160
"""The largest size of a header's entry without the tensor's name: a type, two sides and two offsets in JSON."""


def read_exactly(handle: FileIO, values: Tensor) -> int:
    """Fills `values` from the file; returns how many bytes are missing because the file ended."""
    missing = raw_bytes(values)
    while missing:
        count = handle.readinto(missing)
        if not count:
            break
        missing = missing[count:]
    return len(missing)


def is_finite(values: Tensor) -> bool:
    """Whether a tensor has no NaN and no infinity. One pass without a temporary: minimum and maximum carry both."""
    if not values.numel():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def ranges(total: int, step: int) -> Iterator[tuple[int, int]]:
    """(start, end) pairs that cut `total` into stretches of `step`."""
    return ((start, min(start + step, total)) for start in range(0, total, step))


class TensorStream:
    """A safetensors file written tensor by tensor, as they are made. Space for the header is reserved."""

    def __init__(self, file: Path, names: Iterable[str]) -> None:
        """names: of every tensor that may come."""
        self.file = file
        self.names: list[str] = []
        self.bytes = 0
        self._entries: list[tuple[str, str, tuple[int, ...]]] = []
        self._header_bytes = 64 + sum(_ENTRY_BYTES + len(name) for name in names)
        self._header_bytes += -self._header_bytes % 8
        self._handle = file.open("wb")
        self._handle.seek(self._header_bytes)

    def add(self, name: str, tensor: Tensor) -> None:
        """Writes the next tensor: floating-point numbers or bytes."""
        whole = tensor.detach().to("cpu").contiguous()
        self._entries.append((name, dtype_name(whole.dtype), tuple(whole.shape)))
        self.names.append(name)
        self.bytes += whole.nbytes
        self._handle.write(raw_bytes(whole))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._handle:
            if kind is None:
                header = encode_header(self._entries, self._header_bytes)
                assert len(header) == self._header_bytes, (
                    f"the header takes {len(header)} bytes, kept were {self._header_bytes}"
                )
                self._handle.seek(0)
                self._handle.write(header)


Location = StoredLocation
Target = tuple[Tensor, ShardBox]
"""A tensor to fill, and its box in the parameter."""


class TensorReader:
    """Reads tensors into boxes of parameters; owns the open file and the one buffer that conversion needs."""

    def __init__(self) -> None:
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        self._handle: FileIO | None = None
        self._file: Path | None = None
        self._decoded: tuple[CodedLocation, Tensor] | None = None  # the last weight, which is read some rows at a time

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @torch.no_grad()
    def fill(self, tensor: HFTensor, location: Location, targets: Mapping[str, Target]) -> None:
        """Fills the targets from a tensor's parts, converted to the targets' dtypes.

        targets: by parameter; nothing is read for parameters that are not in it. Raises ModelError for a file that ends
        early and for values that are not finite, as they are stored or in a target's dtype.
        """
        for group in tensor.groups:
            wanted = [(part, *goal) for part in group if (goal := _wanted(part, targets)) is not None]
            if not wanted:
                continue
            boxes = [part.on_disk(box, tensor.shape) for part, box, _ in wanted]
            if isinstance(location, TensorLocation) and group[0].is_plain and wanted[0][2].is_contiguous():
                self._fill(wanted[0][2], location, boxes[0], tensor.name)
                continue
            if group[0].is_plain:
                self._fill_rows(wanted[0][2], location, boxes[0], tensor.name)
                continue
            cover = _cover(boxes)
            values = self.read(location, cover, tensor.name)
            for (part, _, view), box in zip(wanted, boxes, strict=True):
                _copy(part.view_of(box.relative_to(cover).view_of(values)), view, location, tensor.name)

    @torch.no_grad()
    def read(self, location: Location, box: ShardBox, name: str) -> Tensor:
        """A box of a tensor as it is stored, or as its scales make it. Raises ModelError as `fill`."""
        if isinstance(location, ScaledLocation):
            of_values, of_scales = location.boxes(box)
            numbers, scales = self._raw(location.values, of_values, name), self._raw(location.scales, of_scales, name)
            values = location.dequantized(numbers, scales, box)
            if not is_finite(values):
                raise ModelError(f"{location.file}: tensor {name} holds NaN or infinity; the weights are spoilt")
            return values
        if isinstance(location, CodedLocation):
            if self._decoded is None or self._decoded[0] is not location:
                self._decoded = None  # freed before the next one is read
                self._decoded = location, self.codes(location, name).decode()
            return box.view_of(self._decoded[1])
        values = torch.empty(box.sizes, dtype=DTYPES[location.dtype])
        self._fill(values, location, box, name)
        return values

    def codes(self, location: CodedLocation, name: str) -> Codes:
        """A whole weight as codes with scales. Raises ModelError as its layout, and for a file that ends early."""
        tensors = {end: self._raw(each, ShardBox.full(each.shape), name) for end, each in location.tensors.items()}
        return location.layout.read(tensors, f"{location.file}: {name}")

    def blocks(self, location: ScaledLocation, name: str) -> StoredBlocks:
        """A whole tensor [.., O, I] as it is stored, with its scales. Raises ModelError for a file that ends early."""
        values, scales = (
            self._raw(each, ShardBox.full(each.shape), name) for each in (location.values, location.scales)
        )
        return StoredBlocks(values, scales, location.block, location.is_mxfp4)

    def _fill_rows(self, target: Tensor, location: Location, box: ShardBox, name: str) -> None:
        """Fills a target that has the elements of a box in their order, some rows of the tensor at a time."""
        rows = target.reshape(box.sizes) if target.is_contiguous() else target[(0,) * (target.ndim - len(box.sizes))]
        step = max(1, BUFFER_BYTES // 4 // max(1, box.numel // box.sizes[0]))
        for start, end in ranges(box.sizes[0], step):
            first, sizes = (box.offsets[0] + start, *box.offsets[1:]), (end - start, *box.sizes[1:])
            values = self.read(location, ShardBox(box.global_shape, first, sizes), name)
            _copy(values, rows[start:end], location, name)

    def _raw(self, location: TensorLocation, box: ShardBox, name: str) -> Tensor:
        """A box of a tensor of any type."""
        values = torch.empty(box.sizes, dtype=torch_dtype(location.dtype))
        flat, start, width = values.view(-1), 0, values.dtype.itemsize
        for offset, count in box.contiguous_ranges():
            handle = self._at(location.file, location.offset + offset * width)
            self._read(handle, flat[start : start + count], location, name)
            start += count
        return values

    def _read(self, handle: FileIO, values: Tensor, location: TensorLocation, name: str) -> None:
        if missing := read_exactly(handle, values):
            raise ModelError(f"{location.file}: tensor {name}: the file ended {missing} bytes early while it was read")

    def _fill(self, target: Tensor, location: TensorLocation, box: ShardBox, name: str) -> None:
        """Reads a box of the tensor at `location` into contiguous memory with as many elements."""
        flat, dtype = target.view(-1), DTYPES[location.dtype]
        in_place = flat.dtype == dtype and flat.device.type == "cpu"
        start = 0
        for batch in _batches(box, BUFFER_BYTES // dtype.itemsize):
            count = sum(length for _, length in batch)
            stretch = flat[start : start + count]
            values = stretch if in_place else self._buffer[: count * dtype.itemsize].view(dtype)
            read = 0
            for first, length in batch:
                handle = self._at(location.file, location.offset + first * dtype.itemsize)
                self._read(handle, values[read : read + length], location, name)
                read += length
            if not is_finite(values):
                raise ModelError(f"{location.file}: tensor {name} holds NaN or infinity; the weights are spoilt")
            if not in_place:
                _copy(values, stretch, location, name)
            start += count

    def _at(self, file: Path, offset: int) -> FileIO:
        """The file, open at a byte."""
        if self._handle is None or self._file != file:
            self._close()
            self._handle, self._file = FileIO(file), file
        self._handle.seek(offset)
        return self._handle

    def _close(self) -> None:
        if self._handle is not None:
            self._handle.close()
        self._handle = self._file = None


def _wanted(part: Part, targets: Mapping[str, Target]) -> tuple[ShardBox, Tensor] | None:
    """The box of a parameter that is wanted of a part, and where it goes; None where nothing of the part is."""
    if part.parameter not in targets:
        return None
    target, box = targets[part.parameter]
    common = part.box.intersection(box)
    return None if common is None else (common, common.relative_to(box).view_of(target))


def _cover(boxes: list[ShardBox]) -> ShardBox:
    """The least box that has all of these."""
    offsets = tuple(map(min, zip(*(box.offsets for box in boxes), strict=True)))
    ends = map(max, zip(*(box.ends for box in boxes), strict=True))
    return ShardBox(boxes[0].global_shape, offsets, tuple(end - at for at, end in zip(offsets, ends, strict=True)))


def _batches(box: ShardBox, elements: int) -> Iterator[list[tuple[int, int]]]:
    """Yields the (offset, count) of all elements of a box in its tensor, in lists of at most `elements` elements."""
    batch: list[tuple[int, int]] = []
    free = elements
    for offset, count in box.contiguous_ranges():
        for start, end in ranges(count, elements):
            if end - start > free:
                yield batch
                batch, free = [], elements
            batch.append((offset + start, end - start))
            free -= end - start
    if batch:
        yield batch


def _copy(values: Tensor, target: Tensor, location: Location, name: str) -> None:
    target.copy_(values)
    if values.dtype != target.dtype and not is_finite(target):
        raise ModelError(f"{location.file}: tensor {name} has values too large for {target.dtype}")
