"""Attention over a pack as one would write it down."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from danlu.core.layer_types import Keys
from danlu.core.types import Branch
from danlu.models.attend import visible
from danlu.models.recurrent_order import RecurrentOrder, RecurrentRuns

BOUNDARIES = (0, 5, 6, 23, 40)
TREES = (
    Branch(-1, 0, 5), Branch(-1, 5, 6),
    Branch(-1, 6, 10), Branch(2, 10, 12), Branch(3, 12, 15), Branch(3, 15, 16), Branch(2, 16, 20), Branch(6, 20, 23),
    Branch(-1, 23, 30), Branch(8, 30, 36), Branch(8, 36, 40),
)  # fmt: skip
"""A document, one of a token, a stem of a stem and a chain, a pair."""
SIBLINGS = (*TREES[:-1], Branch(9, 36, 40))
"""A mistake: the second answer of the pair sees the first."""
ROOTS = tuple(Branch(-1, start, stop) for start, stop in itertools.pairwise(BOUNDARIES))
CHAINS = (*ROOTS[:2], Branch(-1, 6, 10), Branch(2, 10, 11), Branch(3, 11, 23), ROOTS[3])


class ReferenceAttention:
    """What PackedAttention computes, by one dense mask over the whole pack: slow and obvious."""

    def __init__(self, boundaries: tuple[int, ...], trees: tuple[Branch, ...] = ()) -> None:
        roots = tuple(Branch(-1, start, stop) for start, stop in itertools.pairwise(boundaries))
        self.trees = trees or roots

    def __call__(
        self,
        layer: int,
        q: Tensor,
        keys: Keys,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        k, v = keys.expanded()
        return masked_attention(q, k, v, self.mask(window, q.device), scale=scale, softcap=softcap, sinks=sinks)

    @property
    def runs(self) -> RecurrentRuns:
        """How layers with a state go through the pack."""
        boundaries = [0, *(branch.start for branch in self.trees if branch.parent < 0), self.trees[-1].stop]
        return RecurrentRuns(RecurrentOrder(sorted(set(boundaries)), self.trees))

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """[T, T] bool: a query sees what is on its path, up to itself and no further back than the window."""
        total = self.trees[-1].stop
        mask = torch.zeros(total, total, dtype=torch.bool)
        for branch in self.trees:
            path = list(range(branch.start, branch.stop))
            above = branch.parent
            while above >= 0:
                path = [*range(self.trees[above].start, self.trees[above].stop), *path]
                above = self.trees[above].parent
            seen = visible(branch.stop - branch.start, len(path), window, torch.device("cpu"))
            mask[branch.start : branch.stop, path] = seen
        return mask.to(device)


def masked_attention(
    q: Tensor,  # [Q, H, C]
    k: Tensor,  # [S, K, C]
    v: Tensor,  # [S, K, W]
    mask: Tensor,  # [Q, S] bool, True = sees
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,  # [H]
) -> Tensor:  # [Q, H, W]
    """Attention written out, with scores in float32 or wider; a sink is a column of scores more."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [S, H, C]
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhc,shc->hqs", q.to(wide), k.to(wide)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat((scores, column), dim=-1)
    probabilities = scores.softmax(dim=-1)[..., : len(k)].to(v.dtype)
    return torch.einsum("hqs,shc->qhc", probabilities, v)
