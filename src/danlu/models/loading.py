"""Weights from a model folder into a decoder: every problem found first, then bytes straight to their place.

Peak memory is the model plus one buffer: a parameter of the stored type is read in place, any other is converted a
buffer at a time. Where each weight is handed to a function that stores it otherwise (`load_into`), it is the model as
stored plus one weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from io import FileIO
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from danlu.errors import ModelError
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import read_config, read_tensors
from danlu.models.hf_layout import EMBEDDING, HEAD, HFTensor, hf_tensors
from danlu.models.hf_validation import PACKED, check_headers
from danlu.models.modules import Linear
from danlu.models.safetensors_io import BUFFER_BYTES, DTYPES, is_finite, ranges, read_exactly
from danlu.safetensors_format import TensorLocation
from danlu.types import QuantizedWeight

_SMALL_BYTES = 4096
"""Of a packed weight's constants, up to which they are read to be checked: its description and the lists of values."""

Take = Callable[[str, Tensor], Tensor | None]
"""(parameter, its value as stored) -> what becomes the parameter, or None if the weight has been put elsewhere."""
Unpack = Callable[[str, Mapping[str, Tensor], str, Sequence[int]], Sequence[QuantizedWeight]]
"""(name on disk, its tensors by name, the file for messages, the rows of its parts) -> the parts of a weight that
bitsandbytes packed."""


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    check_finite: bool = True,
) -> Decoder:
    """The decoder of a Hugging Face folder, its parameters in `dtype` on `device`.

    check_finite: refuse weights with NaN or infinity, before they spoil a run.
    Raises ModelError for an unsupported architecture and for files or tensors that are missing, extra, truncated,
    mis-shaped, of the wrong type, or not finite.
    """
    folder = Path(folder)
    config = read_config(folder)
    places = _places(folder, config, packed=False)
    model = build(config, dtype=dtype, device=device)
    parameters = dict(model.named_parameters())
    reader = _Reader(check_finite)
    for handle, tensor, place in _walk(places):
        for part in tensor.parts:
            reader.fill(parameters[part], handle, place, tensor.name)
    return model


def stored_values(
    folder: str | Path, config: ModelConfig, *, check_finite: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name as it is stored, one after the other in the order of the files.

    Raises ModelError as `load` does.
    """
    folder = Path(folder)
    reader = _Reader(check_finite)
    shapes = {name: parameter.shape for name, parameter in meta_decoder(config).named_parameters()}
    for handle, tensor, place in _walk(_places(folder, config, packed=False)):
        for part in tensor.parts:
            value = torch.empty(shapes[part], dtype=DTYPES[place.dtype])
            reader.fill(value, handle, place, tensor.name)
            yield part, value


def read_tensor(folder: str | Path, name: str) -> Tensor:
    """One weight of a model folder by its name there, as it is stored.

    Raises ModelError where the folder has none of that name, keeps it in few bits, or holds NaN or infinity.
    """
    folder = Path(folder)
    place = read_tensors(folder).get(name)
    if place is None:
        raise ModelError(f"{folder}: holds no tensor {name}")
    if place.dtype not in DTYPES:
        raise ModelError(f"{folder}: {name} is stored as {place.dtype}; here the original weight is needed")
    value = torch.empty(place.shape, dtype=DTYPES[place.dtype])
    with FileIO(place.file) as handle:
        handle.seek(place.offset)
        _Reader(check_finite=True).fill(value, handle, place, name)
    return value


def load_into(
    model: Decoder,
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    take: Take,
    unpack: Unpack,
    layer_loaded: Callable[[str], None] = lambda layer: None,
    check_finite: bool = True,
) -> None:
    """Gives a `meta_decoder` its weights one by one: each is read as it is stored, and `take` says what becomes of it.

    A weight that bitsandbytes packed goes through `unpack` into the layer's slot and never through `take`.
    `layer_loaded` is called with the name of each layer ("3") that has all of its weights; the order is that of the
    files. Raises ModelError as `load` does.
    """
    folder = Path(folder)
    reader = _Reader(check_finite)
    stored = read_tensors(folder)
    places = _places(folder, model.config, packed=True)
    missing = Counter(_layer(tensor) for tensor, _ in places)
    for handle, tensor, place in _walk(places):
        if place.dtype == PACKED:
            rows = [_linear(model, part).shape[0] for part in tensor.parts]
            packed = unpack(tensor.name, _family(tensor.name, stored), str(place.file), rows)
            _store(model, tensor, place, packed)
        else:
            for part in tensor.parts:
                value = torch.empty(model.get_parameter(part).shape, dtype=DTYPES[place.dtype])
                reader.fill(value, handle, place, tensor.name)
                kept = take(part, value.to(device))
                if kept is not None:
                    owner, _, attribute = part.rpartition(".")
                    setattr(model.get_submodule(owner), attribute, nn.Parameter(kept, requires_grad=False))
        layer = _layer(tensor)
        missing[layer] -= 1
        if layer is not None and not missing[layer]:
            layer_loaded(layer)
    if (head := model.lm_head) is not None and model.config.tie_word_embeddings:
        head.tie(model.embed_tokens)  # opened before there was a weight to share


Describe = Callable[[str, Mapping[str, Tensor], str], Sequence[int]]
"""(name on disk, its tensors by name, the file for messages) -> the shape of a weight that bitsandbytes packed. Tensors
above a few KiB are on the meta device, without values. Raises ModelError for what does not go together."""


def check_prequantized(folder: Path, config: ModelConfig, describe: Describe) -> None:
    """Raises ModelError as `load_into` would for headers, and for weights in 4 bits whose parts do not go together.

    Nothing large is read.
    """
    stored = check_headers(folder, config, packed=True)
    for tensor in hf_tensors(config):
        place = stored.get(tensor.name)
        if place is not None and place.dtype == PACKED:
            shape = describe(tensor.name, _family(tensor.name, stored, _SMALL_BYTES), str(place.file))
            _check_shape(tensor.name, place, shape, tensor.shape)


def meta_decoder(config: ModelConfig) -> Decoder:
    """A decoder whose parameters have shapes only."""
    with torch.device("meta"):
        return Decoder(config)


def build(config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Decoder:
    """A decoder whose parameters have memory but no values yet."""
    model = meta_decoder(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # `to_empty` would take meta tensors through torch's operators in Python, which import sympy for 0.2 s.
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device)))
    return model


def stored_dtype(folder: str | Path) -> torch.dtype:
    """The floating-point type of the folder's largest weight that has one; packed weights are not asked."""
    largest = max(_floating(folder), key=lambda tensor: tensor.bytes, default=None)
    return torch.float32 if largest is None else DTYPES[largest.dtype]


def widest_dtype(folder: str | Path) -> torch.dtype:
    """The narrowest floating-point type that holds every one in which the folder's weights are stored."""
    found = {DTYPES[tensor.dtype] for tensor in _floating(folder)}
    return reduce(torch.promote_types, found) if found else torch.float32


def _floating(folder: str | Path) -> list[TensorLocation]:
    """Weights and biases; what else there is are constants of packed weights."""
    stored = read_tensors(Path(folder)).items()
    return [one for name, one in stored if one.dtype in DTYPES and name.endswith((".weight", ".bias"))]


Place = tuple[HFTensor, TensorLocation]


def _places(folder: Path, config: ModelConfig, *, packed: bool) -> list[Place]:
    """Where each tensor lies, in the order of files and offsets: disks and page caches like one direction."""
    stored = check_headers(folder, config, packed=packed)
    wanted = hf_tensors(config)
    if config.tie_word_embeddings and HEAD in stored and EMBEDDING in stored:
        _check_same(stored[EMBEDDING], stored[HEAD])
    places = [(tensor, stored.get(tensor.name) or stored[HEAD]) for tensor in wanted]
    return sorted(places, key=lambda place: (place[1].file, place[1].offset))


def _walk(places: list[Place]) -> Iterator[tuple[FileIO, HFTensor, TensorLocation]]:
    """Each tensor with its file, open and at the tensor's first byte."""
    for file, group in groupby(places, key=lambda place: place[1].file):
        with FileIO(file) as handle:
            for tensor, place in group:
                handle.seek(place.offset)
                yield handle, tensor, place


def _layer(tensor: HFTensor) -> str | None:
    """Of which layer it is, if of one."""
    first, *rest = tensor.parts[0].split(".")
    return rest[0] if first == "layers" else None


def _store(model: Decoder, tensor: HFTensor, place: TensorLocation, packed: Sequence[QuantizedWeight]) -> None:
    for part, one in zip(tensor.parts, packed, strict=True):
        linear = _linear(model, part)
        _check_shape(tensor.name, place, one.shape, linear.shape)
        linear.store(one)


def _check_shape(name: str, place: TensorLocation, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        raise ModelError(
            f"{place.file}: {name}: packed is a weight of shape {list(found)}, config.json asks for {list(wanted)}"
        )


def _linear(model: Decoder, parameter: str) -> Linear:
    linear = model.get_submodule(parameter.removesuffix(".weight"))
    assert isinstance(linear, Linear)
    return linear


def _family(name: str, stored: Mapping[str, TensorLocation], most: int | None = None) -> dict[str, Tensor]:
    """A packed weight and its constants; those of more than so many bytes without their values."""
    found = {}
    for one, place in stored.items():
        if one == name or one.startswith(f"{name}."):
            dtype = (DTYPES | {PACKED: torch.uint8}).get(place.dtype)
            if dtype is None:
                raise ModelError(f"{place.file}: {one} is of the type {place.dtype}, which no part of {name} has")
            if most is not None and place.bytes > most:
                found[one] = torch.empty(place.shape, dtype=dtype, device="meta")
                continue
            value = torch.empty(place.shape, dtype=dtype)
            with FileIO(place.file) as handle:
                handle.seek(place.offset)
                read_exactly(handle, value.view(-1))
            found[one] = value
    return found


class _Reader:
    """Reads consecutive ranges of files into parameters; owns the one buffer that conversion needs."""

    def __init__(self, check_finite: bool) -> None:
        self._check_finite = check_finite
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)

    @torch.no_grad()
    def fill(self, parameter: Tensor, handle: FileIO, place: TensorLocation, name: str) -> None:
        """The next `parameter.numel()` values of `handle`, in the stored type, into the parameter."""
        target, dtype = parameter.view(-1), DTYPES[place.dtype]
        in_place = target.dtype == dtype and target.device.type == "cpu"
        for start, end in ranges(target.numel(), BUFFER_BYTES // dtype.itemsize):
            piece = target[start:end]
            values = piece if in_place else self._buffer[: (end - start) * dtype.itemsize].view(dtype)
            if missing := read_exactly(handle, values):
                raise ModelError(f"{place.file}: tensor {name}: the file ended {missing} bytes early while it was read")
            if self._check_finite and not is_finite(values):
                raise ModelError(f"{place.file}: tensor {name} holds NaN or infinity; the weights are spoilt")
            if not in_place:
                piece.copy_(values)
                if self._check_finite and dtype != target.dtype and not is_finite(piece):
                    raise ModelError(f"{place.file}: tensor {name} has values too large for {target.dtype}")


def _check_same(one: TensorLocation, other: TensorLocation) -> None:
    """A tied matrix that is stored twice must be stored alike, or one of the two would silently be lost."""
    same = (one.dtype, one.shape) == (other.dtype, other.shape)
    with FileIO(one.file) as left, FileIO(other.file) as right:
        left.seek(one.offset)
        right.seek(other.offset)
        for start, end in ranges(one.bytes if same else 0, BUFFER_BYTES):
            same = same and left.read(end - start) == right.read(end - start)
    if not same:
        raise ModelError(
            f"{one.file.parent}: config.json ties the head to the embedding, but {HEAD} and {EMBEDDING} differ. "
            'Set "tie_word_embeddings": false to keep both'
        )
