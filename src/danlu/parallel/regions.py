"""The borders of what tensor parallelism cuts: where activations are sent, and where their gradients are.

Between `enter` and `leave` every process has all tokens and works on its part of the heads, features or words; outside
all have the same, or under sequence parallelism each its tokens (Megatron, arXiv:1909.08053, fig. 3; arXiv:2205.05198,
fig. 6):

============  ==============================  ==============================
              forward                         backward
============  ==============================  ==============================
enter         nothing      | all-gather       all-reduce   | reduce-scatter
leave         all-reduce   | reduce-scatter   nothing      | all-gather
gather_vocab  all-gather                      this process's part
============  ==============================  ==============================

(tensor alone | with sequence parallelism). What is gathered on entering is not kept for the backward pass, where the
entrance is gone through once more if anything wants it: see `memory.recompute`. A pass without gradients, as in
sampling, never cuts its tokens, so it may have any number of them.

T tokens · D model width · V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.parallel.comm import Group


class Regions:
    """The borders of one model."""

    def __init__(self, group: Group, words: Sequence[int], *, sequence: bool) -> None:
        self.group = group
        self.words = tuple(words)  # of the vocabulary, on each process
        self.sequence = sequence
        self._tokens_are_cut = False  # in the pass that is under way: each begins at the embedding

    def leave_embedding(self, x: Tensor) -> Tensor:
        """Parts of a sum [T, D] -> the sum, or the rows [T/tp, D] of this process."""
        self._tokens_are_cut = self.sequence and torch.is_grad_enabled()
        assert not self._tokens_are_cut or x.shape[0] % self.group.size == 0, (
            f"{x.shape[0]} tokens cannot be cut among {self.group.size} processes: fill the batch up"
        )
        return self.leave(x)

    def enter(self, x: Tensor) -> Tensor:
        """[T, D] or its rows here -> [T, D]; gradients are parts of a sum inside."""
        if not torch.is_grad_enabled():
            return self.group.all_gather(x) if self._tokens_are_cut else x
        entered: Tensor = _Enter.apply(x, self.group, self._tokens_are_cut)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        """Parts of a sum [T, D] -> the sum, or its rows here."""
        if not torch.is_grad_enabled():
            return self.group.reduce_scatter(x) if self._tokens_are_cut else self.group.sum(x.contiguous())
        left: Tensor = _Leave.apply(x, self.group, self._tokens_are_cut)
        return left

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """[.., words here] -> [.., V]"""
        gathered: Tensor = _GatherVocab.apply(logits, self.group, self.words)
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
    def forward(ctx: Any, logits: Tensor, group: Group, words: tuple[int, ...]) -> Tensor:
        ctx.here = slice(sum(words[: group.index]), sum(words[: group.index + 1]))
        if logits.shape[-1] != words[group.index]:
            raise AssertionError(f"{logits.shape[-1]} words are here, {words[group.index]} were expected")
        most = max(words)  # gloo gathers equal sizes only
        padded = F.pad(logits, (0, most - logits.shape[-1])).unsqueeze(0)
        parts = group.all_gather(padded)  # [tp, .., most]
        return torch.cat([part[..., :count] for part, count in zip(parts, words, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad[..., ctx.here], None, None


def _copy(x: Tensor) -> Tensor:
    """Sums are made in place, and what comes here may be kept for a gradient or be somebody else's."""
    return x.clone(memory_format=torch.contiguous_format)
