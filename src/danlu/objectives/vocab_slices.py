"""The language-model head in slices of its vocabulary, so that logits [N, V] are never held.

N targets · D model width · V vocabulary · S rows of the vocabulary in a slice
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# S with `numerics: exact`, whatever N is: a product's bits hang on its number of columns, a sum's on how it is cut.
# From 32,768 numbers on torch would sum a single row by several threads, and otherwise than many rows.
EXACT_SLICE_ROWS = 2048
# The largest value of columns of logits is found before its column: see `argmax_rows`.
ARGMAX_COLUMNS = 64


@dataclass(frozen=True)
class VocabSlices:
    """The slices of a head, in the order of the vocabulary, and the logits that each gives."""

    hidden: Tensor  # [N, D]
    head: Tensor  # [V, D]; of a vocabulary that is cut among processes, the rows of this one
    targets: Tensor  # [N] int64, ids in the whole vocabulary
    softcap: float | None  # logits become softcap x tanh(logits / softcap)
    slice_rows: int  # S
    vocab_start: int = 0  # id of the token of the head's first row

    def __iter__(self) -> Iterator[VocabSlice]:
        for start in range(0, self.head.shape[0], self.slice_rows):
            head = self.head[start : start + self.slice_rows].to(self.hidden.dtype)  # [S, D]
            columns, inside = columns_in_slice(self.targets, self.vocab_start + start, head.shape[0])
            yield VocabSlice(start, head, columns, inside)

    def columns_from(self, start: int) -> Tensor:
        """[N] int64: each target counted from a row of the head, also where it is before it or far behind."""
        return self.targets - (self.vocab_start + start)

    def logits(self, part: VocabSlice, dtype: torch.dtype) -> Tensor:
        """Logits [N, S] of one slice in `dtype`, after the soft cap; the same bits each time."""
        return _slice_logits(self.hidden, part.head, dtype, self.softcap)


@dataclass(frozen=True)
class VocabSlice:
    """Some rows of the head, one behind the other, and which targets are among them."""

    start: int  # number of the first row in the head
    head: Tensor  # [S, D] in hidden's dtype
    columns: Tensor  # [N, 1] int64: of each target in this slice; any column if it is in another one
    inside: Tensor  # [N] bool: whether it is in this one


class HeadGradients:
    """Gradients of hidden states [N, D] and, where it is wanted, of the head [V, D], of logits slice by slice.

    dtype: that in which the gradient of the hidden states is summed.
    """

    def __init__(self, slices: VocabSlices, dtype: torch.dtype, *, for_head: bool) -> None:
        self._slices = slices
        self._hidden = torch.zeros_like(slices.hidden, dtype=dtype)
        self.head = torch.empty_like(slices.head) if for_head else None

    @property
    def hidden(self) -> Tensor:
        """The gradient in the type of the hidden states."""
        return self._hidden.to(self._slices.hidden.dtype)

    def add(self, part: VocabSlice, grad: Tensor, capped: Tensor) -> None:
        """Adds the gradient [N, S] by a slice's logits after the soft cap, which are `capped`; it is overwritten."""
        if self._slices.softcap is not None:
            grad.mul_(1 - (capped / self._slices.softcap).square_())
        self.add_products(part, grad.to(self._slices.hidden.dtype))

    def add_products(self, part: VocabSlice, grad: Tensor) -> None:
        """Adds the gradient [N, S] by a slice's logits before the soft cap, in the type of the hidden states."""
        self._hidden += grad @ part.head
        if self.head is not None:
            self.head[part.start : part.start + part.head.shape[0]] = grad.t() @ self._slices.hidden


def columns_in_slice(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Locates targets [N] in a slice of the tokens `first` to `first + rows`.

    Returns columns [N, 1], any for those that are in another slice, and whether they are in this one [N].
    """
    columns = targets - first
    inside = (columns >= 0) & (columns < rows)
    return columns.clamp_(0, rows - 1).unsqueeze(1), inside


def logits_in_slices(hidden: Tensor, head: Tensor, *, softcap: float | None, slice_rows: int) -> Tensor:
    """The logits [N, V] that `VocabSlices` gives slice by slice, float32 or wider: the same bits for the same S.

    hidden [N, D]; head [V, D], float32 or hidden's dtype.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.new_empty(hidden.shape[0], head.shape[0], dtype=wide)
    for start in range(0, head.shape[0], slice_rows):
        rows = head[start : start + slice_rows].to(hidden.dtype)  # [S, D]
        logits[:, start : start + slice_rows] = _slice_logits(hidden, rows, wide, softcap)
    return logits


def _slice_logits(hidden: Tensor, rows: Tensor, dtype: torch.dtype, softcap: float | None) -> Tensor:
    """hidden [N, D] times some rows [S, D] of a head, after the soft cap -> [N, S] in `dtype`."""
    y = (hidden @ rows.t()).to(dtype)
    return y if softcap is None else y.div_(softcap).tanh_().mul_(softcap)


def argmax_rows(y: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row of y [N, S], and the first column where it stands: [N] each.

    torch's own argmax takes 20 times as long as its maximum on CPU (1024 x 1024 in float32: 1.0 ms against 0.06), so it
    looks only through the columns where the largest value is known to be.
    """
    whole = y.shape[1] // ARGMAX_COLUMNS * ARGMAX_COLUMNS
    if whole == 0:
        highest = y.max(1)
        return highest.values, highest.indices
    blocks = y[:, :whole].unflatten(1, (-1, ARGMAX_COLUMNS))  # [N, blocks, columns]
    largest, block = blocks.amax(2).max(1)
    columns = blocks[torch.arange(len(y), device=y.device), block].argmax(1) + block * ARGMAX_COLUMNS
    if whole == y.shape[1]:
        return largest, columns
    rest, column = y[:, whole:].max(1)
    return torch.maximum(largest, rest), torch.where(rest > largest, column + whole, columns)
