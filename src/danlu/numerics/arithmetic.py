"""The products of linear layers in FP8: which blocks of which factors share a scale, and what the backward pass keeps.

Recipes, of the factors of y = x W^T, of dx = g W and of dW = g^T x:

- tile: E4M3 throughout, 1 x 128 of x and g along what is contracted, 128 x 128 of W (DeepSeek-V3, arXiv:2412.19437,
  section 3.3). x is kept in E4M3, in tiles of 1 x 128 features, and gets tiles of 128 tokens for dW. All scales are
  powers of two, as those of DeepSeek-V3.1: other tiles then change no number that stays normal. Behind attention x is
  rounded to E5M6 instead; attention keeps that tensor itself, so it is kept as it is and rounded when dW is made.
- row, row-with-bf16-weight-gradient: a row or column along what is contracted, with powers of two (torchao's rowwise
  and rowwise_with_gw_hp, which multiplies g with one scale for all of W).
- tensor: one float32 scale each, gradients in E5M2 (arXiv:2209.05433; torchao's tensorwise). Tokens that only fill a
  batch up are multiplied as zeros (`real_rows`), which take no part in it; their gradients are zeros too. Tensor and
  context ranks that have parts of a factor take the largest magnitude of all parts: their codes are those of one
  process.
- mxfp8: 32 numbers along what is contracted with an E8M0 scale (OCP Microscaling formats 1.0).

Other blocks, as ranks have them that share features or tokens, change no number of tile and row by much: where a scale
is a power of two that no number exceeds, a number that is normal in both blocks is the same in both, and others differ
by `OTHER_BLOCKS` of the largest number in the blocks at most. Cuts between blocks change nothing.

T tokens · N rows of experts · I, O inputs and outputs of a layer · G groups
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.layer_types import ReduceGroup
from danlu.numerics.format import WHOLE, Format, Scaled, encode, largest_of_blocks
from danlu.numerics.products import product
from danlu.numerics.row_bytes import from_bytes, to_bytes, travels_as_bytes

_TILE, _MX = 128, 32


@dataclass(frozen=True)
class Formats:
    """The formats of the factors of a layer's three products."""

    x: Format
    """The format of x [T, I] in the forward product."""
    weight: Format
    """The format of W [O, I] in the forward product."""
    grad: Format
    """The format of the output's gradient g [T, O] in that of the input."""
    weight_of_input: Format
    """The format of W [O, I] in the gradient of the input."""
    by_tokens: tuple[Format, Format] | None
    """The formats of g and of x in the gradient of the weight; None: a product in the type of g."""
    kept: Format | None = None
    """The format of x for the backward pass; None: x itself is kept."""


def _formats(along: tuple[int, int], weight: tuple[int, int], **options: str) -> tuple[Format, ...]:
    """Returns E4M3 in blocks of `along` features, in blocks of `weight`, and the transposed of both."""
    return tuple(
        Format("e4m3", block, **options)  # type: ignore[arg-type]
        for block in (along, weight, along[::-1], weight[::-1])
    )


def _recipes() -> Mapping[str, Formats]:
    tile, square, by_token, _ = _formats((1, _TILE), (_TILE, _TILE), scale="power-of-two")
    row, of_tensor, by_column, _ = _formats((1, WHOLE), (WHOLE, WHOLE), scale="power-of-two")
    mx, _, mx_by_token, _ = _formats((1, _MX), (1, _MX), scale="e8m0", rounding="floor")
    whole = Format("e4m3", (WHOLE, WHOLE))
    gradient = Format("e5m2", (WHOLE, WHOLE))
    return {
        "tile": Formats(tile, square, tile, square, (by_token, by_token), kept=tile),
        "row": Formats(row, row, row, by_column, (by_column, by_column)),
        "row-with-bf16-weight-gradient": Formats(row, row, row, of_tensor, None),
        "tensor": Formats(whole, whole, gradient, whole, (gradient, whole), kept=whole),
        "mxfp8": Formats(mx, mx, mx, mx_by_token, (mx_by_token, mx_by_token)),
    }


RECIPES = _recipes()
OTHER_BLOCKS = 1.5 * 2**-9 / 448
"""How far a number moves at most where it lies in other blocks, as a part of their largest number: by the errors of its
rounding to steps of 2^-9 of a scale and of half of that, or less; scales are below 2 / 448 of the largest number."""
BEHIND_ATTENTION = Format("e5m6", (1, _TILE), scale="power-of-two")
"""The format that tile rounds the input of a layer behind attention to, for the gradient of its weight."""


_REAL: ContextVar[int | Tensor | None] = ContextVar("real rows", default=None)
"""The number of rows that are no padding, which come first; or [N] bool, of each row whether it is none."""


@contextmanager
def real_rows(real: int | Tensor) -> Iterator[None]:
    """Enters a context in which rows of inputs that are padding have no part in the scale of all rows.

    real: the number of rows that are none, which come first; or [N] bool, whether each row is none.
    """
    token = _REAL.set(real)
    try:
        yield
    finally:
        _REAL.reset(token)


class Sharing(NamedTuple):
    """The groups of ranks that have parts of a layer's factors, each of which has one scale; of several groups, those
    of one have parts of what those of another have."""

    x: tuple[ReduceGroup, ...] = ()
    weight: tuple[ReduceGroup, ...] = ()
    grad: tuple[ReduceGroup, ...] = ()


class Fp8Arithmetic:
    """`core.layer_types.LinearArithmetic` by a recipe.

    Weights are rounded to the type of activations before, as for every other product and where shards are gathered.
    Nothing is kept between calls, so no scale is that of earlier weights. A block with a number that is not finite
    makes outputs that are not.

    behind_attention: the input is attention's output, which attention keeps. sharing: of recipe tensor, the ranks that
    take the maximum of each factor; all of them make the same calls in the same order.
    """

    def __init__(self, recipe: str, *, behind_attention: bool = False, sharing: Sharing | None = None) -> None:
        self.recipe = recipe
        self.sharing = sharing if sharing is not None and self._has_one_scale else Sharing()
        self.formats = RECIPES[recipe]
        self.behind_attention = behind_attention and recipe == "tile"

    @property
    def rounding(self) -> None:
        """None: rollouts multiply in the type of activations."""
        return None

    @property
    def keeps_codes(self) -> bool:
        """Whether inputs are kept in few bits."""
        return self.formats.kept is not None and not self.behind_attention

    @property
    def row_codes(self) -> Fp8Arithmetic | None:
        """This where rows travel to other ranks as the codes that are kept of them: by tile, of which they are factors
        of products, forward and backward. None: rows travel in the type of activations."""
        kept = self.formats.kept
        is_factor = self.keeps_codes and kept == self.formats.x == self.formats.grad
        return self if is_factor and travels_as_bytes(self.formats.x) else None

    def to_bytes(self, kept: Sequence[Tensor]) -> Tensor:
        """Returns what was kept of rows [N, I] as bytes that travel, [N, B] uint8."""
        return to_bytes(Scaled(kept[0], kept[1], self.formats.x))

    def from_bytes(self, row_bytes: Tensor, features: int) -> tuple[Tensor, ...]:
        """Returns what was kept of the rows [N, features] of `to_bytes`."""
        scaled = from_bytes(row_bytes, self.formats.x, features)
        return scaled.codes, scaled.scales

    def rows_of_tokens(self, tokens: Tensor) -> AbstractContextManager[None]:
        """Enters a context in which rows are those of `tokens` [N] int64, as experts have them."""
        real = _REAL.get() if self._has_one_scale else None
        return nullcontext() if real is None else real_rows(tokens < real)

    @property
    def _has_one_scale(self) -> bool:
        return self.recipe == "tensor"

    def keep(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors that the backward pass is left of x [T, I]."""
        return self._kept(x, None)

    def kept_values(self, kept: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the numbers [T, I] that were kept of a tensor."""
        if self.keeps_codes:
            assert self.formats.kept is not None
            return Scaled(kept[0], kept[1], self.formats.kept).decode(dtype)
        (x,) = kept
        return encode(x, BEHIND_ATTENTION).decode(dtype) if self.behind_attention else x.to(dtype)

    def forward(self, x: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns x [T, I] times each of the weights [O, I], [T, O] in x's dtype, and the tensors kept of x."""
        scaled = self._input(x, self.formats.x)
        factors = (_encoded(weight.to(x.dtype), self.formats.weight, self.sharing.weight) for weight in weights)
        return tuple(product(scaled, factor, x.dtype) for factor in factors), self._kept(x, scaled)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [T, O] times weight [O, I] -> [T, I] in grad's dtype."""
        of_weight = _encoded(weight.to(grad.dtype), self.formats.weight_of_input, self.sharing.weight).transposed()
        return product(_encoded(grad, self.formats.grad, self.sharing.grad), of_weight, grad.dtype)

    def weight_gradient(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        """grad [T, O], transposed, times what was kept of x [T, I] -> [O, I] float32."""
        if self.formats.by_tokens is None:
            return (grad.t() @ self.kept_values(kept, grad.dtype)).float()
        of_grad = _encoded(grad, self.formats.by_tokens[0], self.sharing.grad)
        return product(of_grad.transposed(), self._kept_scaled(kept).transposed(), torch.float32)

    def grouped_forward(
        self, x: Tensor, weights: Sequence[Tensor], counts: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Rows x [N, I], those of each layer together, times each of the weights [G, O, I] -> [N, O] in x's dtype, and
        what is kept of x. counts [G]: rows of each layer."""
        scaled = self._input(x, self.formats.x)
        return self._grouped_products(scaled, weights, counts, x.dtype), self._kept(x, scaled)

    def grouped_forward_of_kept(
        self, kept: Sequence[Tensor], weights: Sequence[Tensor], counts: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """`grouped_forward` of rows [N, I] of which there is what was kept, where that is codes; outputs in `dtype`."""
        return self._grouped_products(Scaled(kept[0], kept[1], self.formats.x), weights, counts, dtype)

    def _grouped_products(
        self, x: Scaled, weights: Sequence[Tensor], counts: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        rows, features = x.shape
        outputs = tuple(weight.new_empty((rows, weight.shape[1]), dtype=dtype) for weight in weights)
        for y, weight in zip(outputs, weights, strict=True):
            encoded = self._stack(weight, self.formats.weight, dtype)
            for index, group in _groups(counts):
                y[group] = product(x.box(group, slice(0, features)), encoded(index), dtype)
        return outputs

    def _stack(self, weight: Tensor, form: Format, dtype: torch.dtype) -> Callable[[int], Scaled]:
        """Returns a function that encodes one of the weights [G, O, I], rounded to `dtype`; of all of them, ranks take
        the maxima at once."""
        if not self.sharing.weight:
            return lambda index: encode(weight[index].to(dtype), form)
        own = torch.stack([largest_of_blocks(matrix.to(dtype), form) for matrix in weight])
        largest = _largest(own, self.sharing.weight)
        return lambda index: encode(weight[index].to(dtype), form, largest[index])

    def grouped_input_gradient(self, grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Rows grad [N, O] times weight [G, O, I] by groups -> [N, I] in grad's dtype."""
        scaled = _encoded(grad, self.formats.grad, self.sharing.grad)
        grad_x = grad.new_empty(len(grad), weight.shape[2])
        encoded = self._stack(weight, self.formats.weight_of_input, grad.dtype)
        for index, group in _groups(counts):
            of_group = scaled.box(group, slice(0, grad.shape[1]))
            grad_x[group] = product(of_group, encoded(index).transposed(), grad.dtype)
        return grad_x

    def grouped_weight_gradient(self, grad: Tensor, kept: Sequence[Tensor], counts: Tensor) -> Tensor:
        """Rows grad [N, O], transposed, times what was kept of x [N, I], by groups -> [G, O, I] float32; zero for a
        group without rows."""
        by_tokens = self.formats.by_tokens
        x = self.kept_values(kept, grad.dtype if by_tokens is None else torch.float32)
        gradient = grad.new_zeros((len(counts), grad.shape[1], x.shape[1]), dtype=torch.float32)
        # One scale of a whole tensor is that of all groups; other blocks end with a group.
        whole = by_tokens is not None and by_tokens[0].block == (WHOLE, WHOLE)
        shared_by = self.sharing.grad, self.sharing.x
        scaled = [*map(_encoded, (grad, x), by_tokens, shared_by)] if whole and by_tokens is not None else []
        for index, group in _groups(counts):
            if by_tokens is None:
                gradient[index] = grad[group].t() @ x[group]
                continue
            of_group = [y.box(group, slice(0, y.shape[1])) for y in scaled] or [
                encode(y[group], form) for y, form in zip((grad, x), by_tokens, strict=True)
            ]
            gradient[index] = product(of_group[0].transposed(), of_group[1].transposed(), torch.float32)
        return gradient

    def _kept(self, x: Tensor, scaled: Scaled | None) -> tuple[Tensor, ...]:
        if not self.keeps_codes:
            return (x,)
        if scaled is None:
            assert self.formats.kept is not None
            scaled = self._input(x, self.formats.kept)
        return scaled.codes, scaled.scales

    def _input(self, x: Tensor, form: Format) -> Scaled:
        """Encodes x [T, I], of which padding is zeros where all rows have one scale."""
        real = _REAL.get() if self._has_one_scale else None
        if isinstance(real, Tensor):
            x = x.masked_fill(~real.unsqueeze(1), 0)
        elif real is not None and real < len(x):
            x = F.pad(x[:real], (0, 0, 0, len(x) - real))
        return _encoded(x, form, self.sharing.x)

    def _kept_scaled(self, kept: Sequence[Tensor]) -> Scaled:
        """Returns the kept x as the factor of its layer's weight gradient."""
        assert self.formats.by_tokens is not None
        form = self.formats.by_tokens[1]
        if self.keeps_codes and form == self.formats.kept:
            return Scaled(kept[0], kept[1], form)
        return encode(self.kept_values(kept, torch.float32), form)


def _encoded(x: Tensor, form: Format, groups: Sequence[ReduceGroup]) -> Scaled:
    """Encodes x [R, C], of which the ranks of groups have parts, of any number of rows, and share its scale."""
    if not groups:
        return encode(x, form)
    own = largest_of_blocks(x, form) if x.numel() else x.new_zeros((1, 1), dtype=torch.float32)
    return encode(x, form, _largest(own, groups))


def _largest(own: Tensor, groups: Sequence[ReduceGroup]) -> Tensor:
    """Returns the largest of the ranks' magnitudes; infinite where one is not a number, which a maximum may lose."""
    largest = own.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in groups:
        largest = group.max(largest)
    return largest


def _groups(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """The rows of each group that has any, by its number."""
    ends = itertools.accumulate(counts.tolist(), initial=0)
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        if start < end:
            yield index, slice(start, end)
