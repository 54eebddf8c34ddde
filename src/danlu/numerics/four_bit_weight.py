"""A frozen matrix in 4 bits a number: the base of QLoRA (arXiv:2305.14314).

O, I outputs and inputs · N = O I numbers · B blocks of them
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import Self

import torch
from torch import Tensor, nn

from danlu.core.errors import ModelError
from danlu.numerics import bitsandbytes_kernels, bitsandbytes_layout, four_bit
from danlu.numerics.bitsandbytes_config import KINDS, Kind
from danlu.numerics.four_bit import BLOCKS, NESTED_BLOCK, FourBitMatrix, Nested, dynamic_map
from danlu.numerics.quantized_weight import QuantizedWeightModule, StackedWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of matrices that can be quantized."""


class FourBitWeight(QuantizedWeightModule):
    """A frozen matrix [O, I] held as NF4 or FP4 codes (QLoRA, arXiv:2305.14314).

    Codes and constants are bitsandbytes' bit for bit, for every shape; so is `dense`, except where bitsandbytes' CPU
    kernel is wrong (see `bitsandbytes_kernels`): there it has the bits of its CUDA kernel and its plain version.
    """

    codes: Tensor  # [ceil(N / 2), 1] uint8
    absmax: Tensor  # [B] float32, or uint8 with double quantization
    nested_absmax: Tensor | None  # [ceil(B / 256)] float32
    nested_offset: Tensor | None  # [] float32
    nested_values: Tensor | None  # [256] float32, where they are not the usual ones

    def __init__(self, packed: FourBitMatrix) -> None:
        super().__init__()
        self.kind: Kind = packed.kind
        self.block = packed.block
        self.shape = packed.shape
        self.dtype = packed.dtype
        self.register_buffer("codes", packed.codes)
        if isinstance(packed.absmax, Nested):
            codes, absmax, offset, values = packed.absmax
            usual = torch.equal(values, dynamic_map(values.device))
            constants = {"nested_absmax": absmax, "nested_offset": offset, "nested_values": None if usual else values}
        else:
            codes = packed.absmax
            constants = dict.fromkeys(("nested_absmax", "nested_offset", "nested_values"))
        self.register_buffer("absmax", codes)
        for name, constant in constants.items():
            self.register_buffer(name, constant)

    @classmethod
    def quantize(
        cls, weight: Tensor, *, kind: Kind = "nf4", block: int = 64, double: bool = True, where: str = "a matrix"
    ) -> Self:
        """Quantizes weight [O, I], of any strides; the codes are made on its device.

        double: magnitudes of blocks in 8 bits each (0.127 bits a number instead of 0.5 in blocks of 64).

        Raises:
            ModelError: `where` is no matrix of float32, bfloat16 or float16, or not all of it is finite.
        """
        assert kind in KINDS and block in BLOCKS, f"{kind} in blocks of {block}"
        check_quantizable(weight, where)
        codes, absmax = four_bit.quantize(weight, kind, block)
        # A NaN or an infinity shows in its block's magnitude.
        if not bool(torch.isfinite(absmax).all()):
            raise ModelError(f"{where} cannot be quantized: it holds NaN or infinite values. Use a sound model.")
        outputs, inputs = weight.shape
        scales = four_bit.quantize_absmax(absmax) if double else absmax
        return cls(FourBitMatrix(kind, block, (outputs, inputs), weight.dtype, codes, scales))

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, Tensor], *, where: str) -> Self:
        """The weight `name` ("model.layers.0.self_attn.q_proj.weight") of a folder quantized by bitsandbytes.

        tensors: at least all with names that begin with `name`. where: the file, for messages.

        Raises:
            ModelError: a part is missing, has another size or type than the others ask for, or holds impossible values.
        """
        return cls(bitsandbytes_layout.read(name, tensors, where))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of this weight in a safetensors file, as bitsandbytes and transformers write and read them."""
        return bitsandbytes_layout.write(name, self.packed())

    def split(self, rows: Sequence[int], *, where: str = "a matrix") -> list[FourBitWeight]:
        """Splits the matrix into parts with the given rows, by the same codes: nothing is quantized again.

        Magnitudes in 8 bits stay so where a part begins with a block of theirs, and are else float32.

        Raises:
            ModelError: `where` has other rows, or a block with numbers of two parts.
        """
        outputs, width = self.shape
        if sum(rows) != outputs:
            raise ModelError(f"{where}: has {outputs} rows, its parts {' + '.join(map(str, rows))}.")
        stops = list(accumulate(rows))
        if any(stop * width % self.block for stop in stops[:-1]):
            raise ModelError(
                f"{where}: is packed in one piece for several layers, and a block of {self.block} numbers is "
                "partly of one and partly of another. Load the original model and quantize it here."
            )
        return [self.shard(slice(*part), slice(0, width)) for part in pairwise([0, *stops])]

    def shard(self, rows: slice, columns: slice) -> FourBitWeight:
        """The sub-matrix of some rows and columns, by the same codes: nothing is quantized again.

        A block of the box is never of two blocks here, so blocks get smaller where the box does not begin and end with
        them: by 2 down to the next number that divides where it does. Magnitudes in 8 bits stay so for rows that begin
        with a block of theirs, and are else float32: 0.5 bits a number in blocks of 64, 1 in blocks of 32.
        """
        outputs, inputs = self.shape
        shape = height, width = rows.stop - rows.start, columns.stop - columns.start
        start, count = rows.start * inputs + columns.start, height * width
        if width == inputs and start % self.block == 0:
            absmax = _absmax_of(self.packed().absmax, start // self.block, -(-(start + count) // self.block))
            codes = self.codes[start // 2 : (start + count + 1) // 2].clone()
            return FourBitWeight(FourBitMatrix(self.kind, self.block, shape, self.dtype, codes, absmax))
        block = gcd(self.block, start) if width == inputs else gcd(self.block, inputs, columns.start, width)
        places = torch.arange(0, count, block, device=self.device)  # of each block's first number, in the box
        places = (rows.start + places // width) * inputs + columns.start + places % width  # and in the whole
        codes = four_bit.join(four_bit.apart(self.codes, outputs * inputs).view(outputs, inputs)[rows, columns])
        absmax = self._magnitudes()[places // self.block].clone()
        return FourBitWeight(FourBitMatrix(self.kind, block, shape, self.dtype, codes, absmax))

    def packed(self) -> FourBitMatrix:
        """The codes and constants, as `four_bit` works with them."""
        absmax: Tensor | Nested = self.absmax
        if self.nested_absmax is not None and self.nested_offset is not None:
            values = dynamic_map(self.absmax.device) if self.nested_values is None else self.nested_values
            absmax = Nested(self.absmax, self.nested_absmax, self.nested_offset, values)
        return FourBitMatrix(self.kind, self.block, self.shape, self.dtype, self.codes, absmax)

    def write(self, out: Tensor) -> None:
        bitsandbytes_kernels.dequantize_into(out, self.codes, self._magnitudes(), self.kind, self.block)

    def write_stacked(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """See `QuantizedWeightModule`: all at once where each begins with a block, which on a GPU is a few kernels."""
        if math.prod(self.shape) % self.block:
            super().write_stacked(tensors, out)
            return
        absmax = _stacked_magnitudes(tensors)
        bitsandbytes_kernels.dequantize_into(out, tensors["codes"].view(-1, 1), absmax.view(-1), self.kind, self.block)

    def extra_repr(self) -> str:
        return f"{self.kind}, {super().extra_repr()}"

    def _magnitudes(self) -> Tensor:
        """The absmax of blocks, [B] float32."""
        absmax = self.packed().absmax
        return absmax if isinstance(absmax, Tensor) else bitsandbytes_kernels.dequantize_absmax(absmax)


def _absmax_of(absmax: Tensor | Nested, start: int, stop: int) -> Tensor | Nested:
    """The absmax of the blocks from `start` to `stop`."""
    if isinstance(absmax, Tensor):
        return absmax[start:stop].clone()
    if start % NESTED_BLOCK:
        return bitsandbytes_kernels.dequantize_absmax(absmax)[start:stop].clone()
    scales = absmax.absmax[start // NESTED_BLOCK : -(-stop // NESTED_BLOCK)]
    return Nested(absmax.codes[start:stop].clone(), scales.clone(), absmax.offset, absmax.values)


def _stacked_magnitudes(tensors: Mapping[str, Tensor]) -> Tensor:
    """The absmax of the blocks of E matrices, [E, B] float32, out of their stacked tensors."""
    absmax = tensors["absmax"]
    if "nested_absmax" not in tensors:
        return absmax
    if "nested_values" in tensors:
        values = tensors["nested_values"].gather(1, absmax.to(torch.int64))
    else:
        values = dynamic_map(absmax.device)[absmax.to(torch.int32)]
    scales = tensors["nested_absmax"].repeat_interleave(NESTED_BLOCK, dim=1)[:, : absmax.shape[1]]
    return values.mul_(scales).add_(tensors["nested_offset"].unsqueeze(1))


def unpack_kernels(model: nn.Module, dtype: torch.dtype) -> list[bitsandbytes_kernels.UnpackKernel]:
    """Returns the kernels that dequantize the 4-bit weights of a model for products in `dtype`, each once; empty
    without any.
    """
    matrices = (module.matrix(0) if isinstance(module, StackedWeight) else module for module in model.modules())
    kernels = [
        bitsandbytes_kernels.unpack_kernel(matrix.device, dtype, matrix.block)
        for matrix in matrices
        if isinstance(matrix, FourBitWeight)
    ]
    return list(dict.fromkeys(kernels))


def check_quantizable(weight: Tensor, where: str) -> None:
    """Raises ModelError if this is no matrix of a type that can be quantized."""
    if weight.dtype not in DTYPES:
        stored = str(weight.dtype).removeprefix("torch.")
        raise ModelError(
            f"{where} cannot be quantized: it holds {stored}, not float32, bfloat16 or float16. "
            "Quantize the model that it was made from."
        )
    if weight.ndim != 2 or not weight.numel():
        raise ModelError(f"{where} cannot be quantized: its shape is {list(weight.shape)}, not [outputs, inputs].")
