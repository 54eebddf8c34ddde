"""Rotary position embedding: the frequencies of each scaling, and the cos/sin tables of a forward pass.

The formulas are transformers' (`modeling_rope_utils.py`), in the same float32 arithmetic, so that tables agree bit for
bit where torch does.

T packed tokens · R rotated features of a head
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from danlu.models.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)


class Rotation(NamedTuple):
    """The rotation of queries and keys of T tokens by one rotary embedding."""

    cos: Tensor  # [T, R]
    sin: Tensor  # [T, R]
    query_scale: Tensor | None = None  # [T], of queries alone

    def to(self, dtype: torch.dtype) -> Rotation:
        """The same in another type."""
        return self.map(lambda x: x.to(dtype))

    def map(self, function: Callable[[Tensor], Tensor]) -> Rotation:
        """Returns the rotation with a function applied to each tensor."""
        scale = self.query_scale
        return Rotation(function(self.cos), function(self.sin), None if scale is None else function(scale))


def rotary_tables(
    rope: Rope, positions: Tensor, lengths: Tensor | None = None, *, frequencies: Tensor | None = None
) -> Rotation:
    """Returns cos and sin [T, R] float32 for positions [T] int64; both halves of R alike, as half-split rotation wants
    them.

    Under dynamic NTK a document longer than max_position_embeddings gets frequencies of its own, from its own length,
    and under LongRoPE it has the long or the short factors: the same as if it were alone, whatever it is packed with.

    lengths: [T] int64, the length that each token's document is rotated by; by default its own, read from the
    positions, which works where documents are whole.
    """
    if lengths is None and rope.follows_length:
        lengths = document_lengths(positions)
    if frequencies is None:
        frequencies = inverse_frequencies(rope, lengths, device=positions.device)  # [R/2] or [T, R/2]
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)  # [T, R]
    scaling = _amplitude(rope, lengths)
    query_scale = None
    if rope.temperature is not None:
        stretches = torch.floor(positions.float() / rope.temperature.length)  # lengths that lie before a token
        query_scale = 1 + rope.temperature.beta * torch.log(1 + stretches)
    return Rotation(angles.cos() * scaling, angles.sin() * scaling, query_scale)


def _amplitude(rope: Rope, lengths: Tensor | None) -> float | Tensor:
    """The factor of cos and sin; [T, 1] where short and long documents have factors of their own."""
    scaling = rope.scaling
    if not isinstance(scaling, LongRopeScaling) or scaling.short_mscale is None or scaling.long_mscale is None:
        return rope.attention_scaling
    assert lengths is not None, "the rotation follows the length of documents"
    return torch.where(_is_long(scaling, lengths), scaling.long_mscale, scaling.short_mscale)


def rotated_by_length(ropes: Sequence[Rope], length: int) -> bool:
    """Whether the beginning of a document of `length` tokens is rotated in another way than it would be alone.

    Keys that were cached when the document was shorter then have other frequencies.
    """
    return any(rope.follows_length and length > rope.short_length for rope in ropes)


def document_lengths(positions: Tensor) -> Tensor:
    """Returns the length of each token's document, read from positions [T]: a document ends where they stop rising by
    1.

    Lengths are wrong for documents that are not there from their first token to their last.
    """
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[1:] = positions[1:] != positions[:-1] + 1
    document = starts.cumsum(0) - 1  # [T]
    lengths = torch.zeros_like(positions).scatter_reduce(0, document, positions + 1, "amax")
    return lengths[document]


def inverse_frequencies(rope: Rope, lengths: Tensor | None = None, *, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position of each rotated pair, [R/2] float32.

    lengths: [T] int64, used by dynamic NTK and LongRoPE alone, which then give [T, R/2]; without it those of a document
    that is not longer than the model was trained for.
    """
    width = rope.dim
    exponents = torch.arange(0, width, 2, device=device).float() / width  # [R/2]
    match rope.scaling:
        case DynamicScaling(factor=factor):
            base = _dynamic_base(rope, factor, lengths, device)  # [] or [T, 1]
            return 1.0 / base**exponents
        case LinearScaling(factor=factor):
            return 1.0 / rope.theta**exponents / factor
        case Llama3Scaling() as scaling:
            return _llama3(1.0 / rope.theta**exponents, scaling)
        case YarnScaling() as scaling:
            return _yarn(rope.theta**exponents, rope, scaling)
        case LongRopeScaling() as scaling:
            return _longrope(rope.theta**exponents, scaling, lengths)
        case ProportionalScaling(partial_rotary_factor=share, factor=factor):
            frequencies = 1.0 / rope.theta**exponents / factor
            frequencies[int(share * width // 2) :] = 0.0
            return frequencies
        case None:
            return 1.0 / rope.theta**exponents


def _dynamic_base(rope: Rope, factor: float, lengths: Tensor | None, device: torch.device | str) -> Tensor:
    width, trained = rope.dim, rope.max_position_embeddings
    if lengths is None:
        return torch.tensor(rope.theta, device=device)
    stretch = factor * lengths.clamp(min=trained)[:, None] / trained - (factor - 1)  # [T, 1], 1 up to `trained`
    return rope.theta * stretch ** (width / (width - 2))


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    trained, factor = scaling.original_max_position_embeddings, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    keep = (trained / wavelengths - low) / (high - low)  # 0 at the longest wavelength of the ramp, 1 at the shortest
    ramp = (1 - keep) * frequencies / factor + keep * frequencies
    scaled = torch.where(wavelengths > trained / low, frequencies / factor, ramp)
    return torch.where(wavelengths < trained / high, frequencies, scaled)


def _longrope(periods: Tensor, scaling: LongRopeScaling, lengths: Tensor | None) -> Tensor:
    def divided(factors: tuple[float, ...]) -> Tensor:
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=periods.device) * periods)  # [R/2]

    short = divided(scaling.short_factor)
    if lengths is None:
        return short
    return torch.where(_is_long(scaling, lengths), divided(scaling.long_factor), short)


def _is_long(scaling: LongRopeScaling, lengths: Tensor) -> Tensor:
    """[T, 1]: whether each token's document, of `lengths` [T], has the long factors."""
    return lengths[:, None] > scaling.original_max_position_embeddings


def _yarn(periods: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    width, trained = rope.dim, scaling.original_max_position_embeddings

    def pair_that_turns(turns: float) -> float:
        """Index of the feature pair that turns this often within the trained length."""
        return width * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(width // 2, dtype=torch.float32, device=periods.device) - first) / (last - first)).clamp(0, 1)
    keep = 1 - ramp  # 1 where a pair turns often enough to be left alone
    return 1.0 / (scaling.factor * periods) * (1 - keep) + 1.0 / periods * keep
