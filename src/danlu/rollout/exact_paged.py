"""Attention of a plan's chunks over cached blocks, with the bits that training's attention has (`numerics: exact`)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from torch import Tensor

from danlu.models.blockwise import BlockwiseQueries, QueryRun
from danlu.rollout.scheduler import Plan

if TYPE_CHECKING:
    from danlu.rollout.pool import CachePool

# T tokens of the plan's chunks, flat · H query heads · K key/value heads · C head width


class ExactPagedAttention:
    """Attention of chunks laid end to end, each over its own sequence's cache; satisfies `danlu.layer_types.Attend`.

    Keys and values are read from the pool as they lie there and go through `models.blockwise`, as training's do: one
    token, a prompt's chunk or drafts to be checked, alone or among others, have the same bits. It costs a copy of what
    the sequences have cached for every layer; `PagedAttention` is the fast one.
    """

    def __init__(self, plan: Plan, pool: CachePool) -> None:
        self._pool = pool
        blocks = [[*chunk.blocks][: -(-chunk.stop // pool.block)] for chunk in plan.chunks]
        starts = [pool.block * count for count in itertools.accumulate(map(len, blocks), initial=0)]
        self._blocks = pool.index([number for each in blocks for number in each])
        self._tokens = starts[-1]
        runs = [
            QueryRun(chunk.stop - chunk.start, chunk.start, ((start, start + chunk.stop),))
            for chunk, start in zip(plan.chunks, starts, strict=False)
        ]
        self._queries = BlockwiseQueries(runs, pool.device)

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
        self._pool.write(layer, k, v)
        keys, values = self._pool.gather(layer, self._blocks, self._tokens)
        return self._queries.attend(q, keys, values, scale=scale, window=window, softcap=softcap)
