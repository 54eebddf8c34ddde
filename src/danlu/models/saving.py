"""Writes a decoder into a Hugging Face folder, tensor by tensor: next to its place, and renamed when whole.

Peak extra memory is one buffer: bytes are converted and written a buffer at a time, tensors of several parts part after
part. Only tensors that are transposed on disk, or interleaved with others, are put together first, an expert at a time.
Tensors and files of the folder that a model comes from which danlu does not train are copied byte for byte.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedWriter
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from danlu.core.errors import ModelError
from danlu.core.output_folder import replace_folder
from danlu.core.safetensors_format import (
    BUFFER_BYTES,
    TensorLocation,
    dtype_name,
    encode_header,
    fill_shards,
    raw_bytes,
    shard_name,
)
from danlu.core.shard_box import BoxValue, ShardBox
from danlu.core.tokenizer_files import NAMED_TEMPLATES, TOKENIZER_FILES, VOCABULARY_FILES
from danlu.models.config import ModelConfig
from danlu.models.decoder import Decoder
from danlu.models.families import FAMILIES
from danlu.models.hf_config import config_values
from danlu.models.hf_folder import CONFIG, GENERATION_CONFIG, INDEX, SINGLE_FILE, read_json, read_tensors
from danlu.models.hf_layout import HFTensor, Part, hf_tensors, may_have_untouched, own_name
from danlu.models.multimodal import TEXT_CONFIG, with_text_values
from danlu.models.safetensors_io import is_finite, ranges

_T = TypeVar("_T")


def save(
    model: Decoder,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer_from: Path | None = None,
    generation_from: Path | None = None,
    chat_template: str | None = None,
    shard_bytes: int = 5_000_000_000,
    config: ModelConfig | None = None,
    value: BoxValue | None = None,
    writes: bool = True,
    score_head: nn.Linear | None = None,
    pad_token: tuple[str, int] | None = None,
    stop_ids: Sequence[int] = (),
    origin: Path | None = None,
) -> None:
    """Writes config, weights in `dtype`, generation config and, from `tokenizer_from`, the tokenizer byte for byte.

    generation_from: the folder of the generation config, where the tokenizer's folder has none.
    chat_template: Jinja source that takes the place of the tokenizer's own. config, value: the config and a function
    that returns boxes of parameters as they are needed, where something else than the present model is written.
    writes: False on those of several processes that only help with `value`: they ask for the same boxes in the same
    order, ignore the values, and touch no file.

    score_head: the head of a model that classifies, which has no generation config.
    pad_token: (text, id) that the tokenizer is to pad with, in its config too.
    stop_ids: tokens that end an answer besides those of the config, as the chat template ends turns with one; config
    and generation config name them all, so that transformers and vLLM stop there. A model that classifies has none.
    origin: the folder that the model comes from; its tensors that danlu does not train are copied byte for byte, with
    the config of a multimodal model and its processor. Without it, and for a model that classifies, a multimodal
    model's language part alone is written.

    The folder appears whole or not at all. One that is there already is replaced if it is a model folder or empty.
    Raises ModelError for a folder that holds something else, for a tokenizer folder without a tokenizer, and for
    weights that are not finite in `dtype`; ResourceError for a full disk or a folder that cannot be written.
    """
    shape, kept = _written_config(config or model.config, origin, stop_ids, pad_token)
    tensors = hf_tensors(shape)
    value_of = value or (lambda name, box=None: _box_of(model.get_parameter(name), box))
    if not writes:
        for part in (part for tensor in tensors for part in tensor.parts):
            value_of(part.parameter, part.box)
        return
    own: dict[str, Tensor] = {}
    if score_head is not None:
        from danlu.models.score_head import head_tensors  # here and below: most models have none

        own = head_tensors(score_head)
    tensors += [HFTensor.whole(name, tensor.shape) for name, tensor in own.items()]
    folder = Path(os.path.abspath(folder))
    if tokenizer_from is not None:
        _files_to_copy(tokenizer_from)  # reported before anything is written
    values = config_values(shape, torch_dtype=str(dtype).removeprefix("torch."))
    eos = values["eos_token_id"]
    if score_head is not None:
        from danlu.models.score_head import label_values

        values |= label_values(score_head, shape.task)
    written: list[HFTensor | KeptTensor] = [*tensors]
    if kept is not None:
        values = kept.config_values(values)
        written = [replace(tensor, name=kept.names.get(tensor.name, tensor.name)) for tensor in tensors]
        written += kept.tensors
    sized = [(tensor, _size_bytes(tensor, dtype)) for tensor in written]
    shards = shard_files(sized, shard_bytes)
    with replace_folder(folder, sum(size for _, size in sized), own_file=CONFIG) as fresh:
        write_json(fresh / CONFIG, values)
        if shape.task == "causal-lm":
            ids = {"bos_token_id": shape.bos_token_id, "eos_token_id": eos, "pad_token_id": shape.pad_token_id}
            write_json(fresh / GENERATION_CONFIG, {name: value for name, value in ids.items() if value is not None})
        if generation_from is not None and (generation_from / GENERATION_CONFIG).is_file():
            shutil.copyfile(generation_from / GENERATION_CONFIG, fresh / GENERATION_CONFIG)
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, fresh)
        if shape.task != "causal-lm":
            (fresh / GENERATION_CONFIG).unlink(missing_ok=True)  # that of the tokenizer's folder
        elif stop_ids:
            write_stop_ids(fresh, shape.eos_token_ids)
        if kept is not None:
            kept.copy_processor(fresh)
        if pad_token is not None and tokenizer_from is not None:
            write_pad_token(fresh, pad_token[0])
        if chat_template is not None:
            write_template(fresh, chat_template)
        _write_weights(fresh, lambda name, box=None: own[name] if name in own else value_of(name, box), shards, dtype)


def _written_config(
    config: ModelConfig, origin: Path | None, stop_ids: Sequence[int], pad_token: tuple[str, int] | None
) -> tuple[ModelConfig, Kept | None]:
    """Returns the config as `save` writes it, and the parts of `origin` that are copied."""
    kept = None if origin is None or config.task != "causal-lm" else Kept.of(origin, config)
    if kept is None:
        config = replace(config, multimodal=None)
    if config.task == "causal-lm":
        config = replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *stop_ids])))
    if pad_token is not None:
        config = replace(config, pad_token_id=pad_token[1])
    return config, kept


def boxes_of(whole: Callable[[str], Tensor]) -> BoxValue:
    """Boxes of values that can only be made whole: each is made once, and kept until all of it has been asked for."""
    begun: dict[str, tuple[Tensor, int]] = {}  # the value, and how many of its elements have been given

    def value(name: str, box: ShardBox | None = None) -> Tensor:
        tensor, given = begun.pop(name) if name in begun else (whole(name), 0)
        given += tensor.numel() if box is None else box.numel
        if given < tensor.numel():
            begun[name] = (tensor, given)
        return _box_of(tensor, box)

    return value


def _box_of(tensor: Tensor, box: ShardBox | None) -> Tensor:
    return tensor if box is None or box.is_full else box.view_of(tensor)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies tokenizer and generation config of `source`, byte for byte. Raises ModelError if it has no tokenizer."""
    for file in _files_to_copy(source):
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def write_pad_token(folder: Path, text: str) -> None:
    """Says in a folder's tokenizer_config.json (and special_tokens_map.json) which of its tokens pads."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            write_json(folder / name, read_json(folder / name) | {"pad_token": text})


def write_stop_ids(folder: Path, stop_ids: Sequence[int]) -> None:
    """Adds tokens that end an answer to those of a folder's generation_config.json, which it makes where there is none.

    transformers stops at these alone, and vLLM at these and the tokenizer's eos_token.
    """
    file = folder / GENERATION_CONFIG
    values = read_json(file) if file.is_file() else {}
    given = values.get("eos_token_id")
    known = [] if given is None else given if isinstance(given, list) else [given]
    if missing := [token for token in dict.fromkeys(stop_ids) if token not in known]:
        ids = [*known, *missing]
        write_json(file, values | {"eos_token_id": ids if len(ids) > 1 else ids[0]})


def write_template(folder: Path, source: str) -> None:
    """Writes a chat template (Jinja source) in place of all the tokenizer's own ones."""
    shutil.rmtree(folder / NAMED_TEMPLATES, ignore_errors=True)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")


def _files_to_copy(source: Path) -> list[Path]:
    if not any((source / name).is_file() for name in VOCABULARY_FILES):
        raise ModelError(f"{source}: no tokenizer here: none of {', '.join(VOCABULARY_FILES)}")
    files = {file for pattern in (*TOKENIZER_FILES, GENERATION_CONFIG) for file in source.glob(pattern)}
    return sorted(file for file in files if file.is_file())


def shard_files(sized: Iterable[tuple[_T, int]], shard_bytes: int) -> dict[str, list[_T]]:
    """Distributes tensors with their bytes on disk over files: file name -> tensors; each file as full as it gets."""
    shards = fill_shards(sized, shard_bytes)
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    return {shard_name("model", number, len(shards)): shard for number, shard in enumerate(shards, start=1)}


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Writes the index of a folder with weights in several files. weight_map: tensor -> file."""
    write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)})


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file as transformers formats its own."""
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_weights(
    folder: Path, value: BoxValue, shards: Mapping[str, list[HFTensor | KeptTensor]], dtype: torch.dtype
) -> None:
    for name, shard in shards.items():
        header = encode_header(
            (
                each.name,
                each.dtype if isinstance(each, KeptTensor) else dtype_name(_dtype_on_disk(each, dtype)),
                each.shape,
            )
            for each in shard
        )
        with (folder / name).open("wb") as handle:
            handle.write(header)
            start = len(header)
            for tensor in shard:
                if isinstance(tensor, KeptTensor):
                    handle.seek(start)
                    tensor.copy_to(handle)
                else:
                    for group in tensor.groups:
                        _write_group(handle, start, tensor, group, value, _dtype_on_disk(tensor, dtype))
                start += _size_bytes(tensor, dtype)
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
        write_index(
            folder, weight_map, sum(_size_bytes(tensor, dtype) for shard in shards.values() for tensor in shard)
        )


def _write_group(
    handle: BufferedWriter, start: int, tensor: HFTensor, group: Sequence[Part], value: BoxValue, dtype: torch.dtype
) -> None:
    """Writes one part of a tensor, or those that take turns, to their places in a file; the tensor is at `start`."""
    place = group[0].on_disk(group[0].box, tensor.shape)
    parts = [(part, value(part.parameter, part.box)) for part in group]
    if group[0].is_plain:
        whole = parts[0][1]
    else:
        whole = torch.empty(place.sizes, dtype=dtype)
        for part, own in parts:
            assert own is not None, f"{part.parameter}: no value on the process that writes"
            part.view_of(whole).copy_(own)
    assert whole is not None, f"{group[0].parameter}: no value on the process that writes"
    flat, read = whole.detach().reshape(-1), 0
    for offset, count in place.contiguous_ranges():
        if handle.tell() != (at := start + offset * dtype.itemsize):
            handle.seek(at)
        for first, end in ranges(count, BUFFER_BYTES // dtype.itemsize):
            values = flat[read + first : read + end].to(device="cpu", dtype=dtype)
            if not is_finite(values):
                raise ModelError(f"{group[0].parameter}: not finite as {dtype}; the model is not written")
            handle.write(raw_bytes(values))
        read += count


def _size_bytes(tensor: HFTensor | KeptTensor, dtype: torch.dtype) -> int:
    if isinstance(tensor, KeptTensor):
        return tensor.location.bytes
    return math.prod(tensor.shape) * _dtype_on_disk(tensor, dtype).itemsize


def _dtype_on_disk(tensor: HFTensor, dtype: torch.dtype) -> torch.dtype:
    """Returns float32 for corrections of routers, as transformers does, and `dtype` for others: bfloat16 would round
    away their updates.
    """
    return torch.float32 if any(name.endswith(".router.correction") for name in tensor.parameters) else dtype


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that is copied as it is stored."""

    name: str
    location: TensorLocation

    @property
    def dtype(self) -> str:
        """The dtype as safetensors names it."""
        return self.location.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor on disk."""
        return self.location.shape

    def copy_to(self, handle: BufferedWriter) -> None:
        """Writes its bytes, a buffer at a time. Raises ModelError where its file has fewer by now."""
        with self.location.file.open("rb") as source:
            source.seek(self.location.offset)
            for start, end in ranges(self.location.bytes, BUFFER_BYTES):
                content = source.read(end - start)
                if len(content) < end - start:
                    raise ModelError(f"{self.location.file}: tensor {self.name}: the file ended while it was copied")
                handle.write(content)


def check_untouched(origin: Path, config: ModelConfig) -> None:
    """Raises ModelError where the model's folder, from which a result copies tensors, can no longer be read.

    Called for runs that resume, which read their own weights from a checkpoint.
    """
    if not may_have_untouched(config):
        return
    try:
        read_tensors(origin)
    except ModelError as error:
        raise ModelError(
            f"{error}. The result takes the tensors that are not trained over from this folder: put it back"
        ) from None


@dataclass(frozen=True)
class Kept:
    """The tensors and files that are copied from the folder that a model comes from."""

    origin: Path
    config: ModelConfig
    names: Mapping[str, str]
    """Tensors of `hf_tensors` -> their names in the folder, of those that are there."""
    tensors: tuple[KeptTensor, ...]

    @classmethod
    def of(cls, origin: Path, config: ModelConfig) -> Self | None:
        """Returns None where the folder holds nothing besides the tensors that danlu trains.

        Most families' folders cannot: they are not read, and need not be there any more. Raises ModelError as
        `read_tensors`.
        """
        if not may_have_untouched(config):
            return None
        stored = read_tensors(origin)
        named = {name: own_name(name, config) for name in stored}
        tensors = tuple(KeptTensor(name, stored[name]) for name, own in named.items() if own is None)
        if config.multimodal is None and not tensors:
            return None
        return cls(origin, config, {own: name for name, own in named.items() if own is not None}, tensors)

    def config_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of the result's config.json. values: the config of the trained part, as a model of its
        own.
        """
        return with_untouched_values(self.origin, self.config, values)

    def copy_processor(self, folder: Path) -> None:
        """Copies the files of the image and audio processor."""
        for name in _PROCESSOR_FILES:
            if (self.origin / name).is_file():
                shutil.copyfile(self.origin / name, folder / name)


def with_untouched_values(origin: Path, config: ModelConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a config.json with the other parts' keys from the folder `origin`.

    config: that of the language part. values: the content of a config.json of it alone.
    """
    original = read_json(origin / CONFIG)
    is_whole = config.multimodal is None
    language = original.get(TEXT_CONFIG, original)
    keys = FAMILIES[config.family].mtp_keys
    values = {**values, **{key: language[key] for key in keys if key in language}}
    return values if is_whole else with_text_values(original, values)
