"""The product with frozen matrices that are unpacked for it: once in the forward pass, once more in the backward pass.

T tokens · I, O inputs and outputs · E matrices of one shape, such as those of experts
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.errors import ModelError
from danlu.core.layer_types import FewRowProduct, QuantizedWeight


class QuantizedModule(nn.Module):
    """A quantized and frozen module, as buffers that keep their dtypes whatever the model is cast to."""

    @property
    @abstractmethod
    def workspace_elements(self) -> int:
        """Numbers of the largest dense tensor that is made for a product with it."""

    def stored_bytes(self) -> int:
        """Bytes of codes and constants."""
        return sum(tensor.nbytes for tensor in (*self.buffers(), *self.parameters()))

    def share_codes(self) -> None:
        """Makes the codes a frozen parameter, so that FSDP shards them; the constants stay buffers."""
        if (codes := self._buffers.pop("codes", None)) is not None:
            self.register_parameter("codes", nn.Parameter(codes, requires_grad=False))

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Module.to, .half, .cuda and so on come by here. A scale in another type is another scale.
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self


class QuantizedWeightModule(QuantizedModule):
    """A frozen quantized matrix [O, I]."""

    shape: tuple[int, int]
    dtype: torch.dtype
    """The dtype of the matrix that was packed."""
    rounds_activations = False
    """Whether `product` rounds x, which then has no gradient."""

    @abstractmethod
    def write(self, out: Tensor) -> None:
        """Dequantizes the matrix into `out` [O, I]: contiguous, any float dtype, on this weight's device."""

    @abstractmethod
    def shard(self, rows: slice, columns: slice) -> QuantizedWeightModule:
        """The sub-matrix of some rows and columns, by the same codes: nothing is quantized again."""

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """A matrix of this one's shape and format with other codes and constants, by name; they are not copied."""
        other = copy.copy(self)
        other._parameters = {}
        other._buffers = {**dict.fromkeys(self._buffers), **tensors}
        return other

    def write_stacked(self, tensors: Mapping[str, Tensor], out: Tensor) -> None:
        """Dequantizes E matrices of this one's shape and format, with stacked tensors, into `out` [E, O, I]."""
        for index, matrix in enumerate(out.unbind()):
            self.with_tensors({name: tensor[index] for name, tensor in tensors.items()}).write(matrix)

    @property
    def workspace_elements(self) -> int:
        return math.prod(self.shape)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The matrix [O, I] dequantized into new memory, in `dtype` or that of the original matrix."""
        out = torch.empty(self.shape, dtype=self.dtype if dtype is None else dtype, device=self.device)
        self.write(out)
        return out

    @contextmanager
    def in_workspace(self, dtype: torch.dtype) -> Iterator[Tensor]:
        """The matrix [O, I] dequantized into the shared workspace: valid until the block ends."""
        with dense_workspace(self.shape, dtype, self.device) as matrix:
            self.write(matrix)
            yield matrix

    def product(self, x: Tensor) -> Tensor:
        """x [T, I] -> [T, O] in x's type, differentiable in x.

        The matrix is unpacked in x's type into memory that all products share, and unpacked again for the backward
        pass: nothing is kept for it.
        """
        return _Product.apply(x, self)

    def few_row_product(self, *below: QuantizedWeight, is_one: bool = False) -> FewRowProduct | None:
        """The product of few rows in bfloat16 with this matrix, and others below it, by a kernel that reads the codes;
        None where there is none. is_one: by one that takes a single row and is faster."""
        return None

    def extra_repr(self) -> str:
        outputs, inputs = self.shape
        bits = 8 * self.stored_bytes() / (outputs * inputs)
        return f"{inputs} -> {outputs}, {bits:.3f} bits a number"


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeightModule) -> Tensor:
        ctx.weight = weight
        with dense_workspace(weight.shape, x.dtype, x.device) as matrix:
            weight.write(matrix)
            return F.linear(x, matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        with dense_workspace(ctx.weight.shape, grad.dtype, grad.device) as matrix:
            ctx.weight.write(matrix)
            return grad @ matrix, None


@cache
def leave_products_uncompiled() -> None:
    """Excludes products with quantized weights from torch.compile, which cannot follow kernels that are not torch's.

    Products are then made as ever, between the compiled pieces.
    """
    # No decorator of `product`: it would import torch._dynamo, a second that only a process which compiles should wait.
    QuantizedWeightModule.product = torch.compiler.disable(QuantizedWeightModule.product)  # type: ignore[method-assign]


_spare: list[Tensor] = []
"""The memory in which the last product on a CPU was made; at most one tensor."""


def dense_workspace_bytes() -> int:
    """Bytes of the workspace: one dense matrix, the largest so far."""
    return sum(memory.nbytes for memory in _spare)


@contextmanager
def dense_workspace(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """A tensor from the shared workspace, valid until the block ends; its content is arbitrary.

    On a CPU it is the same memory over and over: unpacking into fresh pages takes five times as long (4096 x 4096 in
    bfloat16: 18 ms against 3.2). CUDA's allocator keeps memory by itself.
    """
    if device.type != "cpu":
        yield torch.empty(shape, dtype=dtype, device=device)
        return
    needed = math.prod(shape) * dtype.itemsize
    # Taken out of the list, so that a second thread, or a product within a product, gets memory of its own.
    try:
        memory = _spare.pop()
    except IndexError:
        memory = None
    if memory is None or memory.nbytes < needed:
        memory = None  # freed before the larger one is taken
        memory = torch.empty(needed, dtype=torch.uint8)
    try:
        yield memory[:needed].view(dtype).view(shape)
    finally:
        if not _spare:
            _spare.append(memory)


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
                    f"{expected}). Quantize the original model again, all matrices alike"
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

    def few_row_product(self, index: int, *, is_one: bool = False) -> FewRowProduct | None:
        """That of one of the matrices; None for codes that FSDP shards."""
        return None if "codes" in self._parameters else self.matrix(index).few_row_product(is_one=is_one)

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

    def rounded_product(self, x: Tensor, counts: Tensor) -> Tensor | None:
        """Rows x [N, I], those of each matrix together, through matrices that round activations -> [N, O] in x's type;
        None for others. counts [E]: rows of each."""
        if not self._single[0].rounds_activations:
            return None
        y = x.new_empty(len(x), self.shape[0])
        start = 0
        for index, count in enumerate(counts.tolist()):
            if count:
                y[start : start + count] = self.matrix(index).product(x[start : start + count])
            start += count
        return y

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
