"""What few bits lose of a model's linear layers, measured on its own weights: one matrix dense at a time.

W a matrix, Q the same after packing and unpacking; both float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from danlu.assembly.frozen_base import quantize_weight
from danlu.assembly.quantizing import none_is_packed, refuse_quantized
from danlu.models.adapter_sites import adapter_sites
from danlu.models.hf_folder import read_config
from danlu.models.loading import load_into, meta_decoder
from danlu.recipe.sections import QuantizationSection


@dataclass
class QuantizationError:
    """Of all linear layers of a model in one format."""

    numbers: int = 0
    bytes: int = 0
    """Of codes and constants."""
    worst: float = 0.0
    """The largest ||W - Q|| / ||W|| of one layer, Frobenius norms."""
    worst_layer: str = ""
    _square: float = 0.0
    _lost_square: float = 0.0
    _size: float = 0.0
    _lost_size: float = 0.0

    @property
    def bits(self) -> float:
        """A parameter, counted from what is stored."""
        return 8 * self.bytes / self.numbers

    @property
    def relative(self) -> float:
        """||W - Q|| / ||W|| over all layers together, Frobenius norms."""
        return (self._lost_square / self._square) ** 0.5

    @property
    def mean_relative(self) -> float:
        """mean |W - Q| / mean |W| over all numbers."""
        return self._lost_size / self._size

    def add(self, name: str, weight: Tensor, section: QuantizationSection) -> None:
        """One more layer; its numbers count as many times as there are."""
        packed = quantize_weight(weight, section, name)
        wide = weight.to(torch.float32)
        lost = packed.dense(torch.float32).sub_(wide)
        square, lost_square = (float(one.square().sum(dtype=torch.float64)) for one in (wide, lost))
        self.numbers += weight.numel()
        self.bytes += packed.stored_bytes()
        self._square += square
        self._lost_square += lost_square
        self._size += float(wide.abs().sum(dtype=torch.float64))
        self._lost_size += float(lost.abs().sum(dtype=torch.float64))
        if square and (relative := (lost_square / square) ** 0.5) > self.worst:
            self.worst, self.worst_layer = relative, name


def quantization_errors(
    folder: Path, formats: Mapping[str, QuantizationSection], progress: Callable[[int, int], None] | None = None
) -> dict[str, QuantizationError]:
    """What each format loses of the linear layers of attention and MLP.

    Raises ModelError for a model that is quantized already, or that cannot be read.
    """
    refuse_quantized(folder)
    model = meta_decoder(read_config(folder))
    linears = {f"{site.name}.weight" for site in adapter_sites(model) if site.layer is not None}
    found = {name: QuantizationError() for name in formats}
    done = 0

    def take(parameter: str, value: Tensor) -> None:
        nonlocal done
        if parameter not in linears:
            return
        for name, section in formats.items():
            found[name].add(parameter.removesuffix(".weight"), value, section)
        done += 1
        if progress is not None:
            progress(done, len(linears))

    load_into(model, folder, take=take, unpack=none_is_packed)
    return found
