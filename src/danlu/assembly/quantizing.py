"""A model folder into one in 4 bits, as bitsandbytes and transformers lay it out: one weight in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from danlu import __version__
from danlu.assembly.base_model import ORIGIN, ORIGIN_KEY
from danlu.assembly.frozen_base import quantize_weight
from danlu.assembly.merging import check_free, find_tokenizer
from danlu.errors import ModelError
from danlu.models.adapter_sites import adapter_sites
from danlu.models.families import config_values
from danlu.models.hf_folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    SINGLE_FILE,
    fingerprint,
    read_config,
    read_json,
)
from danlu.models.hf_layout import HFTensor, hf_tensors
from danlu.models.loading import load_into, meta_decoder, stored_dtype
from danlu.models.saving import copy_tokenizer, fresh_folder
from danlu.models.tensor_bytes import is_finite
from danlu.models.tensor_stream import TensorStream
from danlu.numerics.bitsandbytes_config import config_values as quantization_values
from danlu.numerics.bitsandbytes_config import read_config as read_quantization
from danlu.numerics.bitsandbytes_layout import SUFFIXES
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.recipe import sections

_LEFT = ("lm_head",)
"""Modules that stay as they are, beside embeddings and norms."""

Progress = Callable[[int, int], None]
"""Told how many of the tensors are done, and how many there are."""


@dataclass(frozen=True)
class Quantized:
    """What was written."""

    parameters: int
    packed: int
    """Parameters that are in 4 bits."""
    packed_bytes: int
    bytes: int
    """Of all weights and constants."""

    @property
    def bits(self) -> float:
        """Of a packed parameter, with its share of the constants."""
        return 8 * self.packed_bytes / self.packed


def refuse_quantized(folder: Path) -> None:
    """Raises ModelError for a folder whose weights are in few bits already."""
    stored = read_quantization(read_json(folder / CONFIG), str(folder / CONFIG))
    if stored is not None:
        raise ModelError(
            f"{folder}: is quantized already ({stored.kind}); quantizing it again would round twice. "
            "Name the model it was made from"
        )


def quantize(
    folder: Path,
    target: Path,
    section: sections.Nf4 | sections.Fp4,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress | None = None,
    shard_bytes: int = 5_000_000_000,
) -> Quantized:
    """Writes `folder` with its linear layers in 4 bits; embedding, head and norms stay.

    dtype: of what stays, and of products; by default the one it is stored in. Codes are made of what is stored.

    The folder appears whole or not at all. Raises ModelError for a model that is quantized already and for weights that
    are not finite, and ResourceError if `target` holds anything or the disk is full.
    """
    check_free(target)
    refuse_quantized(folder)
    config = read_config(folder)
    model = meta_decoder(config)
    linears = {f"{site.name}.weight" for site in adapter_sites(model) if site.layer is not None}
    kept = dtype or stored_dtype(folder)
    kept = torch.float32 if kept == torch.float64 else kept
    tensors = hf_tensors(config)
    values = config_values(config, torch_dtype=str(kept).removeprefix("torch."))
    values["quantization_config"] = quantization_values(section.kind, double=section.double, dtype=kept, skip=_LEFT)
    with fresh_folder(target, sum(_size(one, linears, kept) for one in tensors), holds=CONFIG) as fresh:
        _write_json(fresh / CONFIG, values)
        _write_json(fresh / ORIGIN, {"version": __version__, ORIGIN_KEY: fingerprint(folder)})
        if (words := find_tokenizer([folder])) is not None:
            copy_tokenizer(words, fresh)
        if (folder / GENERATION_CONFIG).is_file():
            (fresh / GENERATION_CONFIG).write_bytes((folder / GENERATION_CONFIG).read_bytes())
        with ExitStack() as closing:
            shards = list(_shards(fresh, tensors, linears, kept, shard_bytes, closing))
            writer = _Writer(tensors, dict(shards), linears, section, kept, progress)
            load_into(model, folder, take=writer.take, unpack=none_is_packed)
        streams = list({id(stream): stream for _, stream in shards}.values())
        if len(streams) > 1:
            weight_map = {name: stream.file.name for stream in streams for name in stream.names}
            total = sum(stream.bytes for stream in streams)
            _write_json(fresh / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return Quantized(config.parameter_count(), writer.packed, writer.packed_bytes, sum(one.bytes for one in streams))


class _Writer:
    """Takes weights as they are loaded, and writes each when all parts of its tensor are there."""

    def __init__(
        self,
        tensors: list[HFTensor],
        shards: dict[str, TensorStream],
        linears: set[str],
        section: sections.Nf4 | sections.Fp4,
        dtype: torch.dtype,
        progress: Progress | None,
    ) -> None:
        self.packed = self.packed_bytes = 0
        self._tensor_of = {part: tensor for tensor in tensors for part in tensor.parts}
        self._shards, self._linears, self._section, self._dtype = shards, linears, section, dtype
        self._waiting: list[Tensor] = []
        self._progress, self._done, self._total = progress, 0, len(tensors)

    def take(self, parameter: str, value: Tensor) -> None:
        """For `load_into`: nothing is left in the model."""
        tensor = self._tensor_of[parameter]
        self._waiting.append(value)
        if len(self._waiting) < len(tensor.parts):
            return
        whole = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        self._waiting = []
        if parameter in self._linears:
            self._write_packed(tensor.name, whole)
        else:
            self._write(tensor.name, whole.to(self._dtype))
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _write_packed(self, name: str, whole: Tensor) -> None:
        weight = quantize_weight(whole, self._section, name)
        assert isinstance(weight, FourBitWeight)
        weight.dtype = self._dtype
        self.packed += whole.numel()
        self.packed_bytes += weight.stored_bytes()
        for key, tensor in weight.tensors(name).items():
            self._shards[name].add(key, tensor)

    def _write(self, name: str, value: Tensor) -> None:
        if not is_finite(value):
            raise ModelError(f"{name}: not finite as {self._dtype}; the model is not written. Choose a wider --dtype")
        self._shards[name].add(name, value)


def _shards(
    folder: Path,
    tensors: list[HFTensor],
    linears: set[str],
    dtype: torch.dtype,
    shard_bytes: int,
    closing: ExitStack,
) -> Iterator[tuple[str, TensorStream]]:
    """(tensor, the file it goes to), with each file as full as it gets."""
    groups: list[list[HFTensor]] = []
    room = 0
    for tensor in tensors:
        size = _size(tensor, linears, dtype)
        if not groups or size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(tensor)
        room -= size
    for number, group in enumerate(groups, start=1):
        file = SINGLE_FILE if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        names = [f"{tensor.name}{suffix}" for tensor in group for suffix in ("", *SUFFIXES)]
        stream = closing.enter_context(TensorStream(folder / file, names))
        yield from ((tensor.name, stream) for tensor in group)


def _size(tensor: HFTensor, linears: set[str], dtype: torch.dtype) -> int:
    """Bytes on disk, a little too many: 4.5 bits and some constants of a packed weight."""
    count = 1
    for side in tensor.shape:
        count *= side
    return count * 9 // 16 + 4096 if tensor.parts[0] in linears else count * dtype.itemsize


def none_is_packed(name: str, tensors: object, where: str, rows: object) -> list[FourBitWeight]:
    """For `load_into`, of a folder that is not quantized."""
    raise ModelError(f"{where}: {name} is in 4 bits, though config.json does not say so")


def _write_json(file: Path, values: object) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
