"""The error of quantizing a model's linear layers, measured on its own weights, one matrix dense at a time.

W a matrix, Q the same quantized and dequantized; both float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from danlu.assembly.frozen_base import quantize_weight
from danlu.assembly.quantizing import ADVICE, refuse_four_bit
from danlu.assembly.stored_quantization import refuse_quantized
from danlu.models.adapter_sites import adapter_sites
from danlu.models.hf_folder import read_config
from danlu.models.loading import load_into, meta_decoder
from danlu.recipe.sections import QuantizationSection


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
    model = meta_decoder(read_config(folder))
    linears = {f"{site.name}.weight" for site in adapter_sites(model) if site.layer is not None}
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
