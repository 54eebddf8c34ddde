"""Communication of tensor parallelism: activations and gradients that enter and leave the parts that are cut.

Between `enter` and `leave` every rank has all tokens and works on its part of the heads, features or vocabulary.
Outside all have the same activations, or under sequence parallelism each has its tokens (Megatron, arXiv:1909.08053,
fig. 3; arXiv:2205.05198, fig. 6):

============  ==============================  ==============================
              forward                         backward
============  ==============================  ==============================
enter         nothing      | all-gather       all-reduce   | reduce-scatter
leave         all-reduce   | reduce-scatter   nothing      | all-gather
gather_vocab  all-gather                      this rank's part
============  ==============================  ==============================

(tensor parallelism alone | with sequence parallelism). The tensor that `enter` gathers is not saved for the backward
pass, which gathers it again where it needs it: see `memory.recompute`. A pass without gradients, as in sampling, never
cuts its tokens, so it may have any number of them.

T tokens · D model width · V vocabulary · tp tensor ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.parallel.comm import Group


class Regions:
    """The communication of one model.

    vocab_sizes: tokens that have their rows of embedding and head on each rank. sequence: whether tokens are cut
    outside of attention, MLP and head.
    """

    def __init__(self, group: Group, vocab_sizes: Sequence[int], *, sequence: bool) -> None:
        self.group = group
        self.vocab_sizes = tuple(vocab_sizes)
        self.sequence = sequence
        self._tokens_are_cut = False  # in this forward pass; the embedding decides it, or the input of a chunk

    def leave_embedding(self, x: Tensor) -> Tensor:
        """Terms of a sum [T, D] -> the sum, or its rows [T/tp, D] of this rank."""
        self._begin()
        assert not self._tokens_are_cut or x.shape[0] % self.group.size == 0, (
            f"{x.shape[0]} tokens cannot be cut among {self.group.size} processes: fill the batch up"
        )
        return self.leave(x)

    def enter_chunk(self, x: Tensor) -> Tensor:
        """Begins a chunk that does not start at the embedding, and returns its input as it is: [T, D], or this rank's
        rows.
        """
        self._begin()
        return x

    def _begin(self) -> None:
        self._tokens_are_cut = self.sequence and torch.is_grad_enabled()

    def enter(self, x: Tensor) -> Tensor:
        """[T, D], or its rows [T/tp, D] of this rank -> [T, D]. Gradients of the result are terms of a sum."""
        if not torch.is_grad_enabled():
            return self.group.all_gather(x) if self._tokens_are_cut else x
        entered: Tensor = _Enter.apply(x, self.group, self._tokens_are_cut)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Terms of a sum [T, D] -> the sum, or its rows [T/tp, D] of this rank."""
        if not torch.is_grad_enabled():
            return self.group.reduce_scatter(x) if self._tokens_are_cut else self.group.sum(x.contiguous())
        left: Tensor = _Leave.apply(x, self.group, self._tokens_are_cut)
        return left

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """Logits of this rank's part of the vocabulary -> [.., V]."""
        gathered: Tensor = _GatherVocab.apply(logits, self.group, self.vocab_sizes)
        return gathered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, cut: bool) -> Tensor:
        ctx.group, ctx.cut = group, cut
        return group.all_gather(x) if cut else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.group.reduce_scatter(grad) if ctx.cut else ctx.group.sum(_copy(grad)), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, cut: bool) -> Tensor:
        ctx.group, ctx.cut = group, cut
        return group.reduce_scatter(x) if cut else group.sum(_copy(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.group.all_gather(grad) if ctx.cut else grad, None, None


class _GatherVocab(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group, vocab_sizes: tuple[int, ...]) -> Tensor:
        size = vocab_sizes[group.index]
        assert logits.shape[-1] == size, f"{logits.shape[-1]} tokens of the vocabulary are here, {size} were expected"
        start = sum(vocab_sizes[: group.index])
        ctx.local = slice(start, start + size)
        padded = F.pad(logits, (0, max(vocab_sizes) - size)).unsqueeze(0)  # gloo gathers equal sizes only
        parts = group.all_gather(padded)  # [tp, .., largest part]
        return torch.cat([part[..., :count] for part, count in zip(parts, vocab_sizes, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad[..., ctx.local], None, None


def _copy(x: Tensor) -> Tensor:
    """Returns a copy to sum in place: autograd may have saved x, or x may be a view of a tensor that others use."""
    return x.clone(memory_format=torch.contiguous_format)
