"""Attention of a plan's chunks over cached blocks, with the bits that training's attention has (`numerics: exact`)."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from danlu.core.errors import ModelError
from danlu.core.layer_types import Keys
from danlu.inference.scheduler import Plan
from danlu.models.attend import NOT_EXACT, absorbed_keys, exact_absorb
from danlu.models.blockwise import BlockwiseQueries, QueryRun
from danlu.models.recurrent_order import RecurrentRuns

if TYPE_CHECKING:
    from danlu.inference.pool import CachePool

# T tokens of the plan's chunks, flat · S gathered tokens · H query heads · C head width · W width of a value


class ExactPagedAttention:
    """Attention of chunks laid end to end, each over its own sequence's cache; a `danlu.core.layer_types.Attend`.

    Keys and values are read from the pool as they lie there and go through `models.blockwise`, as training's do: one
    token, a prompt's chunk or drafts to be checked, alone or among others, have the same bits. It costs a copy of the
    sequences' cached keys and values for every layer; `PagedAttention` is the fast one.
    """

    def __init__(self, plan: Plan, pool: CachePool) -> None:
        self._pool = pool
        self._plan = plan
        blocks = [[*chunk.blocks][: -(-chunk.stop // pool.block)] for chunk in plan.chunks]
        starts = [pool.block * count for count in itertools.accumulate(map(len, blocks), initial=0)]
        self._blocks = pool.index([number for each in blocks for number in each])
        self._tokens = starts[-1]
        runs = [
            QueryRun(chunk.stop - chunk.start, chunk.start, ((start, start + chunk.stop),))
            for chunk, start in zip(plan.chunks, starts, strict=False)
        ]
        self._queries = BlockwiseQueries(runs, pool.device)

    @property
    def runs(self) -> RecurrentRuns:
        """Raises ModelError, since states of linear attention are not exact."""
        raise ModelError(NOT_EXACT)

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [T, H, C]
        keys: Keys,  # of the same tokens
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [T, H, W]
        if keys.layer is None:
            self._pool.write(layer, *keys.stored)
        else:  # they are in the cache of the layer that made them, which has run in this pass
            layer = keys.layer
        stored = self._pool.gather(layer, self._blocks, self._tokens)
        absorb = exact_absorb(keys)
        if absorb is not None:
            q = absorb.queries(q, exact=True)
            k, v = absorbed_keys(stored, absorb)
        else:
            k, v = stored if keys.expand is None else keys.expand(stored, self._positions)
        out = self._queries.attend(q, k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
        return out if absorb is None else absorb.outputs(out, exact=True)

    @cached_property
    def _positions(self) -> Tensor:
        """The positions [S] int64 of the gathered tokens in their sequences."""
        block = self._pool.block
        lengths = [-(-chunk.stop // block) * block for chunk in self._plan.chunks]
        return self._pool.index([position for length in lengths for position in range(length)])
