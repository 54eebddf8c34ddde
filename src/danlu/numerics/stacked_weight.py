"""Matrices of one shape, such as those of experts, each quantized by itself and held together.

O, I outputs and inputs of each · E matrices · n bytes of codes of each
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from danlu.core.errors import ModelError
from danlu.numerics.quantized_weight import QuantizedModule, QuantizedWeightModule, dense_workspace


class StackedWeight(QuantizedModule):
    """Frozen matrices [E, O, I]; codes and constants are those of one matrix, stacked in their first dimension.

    No block of numbers and no constant is shared by two of them. So each has the bits that it has alone, and a
    process's part of a layer's experts is a slice of all.

    Args:
        matrices: of one shape and format.
        where: a description for messages.

    Raises:
        ModelError: they are quantized in different ways.
    """

    def __init__(self, matrices: Sequence[QuantizedWeightModule], *, where: str = "a stack of matrices") -> None:
        super().__init__()
        first = matrices[0]
        expected = _format(first)
        for index, matrix in enumerate(matrices):
            if (own := _format(matrix)) != expected:
                raise ModelError(
                    f"{where}: matrix {index} is quantized in another way than the first one ({own} instead of "
                    f"{expected}). Quantize the original model anew, all matrices alike"
                )
        self.shape = first.shape
        self.dtype = first.dtype
        self.count = len(matrices)
        for name, _ in first.named_buffers():
            self.register_buffer(name, torch.stack([matrix.get_buffer(name) for matrix in matrices]))
        # One without tensors. Not a submodule: as one it would be moved, sharded and counted.
        self._single = (first.with_tensors({}),)

    def matrix(self, index: int) -> QuantizedWeightModule:
        """One of the matrices [O, I]; its codes and constants are views."""
        return self._single[0].with_tensors({name: tensor[index] for name, tensor in self._tensors().items()})

    def part(self, start: int, count: int) -> StackedWeight:
        """Returns `count` of the matrices from `start` on, with the same codes, in memory of their own."""
        return StackedWeight([self.matrix(index) for index in range(start, start + count)])

    def shard(self, rows: slice, columns: slice) -> StackedWeight:
        """Some rows and columns of each matrix, by the same codes: nothing is quantized again."""
        return StackedWeight([self.matrix(index).shard(rows, columns) for index in range(self.count)])

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrices [E, O, I] dequantized into new memory, in `dtype` or that of the original ones."""
        shape = (self.count, *self.shape)
        out = torch.empty(shape, dtype=self.dtype if dtype is None else dtype, device=self.device)
        self._single[0].write_stacked(self._tensors(), out)
        return out

    @contextmanager
    def in_workspace(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The matrices [E, O, I] dequantized into the shared workspace: valid until the block ends."""
        with dense_workspace((self.count, *self.shape), dtype, self.device) as matrices:
            self._single[0].write_stacked(self._tensors(), matrices)
            yield matrices

    @contextmanager
    def matrix_in_workspace(self, index: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """One matrix [O, I] dequantized into the shared workspace: valid until the block ends."""
        with self.matrix(index).in_workspace(dtype) as matrix:
            yield matrix

    @property
    def workspace_elements(self) -> int:
        """The elements of one matrix on a CPU, where matrices with rows are dequantized in turn; elsewhere of all."""
        return math.prod(self.shape) * (1 if self.device.type == "cpu" else self.count)

    def _tensors(self) -> Mapping[str, Tensor]:
        """Codes and constants of all matrices by name; under FSDP the codes are a parameter."""
        return dict((*self.named_parameters(), *self.named_buffers()))

    def extra_repr(self) -> str:
        outputs, inputs = self.shape
        bits = 8 * self.stored_bytes() / (self.count * outputs * inputs)
        return f"{self.count} of {inputs} -> {outputs}, {bits:.3f} bits a number"


def _format(matrix: QuantizedWeightModule) -> dict[str, Any]:
    """Returns the properties that matrices must share to be stacked: the settings of their kind, and the names of their
    tensors.
    """
    settings = {name: value for name, value in vars(matrix).items() if not name.startswith("_") and name != "training"}
    return {"class": type(matrix).__name__, **settings, "tensors": [name for name, _ in matrix.named_buffers()]}
