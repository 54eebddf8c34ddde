"""Weights from a Hugging Face folder into a decoder: all problems are reported first, then bytes go straight to memory.

Peak memory is the model plus one buffer: a parameter of the stored type is read in place, any other is converted a
buffer at a time. With `load_into`, where a function stores each weight in another form, peak memory is the model in
that form plus one weight. Where a process wants only boxes of parameters, it reads and holds no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor, nn

from danlu.core.errors import ModelError
from danlu.core.layer_types import QuantizedWeight, StackedQuantizedWeight
from danlu.core.safetensors_format import BUFFER_BYTES, TensorLocation
from danlu.core.shard_box import ShardBox
from danlu.models.block_scaled import CodedLocation, Codes, FolderLayouts, ScaledLocation, StoredBlocks, keepable
from danlu.models.config import ModelConfig, parameter_shapes
from danlu.models.decoder import Decoder
from danlu.models.hf_folder import FOUR_BIT, check_headers, expected_tensors, own_tensors, read_config, read_tensors
from danlu.models.hf_layout import EMBEDDING, HEAD, HFTensor, Part, hf_name
from danlu.models.modules import GroupedLinear, Linear
from danlu.models.multimodal import language_name
from danlu.models.safetensors_io import DTYPES, Location, Target, TensorReader, ranges, read_exactly

_SMALL_BYTES = 4096
"""Constants of a 4-bit weight up to this size are read to be checked: its description and its codebooks."""
_WEIGHT_ENDINGS = (".weight", ".bias", ".gate_up_proj", ".down_proj", ".gate_up_proj_bias", ".down_proj_bias")
"""The endings of names of weights and biases, stacked experts' among them; constants of 4-bit weights end otherwise."""

Located = tuple[HFTensor, Location]
Take = Callable[[str, Tensor], Tensor | None]
"""(parameter, its value as stored) -> the value of the parameter, or None if the weight has been put elsewhere."""
Unpack = Callable[[str, Mapping[str, Tensor], str, Sequence[int]], Sequence[QuantizedWeight]]
"""(name on disk, its tensors by name, the file for messages, the rows of its parts) -> the parts of a weight that
bitsandbytes quantized."""
Keep = Callable[[Codes | StoredBlocks, Sequence[slice]], Sequence[QuantizedWeight]]
"""(a weight as codes, the rows of its parts) -> the parts."""
Stack = Callable[[str, Sequence[QuantizedWeight]], StackedQuantizedWeight]
"""(parameter, the weights of a layer's experts in their order, which `Unpack` or `Keep` gave) -> all of them."""


def load(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: ModelConfig | None = None,
    layouts: FolderLayouts | None = None,
) -> Decoder:
    """The decoder of a Hugging Face folder, its parameters in `dtype` on `device`.

    config: the folder's with another task, where the model is not for the one that it was written for. layouts: how the
    folder stores its quantized weights, as `hf_folder.stored_tensors` has it; they are dequantised in float32.
    Raises ModelError for an unsupported architecture and for files or tensors that are missing, extra, truncated,
    mis-shaped, of the wrong type, or not finite.
    """
    folder = Path(folder)
    config = config or read_config(folder)
    located = _locate(folder, config, quantized=False, layouts=layouts)
    model = build(config, dtype=dtype, device=device)
    _fill(located, {name: (value, ShardBox.full(value.shape)) for name, value in model.named_parameters()})
    return model


def load_boxes(
    folder: str | Path, config: ModelConfig, targets: Mapping[str, Target], *, layouts: FolderLayouts | None = None
) -> None:
    """Fills boxes of a model's parameters, converted to the targets' dtypes; of the files only they are read.

    targets: by parameter; the others are passed over. layouts: as `load` has it. Raises ModelError as `load` does, for
    values only of the boxes that it reads.
    """
    _fill(_locate(Path(folder), config, quantized=False, layouts=layouts), targets)


def _fill(located: Iterable[Located], targets: Mapping[str, Target]) -> None:
    with TensorReader() as reader:
        for tensor, location in located:
            reader.fill(tensor, location, targets)


def stored_values(
    folder: str | Path, config: ModelConfig, *, layouts: FolderLayouts | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name as it is stored, one after the other in the order of the files.

    layouts: as `load` has it. Raises ModelError as `load` does.
    """
    located = _locate(Path(folder), config, quantized=False, layouts=layouts)
    with TensorReader() as reader:
        values = _Values(located, {name: ShardBox.full(shape) for name, shape in parameter_shapes(config).items()})
        for tensor, location in located:
            yield from values.read(reader, tensor, location)


def read_tensor(folder: str | Path, name: str) -> Tensor:
    """One weight of a model folder by its name there, as it is stored.

    Raises ModelError where the folder has none of that name, keeps it in few bits, or holds NaN or infinity.
    """
    folder = Path(folder)
    stored = read_tensors(folder)
    location = stored.get(name) or {language_name(each): location for each, location in stored.items()}.get(name)
    if location is None:
        raise ModelError(f"{folder}: holds no tensor {name}")
    if location.dtype not in DTYPES:
        raise ModelError(f"{folder}: {name} is stored as {location.dtype}; here the original weight is needed")
    with TensorReader() as reader:
        return reader.read(location, ShardBox.full(location.shape), name)


def load_into(
    model: Decoder,
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    take: Take,
    unpack: Unpack,
    stack: Stack | None = None,
    layer_loaded: Callable[[str], None] = lambda layer: None,
    boxes: Mapping[str, ShardBox] | None = None,
    layouts: FolderLayouts | None = None,
    keep: Keep | None = None,
    may_keep: Collection[str] = (),
) -> None:
    """Gives a `meta_decoder` its weights one by one: each is read as it is stored, and `take` returns the parameter's
    value.

    A weight that bitsandbytes quantized goes through `unpack` into the layer's slot and never through `take`; those of
    experts, which are tensors of their own, also through `stack` (None: `unpack` takes no weight). `layer_loaded` is
    called with the name of each layer ("3") that has all of its weights; the order is that of the files. boxes: boxes
    by parameter, such as a rank's experts; only the box is read, and becomes the parameter. Weights of layers that the
    model has not, as a stage of a pipeline, are passed over. layouts: as `load` has it. keep: makes what goes into a
    layer's slot of the codes of such a weight, for the parameters in `may_keep` that are whole rows of codes on disk;
    all others are dequantised and go through `take`. Raises ModelError as `load` does.
    """
    folder = Path(folder)
    stored = own_tensors(folder, model.config)
    here = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # of a stage, its own layers
    everything = _locate(folder, model.config, quantized=True, layouts=layouts)
    located = [each for each in everything if here.issuperset(each[0].parameters)]
    kept = set() if keep is None else keepable(located) & set(may_keep)
    missing = Counter(_layer(tensor) for tensor, _ in located)
    whole = {name: ShardBox.full(shape) for name, shape in parameter_shapes(model.config).items()}
    wanted = whole | dict(boxes or {})
    values = _Values(located, wanted)
    quantized = _QuantizedWeights(model, stored, wanted, unpack, keep, stack)
    with TensorReader() as reader:
        for tensor, location in located:
            if isinstance(location, TensorLocation) and location.dtype == FOUR_BIT:
                quantized.read(tensor, location)
            elif not isinstance(location, TensorLocation) and kept.issuperset(tensor.parameters):
                quantized.keep(reader, tensor, location)
            else:
                for parameter, value in values.read(reader, tensor, location):
                    stays = take(parameter, value.to(device))
                    if stays is not None:
                        owner, _, attribute = parameter.rpartition(".")
                        setattr(model.get_submodule(owner), attribute, nn.Parameter(stays, requires_grad=False))
            layer = _layer(tensor)
            missing[layer] -= 1
            if layer is not None and not missing[layer]:
                layer_loaded(layer)
    if (head := model.lm_head) is not None and model.config.tie_word_embeddings:
        head.tie(model.embed_tokens)  # the head was made before there was a weight to share


class _QuantizedWeights:
    """Puts weights that are stored quantized into the slots of linear layers; of experts once all have come."""

    def __init__(
        self,
        model: Decoder,
        stored: Mapping[str, TensorLocation],
        wanted: Mapping[str, ShardBox],
        unpack: Unpack,
        keep: Keep | None,
        stack: Stack | None,
    ) -> None:
        self._model, self._stored, self._wanted = model, stored, wanted
        self._unpack, self._keep, self._stack = unpack, keep, stack
        self._begun: dict[str, dict[int, QuantizedWeight]] = {}  # parameter -> number of an expert -> its weight

    def read(self, tensor: HFTensor, location: TensorLocation) -> None:
        """Reads a weight in bitsandbytes' 4 bits with its constants: of one linear layer, of several, or of a wanted
        expert."""
        if not self._is_wanted(tensor):
            return
        linears = [_linear(self._model, part.parameter) for part in tensor.parts]
        constants = _with_constants(tensor.name, self._stored)
        weights = self._unpack(tensor.name, constants, str(location.file), [linear.shape[0] for linear in linears])
        for linear, weight in zip(linears, weights, strict=True):
            _check_shape(tensor.name, location, weight.shape, linear.shape)
        self._store(tensor.parts, weights)

    def keep(self, reader: TensorReader, tensor: HFTensor, location: CodedLocation | ScaledLocation) -> None:
        """Reads a weight as codes: of one linear layer, of several, or of wanted experts."""
        if not self._is_wanted(tensor):
            return
        assert self._keep is not None
        if len(tensor.shape) > 2:
            assert isinstance(location, ScaledLocation)
            self._keep_experts(tensor, reader.blocks(location, tensor.name))
            return
        rows = [slice(part.offsets[0], part.offsets[0] + part.box.sizes[-2]) for part in tensor.parts]
        if isinstance(location, CodedLocation):
            self._store(tensor.parts, self._keep(reader.codes(location, tensor.name), rows))
        else:
            self._store(tensor.parts, self._keep(reader.blocks(location, tensor.name), rows))

    def _keep_experts(self, tensor: HFTensor, stored: StoredBlocks) -> None:
        """Keeps the wanted ones of stacked experts, with scales for each row; a part is a matrix of one expert."""
        assert self._keep is not None
        parts = [part for part in tensor.parts if part.box.intersection(self._wanted[part.parameter]) is not None]
        weights: list[QuantizedWeight] = []
        for part in parts:
            expert, first, height = part.offsets[0], part.offsets[-2] + part.first, part.box.sizes[-2]
            rows = slice(first, first + height * part.stride, part.stride)
            matrix = replace(stored, values=stored.values[expert][rows], scales=stored.scales[expert][rows])
            weights += self._keep(matrix, [slice(0, height)])
        self._store(parts, weights)

    def _is_wanted(self, tensor: HFTensor) -> bool:
        return any(part.box.intersection(self._wanted[part.parameter]) is not None for part in tensor.parts)

    def _store(self, parts: Sequence[Part], weights: Sequence[QuantizedWeight]) -> None:
        for part, weight in zip(parts, weights, strict=True):
            linear = _linear(self._model, part.parameter)
            if isinstance(linear, Linear):
                linear.store(weight)
                continue
            begun = self._begun.setdefault(part.parameter, {})
            begun[part.box.offsets[0]] = weight
            if len(begun) == self._wanted[part.parameter].sizes[0]:
                assert self._stack is not None, "what unpacks experts stacks them"
                del self._begun[part.parameter]
                linear.store(self._stack(part.parameter, [begun[expert] for expert in sorted(begun)]))


class _Values:
    """Parameters, or boxes of them, as they come together of the tensors that have parts of them.

    wanted: which box of each parameter.
    """

    def __init__(self, located: Iterable[Located], wanted: Mapping[str, ShardBox]) -> None:
        self._wanted = wanted
        self._dtypes: dict[str, torch.dtype] = {}  # the widest that some part of a parameter is stored in
        self._tensors_left: Counter[str] = Counter()
        for tensor, location in located:
            for parameter in tensor.parameters if location.dtype in DTYPES else ():
                dtype = DTYPES[location.dtype]
                self._dtypes[parameter] = torch.promote_types(self._dtypes.get(parameter, dtype), dtype)
                self._tensors_left[parameter] += 1
        self._begun: dict[str, Target] = {}

    def read(self, reader: TensorReader, tensor: HFTensor, location: Location) -> Iterator[tuple[str, Tensor]]:
        """Reads a tensor; returns the parameters that are complete with it, by name, as they are stored."""
        for parameter in tensor.parameters:
            if parameter not in self._begun:
                box = self._wanted[parameter]
                self._begun[parameter] = (torch.empty(box.sizes, dtype=self._dtypes[parameter]), box)
        reader.fill(tensor, location, self._begun)
        for parameter in tensor.parameters:
            self._tensors_left[parameter] -= 1
            if not self._tensors_left[parameter]:
                yield parameter, self._begun.pop(parameter)[0]


Describe = Callable[[str, Mapping[str, Tensor], str], Sequence[int]]
"""(name on disk, its tensors by name, the file for messages) -> the shape of a weight in 4 bits.

Tensors above a few KiB are on the meta device, without values. Raises ModelError for tensors that do not fit together.
"""


def check_prequantized(
    folder: Path, config: ModelConfig, describe: Describe, *, layouts: FolderLayouts | None = None
) -> None:
    """Raises ModelError as `load_into` would for headers, and for 4-bit weights with parts that do not fit together.

    Nothing large is read.
    """
    stored = check_headers(folder, config, quantized=True, layouts=layouts)
    constants = {name: location for name, location in stored.items() if isinstance(location, TensorLocation)}
    expected = expected_tensors(config, stored)
    _check_quantized_alike((tensor, stored[tensor.name]) for tensor in expected if tensor.name in stored)
    for tensor in expected:
        location = stored.get(tensor.name)
        if isinstance(location, TensorLocation) and location.dtype == FOUR_BIT:
            shape = describe(tensor.name, _with_constants(tensor.name, constants, _SMALL_BYTES), str(location.file))
            _check_shape(tensor.name, location, shape, tensor.shape)


def meta_decoder(config: ModelConfig) -> Decoder:
    """Builds a decoder with parameters that have shapes only."""
    with torch.device("meta"):
        return Decoder(config)


def build(config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Decoder:
    """Builds a decoder with parameters that have memory but no values yet."""
    model = meta_decoder(config)
    in_float32: tuple[type[nn.Module], ...] = ()
    if config.has_experts:
        from danlu.models.experts import Router

        in_float32 = (Router,)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # `to_empty` would take meta tensors through torch's operators in Python, which import sympy for 0.2 s.
            own = torch.float32 if isinstance(module, in_float32) else dtype
            memory = torch.empty(parameter.shape, dtype=own, device=device)
            setattr(module, name, nn.Parameter(memory, requires_grad=parameter.requires_grad))
    return model


def stored_dtype(folder: str | Path) -> torch.dtype:
    """The floating-point type of the folder's largest weight that has one; 4-bit weights are passed over."""
    largest = max(_floating(folder), key=lambda tensor: tensor.bytes, default=None)
    return torch.float32 if largest is None else DTYPES[largest.dtype]


def widest_dtype(folder: str | Path) -> torch.dtype:
    """The narrowest floating-point type that holds every one in which the folder's weights are stored."""
    dtypes = {DTYPES[location.dtype] for location in _floating(folder)}
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _floating(folder: str | Path) -> list[TensorLocation]:
    """Floating-point weights and biases, without the constants of 4-bit weights."""
    stored = read_tensors(Path(folder)).items()
    return [location for name, location in stored if location.dtype in DTYPES and name.endswith(_WEIGHT_ENDINGS)]


def _locate(
    folder: Path, config: ModelConfig, *, quantized: bool, layouts: FolderLayouts | None = None
) -> list[Located]:
    """Returns the location of each tensor, in the order of files and offsets: disks and page caches like one
    direction.
    """
    stored = check_headers(folder, config, quantized=quantized, layouts=layouts)
    embedding, head_name = hf_name(EMBEDDING, config), hf_name(HEAD, config)
    if config.task == "causal-lm" and config.tie_word_embeddings:
        matrix, head = stored.get(embedding), stored.get(head_name)
        if isinstance(matrix, TensorLocation) and isinstance(head, TensorLocation):
            _check_same(embedding, head_name, matrix, head)
    located = [(tensor, stored.get(tensor.name) or stored[head_name]) for tensor in expected_tensors(config, stored)]
    _check_quantized_alike(located)
    return sorted(located, key=lambda pair: (pair[1].file, pair[1].offset))


def _layer(tensor: HFTensor) -> str | None:
    """The name of its layer ("3"); None of embedding, final norm and head."""
    first, *rest = tensor.parameters[0].split(".")
    return rest[0] if first == "layers" else None


def _check_shape(name: str, location: TensorLocation, actual: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(actual) != tuple(expected):
        raise ModelError(
            f"{location.file}: {name}: packed is a weight of shape {list(actual)}, "
            f"config.json asks for {list(expected)}"
        )


def _linear(model: Decoder, parameter: str) -> Linear | GroupedLinear:
    linear = model.get_submodule(parameter.removesuffix(".weight"))
    assert isinstance(linear, Linear | GroupedLinear)
    return linear


def _check_quantized_alike(located: Iterable[Located]) -> None:
    """Raises ModelError for a layer with some experts in 4 bits and others not."""
    first: dict[str, tuple[bool, str]] = {}  # by parameter: whether its first tensor is in 4 bits, and its name
    for tensor, location in located:
        is_quantized = location.dtype == FOUR_BIT
        for parameter in tensor.parameters:
            was_quantized, name = first.setdefault(parameter, (is_quantized, tensor.name))
            if is_quantized != was_quantized:
                quantized, wide = (tensor.name, name) if is_quantized else (name, tensor.name)
                raise ModelError(
                    f"{location.file}: {quantized} is in 4 bits and {wide} is not; the experts of a layer are held "
                    "alike. Quantize the original model: all of its experts, or none"
                )


def _with_constants(name: str, stored: Mapping[str, TensorLocation], max_bytes: int | None = None) -> dict[str, Tensor]:
    """The codes of a 4-bit weight and its constants by name; those above `max_bytes` on the meta device."""
    tensors = {}
    for key, location in stored.items():
        if key == name or key.startswith(f"{name}."):
            dtype = (DTYPES | {FOUR_BIT: torch.uint8}).get(location.dtype)
            if dtype is None:
                raise ModelError(f"{location.file}: {key} is of the type {location.dtype}, which no part of {name} has")
            if max_bytes is not None and location.bytes > max_bytes:
                tensors[key] = torch.empty(location.shape, dtype=dtype, device="meta")
                continue
            tensors[key] = torch.empty(location.shape, dtype=dtype)
            with FileIO(location.file) as handle:
                handle.seek(location.offset)
                read_exactly(handle, tensors[key].view(-1))
    return tensors


def _check_same(name: str, head_name: str, embedding: TensorLocation, head: TensorLocation) -> None:
    """A tied matrix that is stored twice must be stored alike, or one of the two would silently be lost."""
    same = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
    with FileIO(embedding.file) as left, FileIO(head.file) as right:
        left.seek(embedding.offset)
        right.seek(head.offset)
        for start, end in ranges(embedding.bytes if same else 0, BUFFER_BYTES):
            same = same and left.read(end - start) == right.read(end - start)
    if not same:
        raise ModelError(
            f"{embedding.file.parent}: config.json ties the head to the embedding, but {head_name} and {name} differ. "
            'Set "tie_word_embeddings": false to keep both'
        )
