"""A model folder into one in 4 bits, as bitsandbytes and transformers lay it out, and the error of quantizing a model.

One weight is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from danlu.assembly.frozen_base import quantize_weight
from danlu.assembly.quantized_folder import FolderStreams, streamed_folder
from danlu.assembly.stored_base import refuse_quantized
from danlu.core.errors import ModelError
from danlu.core.output_folder import refuse_existing
from danlu.models.config import is_of_router
from danlu.models.hf_folder import read_config, untouched_tensors
from danlu.models.hf_layout import HFTensor, hf_tensors
from danlu.models.loading import load_into, meta_decoder, stored_dtype
from danlu.models.sites import sites_of
from danlu.numerics.bitsandbytes_config import config_values as quantization_values
from danlu.numerics.bitsandbytes_layout import SUFFIXES
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.recipe import sections
from danlu.recipe.sections import QuantizationSection

ADVICE = "Name the model it was made from"
_LEFT = ("lm_head",)
"""Modules that stay as they are, in addition to embeddings and norms."""

Progress = Callable[[int, int], None]
"""Called with how many tensors are written, and how many there are."""


@dataclass(frozen=True)
class Quantized:
    """The sizes of the folder that `quantize` wrote."""

    parameters: int
    quantized: int
    """Parameters that are in 4 bits."""
    quantized_bytes: int
    """Bytes of their codes and constants."""
    bytes: int
    """Bytes of all weights and constants."""

    @property
    def bits(self) -> float:
        """Bits of a quantized parameter, its share of the constants included."""
        return 8 * self.quantized_bytes / self.quantized


def quantize(
    folder: Path,
    target: Path,
    section: sections.Nf4 | sections.Fp4,
    *,
    dtype: torch.dtype | None = None,
    experts: bool = True,
    progress: Progress | None = None,
    shard_bytes: int = 5_000_000_000,
) -> Quantized:
    """Writes a copy of `folder` with its linear layers in 4 bits; embedding, head, norms and routers stay as they are.

    dtype: the type of unquantized weights, and of products; by default the stored one. Codes are made of the stored
    weights.
    experts: whether they are quantized too, each by itself; those that share tensors on the disk, for which
    bitsandbytes has no layout, stay as they are.

    The folder appears whole or not at all. Raises ModelError for a model that is quantized already, for one with parts
    outside of the language model and for weights that are not finite, and ResourceError if `target` holds anything or
    the disk is full.
    """
    refuse_existing(target)
    refuse_quantized(folder, ADVICE)
    config = read_config(folder)
    if config.task != "causal-lm":
        raise ModelError(f"{folder}: a reward model is not quantized; quantize the language model that it starts from")
    if untouched := untouched_tensors(folder, config):
        raise ModelError(
            f"{folder}: has {len(untouched)} tensors that are not the language model's, {next(iter(untouched))} among "
            "them, which would be left out. Train from it with `quantization: nf4`, which quantizes while it reads"
        )
    model = meta_decoder(config)
    sites = (site for site in sites_of(config) if site.is_linear or (experts and site.experts is not None))
    linears = {f"{site.name}.weight" for site in sites}
    kept = dtype or stored_dtype(folder)
    kept = torch.float32 if kept == torch.float64 else kept
    tensors = hf_tensors(config)
    quantized = {tensor.name for tensor in tensors if tensor.parameters[0] in linears and len(tensor.shape) == 2}
    routers = {tensor.name.rpartition(".")[0] for tensor in tensors if is_of_router(tensor.parameters[0])}
    kept_name = str(kept).removeprefix("torch.")
    skip = [*_LEFT, *sorted(routers)]
    values = quantization_values(section.kind, double=section.double, compute_dtype=kept_name, skip=skip)
    with streamed_folder(
        folder,
        target,
        config,
        [(tensor, _size_bytes(tensor, quantized, kept)) for tensor in tensors],
        dtype=kept,
        quantization=values,
        names_of=lambda tensor: [f"{tensor.name}{suffix}" for suffix in ("", *SUFFIXES)],
        shard_bytes=shard_bytes,
    ) as streams:
        writer = _Writer(tensors, streams, quantized, section, kept, progress)
        load_into(model, folder, take=writer.take, unpack=refuse_four_bit)
    return Quantized(config.parameter_count(), writer.quantized, writer.quantized_bytes, streams.bytes)


@dataclass
class _Writer:
    """Takes weights as they are loaded, and writes each tensor of the folder when all that it is made of has come."""

    tensors: list[HFTensor]
    streams: FolderStreams
    in_four_bits: set[str]  # names of tensors
    section: sections.Nf4 | sections.Fp4
    dtype: torch.dtype
    progress: Progress | None
    quantized: int = 0  # parameters
    quantized_bytes: int = 0
    written: int = 0  # tensors
    waiting: dict[str, Tensor] = field(default_factory=dict)  # parameters

    def take(self, parameter: str, value: Tensor) -> None:
        """Takes a value for `load_into`: writes it and returns None, so that nothing stays in the model."""
        self.waiting[parameter] = value
        for tensor in self.tensors_of[parameter]:
            if not all(name in self.waiting for name in tensor.parameters):
                return
        for tensor in self.tensors_of[parameter]:
            whole = tensor.assembled(self.waiting.__getitem__)
            if tensor.name in self.in_four_bits:
                self._write_quantized(tensor.name, whole)
            else:
                self.streams.add_dense(tensor.name, whole.to(self.dtype))
            self.written += 1
            if self.progress is not None:
                self.progress(self.written, len(self.tensors))
        for name in {name for tensor in self.tensors_of[parameter] for name in tensor.parameters}:
            del self.waiting[name]

    @cached_property
    def tensors_of(self) -> dict[str, list[HFTensor]]:
        """The tensors that have parts of a parameter; those of one are those of all that share a tensor with it."""
        tensors_of: dict[str, list[HFTensor]] = {}
        for tensor in self.tensors:
            for name in tensor.parameters:
                tensors_of.setdefault(name, []).append(tensor)
        return tensors_of

    def _write_quantized(self, name: str, whole: Tensor) -> None:
        weight = quantize_weight(whole, self.section, name)
        assert isinstance(weight, FourBitWeight)
        weight.dtype = self.dtype
        self.quantized += whole.numel()
        self.quantized_bytes += weight.stored_bytes()
        for key, tensor in weight.tensors(name).items():
            self.streams.of_tensor[name].add(key, tensor)


def _size_bytes(tensor: HFTensor, in_four_bits: set[str], dtype: torch.dtype) -> int:
    """Bytes on disk, rounded up: of a quantized weight 4.5 bits a number and the constants of one."""
    count = math.prod(tensor.shape)
    return count * 9 // 16 + 4096 if tensor.name in in_four_bits else count * dtype.itemsize


def refuse_four_bit(name: str, tensors: object, where: str, rows: object) -> list[FourBitWeight]:
    """Raises ModelError at a weight in 4 bits, for `load_into` of a folder that is not quantized."""
    raise ModelError(f"{where}: {name} is in 4 bits, though config.json does not say so")


@dataclass
class QuantizationError:
    """The error of one format over all linear layers of a model, summed up layer by layer."""

    elements: int = 0
    bytes: int = 0
    """Bytes of codes and constants."""
    worst: float = 0.0
    """The largest ||W - Q|| / ||W|| of one layer, Frobenius norms."""
    worst_layer: str = ""
    _weight_square: float = 0.0
    _error_square: float = 0.0
    _weight_abs: float = 0.0
    _error_abs: float = 0.0

    @property
    def bits(self) -> float:
        """Bits a parameter takes, its share of the constants included."""
        return 8 * self.bytes / self.elements

    @property
    def relative(self) -> float:
        """||W - Q|| / ||W|| over all layers together, Frobenius norms."""
        return (self._error_square / self._weight_square) ** 0.5

    @property
    def mean_relative(self) -> float:
        """mean |W - Q| / mean |W| over all numbers."""
        return self._error_abs / self._weight_abs

    def add(self, name: str, weight: Tensor, section: QuantizationSection) -> None:
        """Adds the error of one layer's weight [O, I]; every element counts alike."""
        quantized = quantize_weight(weight, section, name)
        wide = weight.to(torch.float32)
        error = quantized.dense(torch.float32).sub_(wide)
        weight_square, error_square = (float(matrix.square().sum(dtype=torch.float64)) for matrix in (wide, error))
        self.elements += weight.numel()
        self.bytes += quantized.stored_bytes()
        self._weight_square += weight_square
        self._error_square += error_square
        self._weight_abs += float(wide.abs().sum(dtype=torch.float64))
        self._error_abs += float(error.abs().sum(dtype=torch.float64))
        if weight_square and (relative := (error_square / weight_square) ** 0.5) > self.worst:
            self.worst, self.worst_layer = relative, name


def quantization_errors(
    folder: Path, formats: Mapping[str, QuantizationSection], progress: Callable[[int, int], None] | None = None
) -> dict[str, QuantizationError]:
    """The error that each format, by its name, makes in the linear layers of attention and MLP; each expert counts as
    one.

    Raises ModelError for a model that is quantized already, or that cannot be read.
    """
    refuse_quantized(folder, ADVICE)
    config = read_config(folder)
    model = meta_decoder(config)
    linears = {f"{site.name}.weight" for site in sites_of(config) if site.layer is not None}
    errors = {name: QuantizationError() for name in formats}
    done = 0

    def take(parameter: str, value: Tensor) -> None:
        nonlocal done
        if parameter not in linears:
            return
        layer = parameter.removesuffix(".weight")
        matrices = [(layer, value)]
        if value.ndim == 3:
            matrices = [(f"{layer}[{expert}]", matrix) for expert, matrix in enumerate(value.unbind())]
        for name, section in formats.items():
            for each, matrix in matrices:
                errors[name].add(each, matrix, section)
        done += 1
        if progress is not None:
            progress(done, len(linears))

    load_into(model, folder, take=take, unpack=refuse_four_bit)
    return errors
