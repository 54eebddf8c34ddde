"""AdamW's moments in 8 bits: blockwise dynamic quantization (Dettmers et al., arXiv:2110.02861, sections 2.1 and 2.2).

A block of elements shares the largest magnitude in it (absmax, float32); each element keeps the number of one of 256
fixed values in [-1, 1] ([0, 1] for the second moment) that its share of absmax is nearest to. The values are
bitsandbytes'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from danlu.optim.adamw import Float32Moments, State, TensorSpecs, fused_adamw, specs_of
from danlu.optim.state_shapes import BLOCK, SMALLEST, eight_bit_moments

# Elements that are decoded, updated and encoded together, in 14 bytes each. 63M parameters take 475 ms by 2^15, 354 by
# 2^18 and 331 by 2^20 (two threads); where other processes want the cores, few large chunks wait less for threads.
_CHUNK_CPU = 1 << 20
_CHUNK_CUDA = 1 << 22  # a launch costs more than the memory until here
# Shares of absmax are looked up as half-precision numbers. Times this they use all of its range, so that its precision
# is the same 11 bits down to 2e-9 of absmax, far below the smallest value of the map.
_HALF_SCALE = 2.0**15
# Smallest absmax that is divided by: keeps a block of zeros from 0 / 0, and is far below what eps lets count.
_MIN_ABSMAX = 1e-30
_PER_ELEMENT = ("exp_avg", "exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax")  # or block of them
# torch.index_select takes a vector on one thread, 0.41 ns an element; torch.take 0.94 ns, which all threads share.
_MAX_THREADS_OF_SELECT = 3


@cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values that codes stand for, rising, float32: the same bits as bitsandbytes' `create_dynamic_map`.

    Seven decades from 1e-7 to 1, each with twice as many evenly spaced values as the one below; 0; and 1.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        bounds = torch.linspace(0.1, 1, count + 1, dtype=torch.float32)
        middles = (10 ** (decade - 6) * ((bounds[:-1] + bounds[1:]) / 2)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


@cache
def _codes_of_halves(signed: bool) -> Tensor:
    """The code of every half-precision number, times 1 / `_HALF_SCALE`, by its 16 bits: uint8 [65536]."""
    shares = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float() / _HALF_SCALE
    values = dynamic_map(signed)
    codes = torch.bucketize(shares.nan_to_num(0.0), (values[:-1] + values[1:]) / 2)
    if not signed:
        codes.clamp_(min=1)  # see EightBitMoments
    return codes.to(torch.uint8)


@cache
def _tables(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    return dynamic_map(signed).to(device), _codes_of_halves(signed).to(device)


@dataclass(frozen=True)
class _Buffers:
    """Work space for the elements of one chunk, of which a shorter chunk takes the beginning."""

    first: Tensor  # [n] float32: first moments
    second: Tensor  # [n] float32: second moments
    halves: Tensor  # [n] float16
    index: Tensor  # [n] int32 or int64: what is looked up


class EightBitMoments:
    """Moments as codes, of a quarter of float32's size: 2 bytes a parameter and 8 for every block of them, against 8.

    The update is AdamW's in float32, on decoded moments; new moments are encoded afterwards. Encoding takes the nearest
    value, up to rounding the share of absmax to 11 bits first: where a share lies within 2^-11 of itself from the
    middle of two values, either may be taken. One exception: a second moment never becomes 0 next to larger ones, but
    the smallest value above it, 3.25e-7 of absmax; nearest would make it 0 below half of that, and an update that is
    then divided by eps alone would jump.

    Parameters of fewer than `smallest` elements keep float32 moments, as in bitsandbytes.

    State of larger ones: `step` (float32, shape []), `exp_avg` and `exp_avg_sq` (uint8, of the parameter's shape),
    `exp_avg_absmax` and `exp_avg_sq_absmax` (float32, one for each block of the flattened parameter).
    """

    def __init__(self, block: int = BLOCK, smallest: int = SMALLEST) -> None:
        self.block = block
        self.smallest = smallest
        self._float32 = Float32Moments()
        self._buffers: dict[torch.device, _Buffers] = {}

    def specs(self, shape: torch.Size) -> TensorSpecs:
        return specs_of(eight_bit_moments(tuple(shape), self.block, self.smallest))

    def update(
        self, group: Mapping[str, Any], weights: Sequence[Any], gradients: Sequence[Any], states: Sequence[State]
    ) -> None:
        small = [number for number, state in enumerate(states) if "exp_avg_absmax" not in state]
        self._float32.update(group, *([of[number] for number in small] for of in (weights, gradients, states)))
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            if "exp_avg_absmax" in state:
                self._update_codes(group, weight, gradient, state)

    def by_row(self, state: State, rows: int) -> State | None:
        if "exp_avg_absmax" not in state:
            return self._float32.by_row(state, rows)
        columns = state["exp_avg"].numel() // rows
        if columns % self.block:
            return None
        return {name: state[name].view(rows, -1) for name in _PER_ELEMENT}

    def _update_codes(self, group: Mapping[str, Any], weight: Tensor, gradient: Tensor, state: State) -> None:
        assert weight.is_contiguous(), "blocks run along a parameter's memory"
        # Gradients are laid out as their parameters unless somebody assigned them: then this is a copy.
        flat = {"weight": weight.detach().view(-1), "gradient": gradient.contiguous().view(-1)}
        flat |= {name: state[name].view(-1) for name in _PER_ELEMENT}
        buffers = self._buffers_on(weight.device)
        for start, end, block in self._chunk_ranges(len(flat["weight"]), weight.device):
            first, second = buffers.first[: end - start], buffers.second[: end - start]
            blocks = slice(start // self.block, -(-end // self.block))
            absmax, absmax_sq = flat["exp_avg_absmax"][blocks], flat["exp_avg_sq_absmax"][blocks]
            codes, codes_sq = flat["exp_avg"][start:end], flat["exp_avg_sq"][start:end]
            # Decode both moments into float32, make AdamW's step with them, then encode what became of them.
            _decode(codes, absmax, block, first, buffers, signed=True)
            _decode(codes_sq, absmax_sq, block, second, buffers, signed=False)
            step = state["step"].clone()  # the kernel counts it up, and every chunk is of the same step
            weight_chunk, gradient_chunk = flat["weight"][start:end], flat["gradient"][start:end]
            fused_adamw(group, [weight_chunk], [gradient_chunk], [first], [second], [step])
            # The second moment first: it is not negative, so its maximum is its absmax, and once it is encoded its
            # memory is free for the magnitudes of the first.
            torch.amax(second.view(-1, block), 1, out=absmax_sq)
            _encode(second, absmax_sq, block, codes_sq, buffers, signed=False)
            torch.amax(torch.abs(first, out=second).view(-1, block), 1, out=absmax)
            _encode(first, absmax, block, codes, buffers, signed=True)
        state["step"].add_(1)

    def _chunk_ranges(self, count: int, device: torch.device) -> Iterator[tuple[int, int, int]]:
        """(start, end, block) of chunks of whole blocks; the rest that fills no block is a chunk of its own."""
        step = max(1, (_CHUNK_CUDA if device.type == "cuda" else _CHUNK_CPU) // self.block) * self.block
        full = count - count % self.block
        for start in range(0, full, step):
            yield start, min(start + step, full), self.block
        if full < count:
            yield full, count, count - full

    def _buffers_on(self, device: torch.device) -> _Buffers:
        buffers = self._buffers.get(device)
        index = torch.int32 if _uses_index_select(device) else torch.int64
        if buffers is None or buffers.index.dtype != index:
            size = _CHUNK_CUDA if device.type == "cuda" else _CHUNK_CPU
            kinds = (torch.float32, torch.float32, torch.float16, index)
            buffers = _Buffers(*(torch.empty(max(size, self.block), dtype=kind, device=device) for kind in kinds))
            self._buffers[device] = buffers
        return buffers


def _decode(codes: Tensor, absmax: Tensor, block: int, into: Tensor, buffers: _Buffers, *, signed: bool) -> None:
    """Writes the values that `codes` stand for, times the absmax of their block, into `into` (float32)."""
    values, _ = _tables(signed, codes.device)
    index = buffers.index[: len(codes)]
    index.copy_(codes)
    _look_up(values, index, into)
    into.view(-1, block).mul_(absmax.unsqueeze(1))


def _encode(values: Tensor, absmax: Tensor, block: int, into: Tensor, buffers: _Buffers, *, signed: bool) -> None:
    """Writes the codes of `values` over their block's absmax into `into`; overwrites `values`."""
    _, codes = _tables(signed, values.device)
    index, halves = buffers.index[: len(values)], buffers.halves[: len(values)]
    values.view(-1, block).mul_((_HALF_SCALE / absmax.clamp_min(_MIN_ABSMAX)).unsqueeze(1))
    # A half-precision number's 16 bits are the index into a table of all of them: no search among 256 values.
    halves.copy_(values)
    index.copy_(halves.view(torch.uint16))
    _look_up(codes, index, into)


def _look_up(table: Tensor, index: Tensor, into: Tensor) -> None:
    if index.dtype == torch.int32:
        torch.index_select(table, 0, index, out=into)
    else:
        torch.take(table, index, out=into)


def _uses_index_select(device: torch.device) -> bool:
    return device.type != "cpu" or torch.get_num_threads() <= _MAX_THREADS_OF_SELECT
