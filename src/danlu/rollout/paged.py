"""Attention over a pool of cache blocks: the chunks of a plan, laid end to end, as an `Attend` of the decoder.

T tokens of a pass, flat · S tokens of one sequence · H query heads · K key/value heads · C head width
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from danlu.models.attend import PackedAttention
from danlu.models.block_attention import BlockAttention, BlockSettings
from danlu.models.segments import Segment
from danlu.rollout.scheduler import Chunk, Plan

if TYPE_CHECKING:
    from danlu.rollout.pool import CachePool


class PagedAttention:
    """Writes keys and values of a plan's chunks into the pool, then has each token see those before it in its sequence.

    Satisfies `danlu.layer_types.Attend`. Whole prompts are attended as packed documents, by what training uses. The
    plan has been carried out before.
    """

    def __init__(self, plan: Plan, pool: CachePool) -> None:
        self.pool = pool
        self._runs: list[tuple[slice, PackedAttention | Chunk]] = []
        start = 0
        for is_whole, several in itertools.groupby(plan.chunks, lambda chunk: chunk.start == 0):
            chunks = list(several)
            stops = list(itertools.accumulate((chunk.stop - chunk.start for chunk in chunks), initial=0))
            if is_whole:
                self._runs.append((slice(start, start + stops[-1]), PackedAttention(tuple(stops))))
            else:
                slices = (slice(start + a, start + b) for a, b in itertools.pairwise(stops))
                self._runs += zip(slices, chunks, strict=True)
            start += stops[-1]
        self._indices: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C]
        k: Tensor,  # [T, K, C]
        v: Tensor,  # [T, K, C]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:  # [T, H, C]
        self.pool.write(layer, k, v)
        outputs = []
        for rows, attended in self._runs:
            if isinstance(attended, PackedAttention):
                outputs.append(attended(layer, q[rows], k[rows], v[rows], scale=scale, window=window, softcap=softcap))
            else:
                outputs.append(self._attend_to_past(layer, attended, q[rows], scale, window, softcap))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_to_past(
        self, layer: int, chunk: Chunk, q: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """A chunk's queries [S, H, C] over the keys of its sequence, from the first block that one of them sees."""
        block = self.pool.block
        first = 0 if window is None else max(0, chunk.start - window + 1) // block
        last = -(-chunk.stop // block)
        tokens = chunk.stop - first * block
        key = chunk.sequence, first
        if key not in self._indices:
            self._indices[key] = self.pool.index(chunk.blocks[first:last])
        k, v = self.pool.gather(layer, self._indices[key], tokens)  # [S, K, C]
        segment = Segment(chunk.start - first * block, tokens, ((0, tokens),))
        out: Tensor = BlockAttention.apply(q, k, v, BlockSettings((segment,), scale, window, softcap))
        return out
