"""Attention of some queries over some keys, in tiles of both, that is merged with their attention over other keys.

A tile's output is weighted by the logsumexp of its rows' scores, so tiles may come in any order and at any time
(`models.blockwise.merge`). Nothing of a tile is kept: the backward pass makes its probabilities again from the scores
and from the sum over all tiles, as in flash attention (arXiv:2205.14135, arXiv:2310.01889).

Where the device has a kernel that returns the logsumexp of its rows (`attention_kernels.TileKernel`), it computes the
tiles, whole if it can. Calls that it does not take (with a softcap, say) are computed by products of small tiles.

T query rows · S key rows · H query heads · K key/value heads · G = H / K queries a key/value head serves · C head width
W width of a value · B queries and L keys of a tile
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from danlu.core.types import Run
from danlu.models.attention_kernels import Kernels, TileCall, TileKernel, kernels_of, widened
from danlu.models.block_attention import attention_scores, by_head
from danlu.models.blockwise import Attended, with_sinks

QUERY_ROWS = 256
KEY_ROWS = 1024
"""The largest number of keys of a tile with scores, or a mask, in a tensor: scores are float32, 32 MiB of 32 heads."""


class Tile(NamedTuple):
    """Rows of queries and of keys in the same document."""

    queries: slice
    keys: slice
    distance: int  # position of the first query less that of the first key

    @property
    def shape(self) -> tuple[int, int]:
        """Query rows and key rows."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    def with_keys_from(self, row: int) -> Tile:
        """Returns the same tile with `row` more rows before the keys."""
        return self._replace(keys=slice(self.keys.start + row, self.keys.stop + row))

    def part(self, queries: range, keys: range) -> Tile:
        """Some of its rows, which are counted from its first ones."""
        return Tile(
            slice(self.queries.start + queries.start, self.queries.start + queries.stop),
            slice(self.keys.start + keys.start, self.keys.start + keys.stop),
            self.distance + queries.start - keys.start,
        )

    def trimmed(self, window: int | None) -> Tile | None:
        """Returns the tile without queries that see no key and keys that no query sees; None where nothing is left."""
        rows, columns = self.shape
        # Query i sees the keys from i + distance - window + 1 to i + distance.
        first = max(0, -self.distance)
        last = rows if window is None else min(rows, columns - 1 + window - self.distance)
        begin = 0 if window is None else max(0, self.distance + first - window + 1)
        end = min(columns, self.distance + last)
        return self.part(range(first, last), range(begin, end)) if first < last and begin < end else None

    def cut(self, window: int | None) -> Iterator[Tile]:
        """Yields the tile in parts of at most `QUERY_ROWS` and `KEY_ROWS`, without parts that are hidden from all."""
        rows, columns = self.shape
        for first in range(0, rows, QUERY_ROWS):
            own = self.part(range(first, min(first + QUERY_ROWS, rows)), range(columns)).trimmed(window)
            if own is None:
                continue
            own_rows, own_columns = own.shape
            for begin in range(0, own_columns, KEY_ROWS):
                smaller = own.part(range(own_rows), range(begin, min(begin + KEY_ROWS, own_columns))).trimmed(window)
                if smaller is not None:
                    yield smaller

    def with_as_many_keys(self, window: int | None) -> Iterator[Tile]:
        """Yields the tile in parts with no more queries than keys, except parts where every query sees all keys.

        FlashAttention takes no bound with a window for one of as many keys as there are, counted from the query's
        position: with more queries than keys the first ones would not see the last keys.
        """
        rows, columns = self.shape
        if rows <= columns or self._is_seen_whole(window):
            yield self
            return
        for part in (range(columns), range(columns, rows)):
            smaller = self.part(part, range(columns)).trimmed(window)
            if smaller is not None:
                yield from smaller.with_as_many_keys(window)

    def _is_seen_whole(self, window: int | None) -> bool:
        rows, columns = self.shape
        return self.distance >= columns - 1 and (window is None or self.distance + rows <= window)

    def call(self, window: int | None) -> TileCall:
        """Returns the call of a kernel that computes the tile."""
        rows, columns = self.shape
        ahead = self.distance - (columns - rows)  # of its key, where the last query stands at the last key
        left = -1 if window is None or self.distance + rows <= window else window - 1 - ahead
        return TileCall((rows,), (columns,), left, -1 if self.distance >= columns - 1 else ahead)

    def hidden(self, window: int | None, device: torch.device) -> Tensor | None:
        """[B, L] bool, True where a query does not see a key; None where all see all."""
        if self._is_seen_whole(window):
            return None
        queries, keys = self.shape
        after = torch.arange(self.distance, self.distance + queries, device=device).unsqueeze(1)
        distances = after - torch.arange(keys, device=device)  # [B, L] of each query from each key
        return distances < 0 if window is None else (distances < 0) | (distances >= window)


def tiles_between(queries: Sequence[Run], keys: Sequence[Run], window: int | None) -> tuple[Tile, ...]:
    """The tiles in which queries see keys: those of their document (of a tree, of their branch and its ancestors) up to
    themselves, at most `window` of them. A tile for each two runs.

    queries, keys: rows `start` to `stop` of each, of the tokens from `position` on of a document or branch.
    """
    of_document: dict[int, list[Run]] = defaultdict(list)
    for run in keys:
        of_document[run.document].append(run)
    pairs = (
        Tile(slice(rows.start, rows.stop), slice(run.start, run.stop), rows.position - run.position)
        for rows in queries
        for document in (*rows.ancestors, rows.document)
        for run in of_document[document]
    )
    return tuple(tile for pair in pairs if (tile := pair.trimmed(window)) is not None)


@dataclass(frozen=True)
class TilePlan:
    """The kernel calls and products that compute each tile."""

    kernel: TileKernel | None
    calls: tuple[tuple[TileCall, tuple[Tile, ...]], ...]
    """The calls of the kernel, with the tiles of each."""
    products: tuple[Tile, ...]
    """Tiles that are done by products, none larger than `QUERY_ROWS` and `KEY_ROWS`."""

    @property
    def is_empty(self) -> bool:
        """Whether no query sees a key."""
        return not self.calls and not self.products


def tile_kernel_for(q: Tensor, v: Tensor, softcap: float | None, kernels: Kernels | None = None) -> TileKernel | None:
    """The kernel for attention of q [T, H, C] over values v [S, K, W]; None: products. kernels: by default those of the
    device."""
    kernel = (kernels or kernels_of(q.device)).tiles
    return kernel if kernel is not None and kernel.takes(q, v, softcap) else None


def plan_tiles(
    tiles: Sequence[Tile], window: int | None, kernel: TileKernel | None, dtype: torch.dtype = torch.float32
) -> TilePlan:
    """Deals tiles to calls of the kernel and, where it is slower or there is none, to products.

    tiles: of `tiles_between` with the same window. dtype: of queries, keys and values.
    """
    products: list[Tile] = []
    calls: list[tuple[TileCall, Tile]] = []  # one for each tile
    for whole in _joined(tiles) if window is None else tiles:
        is_whole = kernel is not None and not kernel.needs_mask(whole.call(window))
        if kernel is not None and kernel.joins_tiles:
            parts = whole.with_as_many_keys(window)
        else:
            parts = iter((whole,)) if is_whole else whole.cut(window)
        for tile in parts:
            rows, columns = tile.shape
            if kernel is None or rows * columns < kernel.smallest(dtype):
                products += tile.cut(window)
            else:
                calls.append((tile.call(window), tile))
    if kernel is None or not kernel.joins_tiles:
        return TilePlan(kernel, tuple((call, (tile,)) for call, tile in calls), tuple(products))
    # A call copies queries, and what comes of them, for each of its tiles: those of the same queries go by several.
    by_mask: dict[tuple[int, int, int], list[Tile]] = defaultdict(list)
    times: Counter[tuple[int, int, int]] = Counter()
    for call, tile in calls:
        mask = call.left, call.right, tile.queries.start
        by_mask[call.left, call.right, times[mask]].append(tile)
        times[mask] += 1
    joined = []
    for (left, right, _), alike in by_mask.items():
        rows_of_each, columns_of_each = zip(*(tile.shape for tile in alike), strict=True)
        joined.append((TileCall(rows_of_each, columns_of_each, left, right), tuple(alike)))
    return TilePlan(kernel, tuple(joined), tuple(products))


def _joined(tiles: Sequence[Tile]) -> Iterator[Tile]:
    """The same without a window. Tiles of which every query sees all are one where queries are the same and keys follow
    one another in the rows, or the other way round: of a rank's two chunks both see a chunk before them."""
    full: list[tuple[_Rows, _Rows]] = []
    for tile in tiles:
        if tile.distance < tile.shape[1] - 1:
            yield tile
        else:
            full.append(((tile.queries.start, tile.queries.stop), (tile.keys.start, tile.keys.stop)))
    by_keys = _adjacent_as_one((keys, queries) for queries, keys in _adjacent_as_one(full))
    for keys, queries in by_keys:
        yield Tile(slice(*queries), slice(*keys), keys[1] - keys[0])  # at a distance at which all are seen


_Rows = tuple[int, int]


def _adjacent_as_one(pairs: Iterable[tuple[_Rows, _Rows]]) -> list[tuple[_Rows, _Rows]]:
    """Pairs with the same first rows, and second rows of which some begin where the others end, as one."""
    joined: list[tuple[_Rows, _Rows]] = []
    for first, (start, stop) in sorted(pairs):
        last_first, last_second = joined[-1] if joined else (None, (0, 0))
        if last_first == first and last_second[1] == start:
            joined[-1] = first, (last_second[0], stop)
        else:
            joined.append((first, (start, stop)))
    return joined


@dataclass(frozen=True)
class TileSettings:
    """The settings of scores: their scale, window and softcap."""

    scale: float
    window: int | None
    softcap: float | None


def nothing_attended(q: Tensor, width: int) -> Attended:
    """Returns the attention of q [T, H, C] over no keys, with values of width `width`; tiles are added to it."""
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
    return Attended(q.new_zeros(*q.shape[:2], width, dtype=wide), lse)


def add_tiles(total: Attended, q: Tensor, k: Tensor, v: Tensor, plan: TilePlan, settings: TileSettings) -> None:
    """Merges attention of q [T, H, C] over k [S, K, C] and v [S, K, W] in tiles into `total`, in place."""
    if plan.kernel is not None and plan.calls:
        wide_q, wide_k, wide_v = _of_one_width(q, k, v)
        for call, tiles in plan.calls:
            queries, keys = [tile.queries for tile in tiles], [tile.keys for tile in tiles]
            out, lse = plan.kernel.forward(
                _laid(wide_q, queries), _laid(wide_k, keys), _laid(wide_v, keys), call, settings.scale
            )
            parts = out[..., : v.shape[2]].split(call.queries), lse.split(call.queries)
            for rows, own_out, own_lse in zip(queries, *parts, strict=True):
                _merge_in_place(Attended(total.out[rows], total.lse[rows]), Attended(own_out, own_lse))
    for tile in plan.products:
        rows = tile.queries
        scores, _ = _scores(q[rows], k[tile.keys], tile, settings)  # [K, G*B, L]
        lse = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(lse).exp_().to(v.dtype)
        attended = torch.bmm(weights, v[tile.keys].transpose(0, 1))
        part = Attended(_by_token(attended, tile.shape[0]), _by_token(lse, tile.shape[0]).squeeze(-1))
        _merge_in_place(Attended(total.out[rows], total.lse[rows]), part)


def _merge_in_place(total: Attended, part: Attended) -> None:
    """`models.blockwise.merge` of rows [B, H, W] that all see some key in `part`, without a second output in memory."""
    # Rows of `total` that have seen nothing yet have a logsumexp of -inf, and this is their whole share: exactly 1.
    share = torch.sigmoid(part.lse - total.lse).unsqueeze(-1)
    total.out.lerp_(part.out.to(total.out.dtype), share)
    total.lse.copy_(torch.logaddexp(total.lse, part.lse))


class OutputGradient:
    """The gradient of attention's output, and the values of the output, the sum over all tiles, that each tile needs.

    out, grad: [T, H, W]; lse [T, H], with that of the sinks, which have values of zero.
    """

    def __init__(self, out: Tensor, lse: Tensor, grad: Tensor) -> None:
        self.out, self.lse, self.grad = out, lse, grad.contiguous()

    @cached_property
    def mean(self) -> Tensor:
        """[T, H]: the sum of p dp."""
        return (self.grad.to(self.lse.dtype) * self.out).sum(-1)

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """[H]: the gradient of sinks [H]."""
        shares = torch.exp(sinks.to(self.lse.dtype) - self.lse)  # [T, H]: the sink's own probability
        return -(shares * self.mean).sum(0).to(sinks.dtype)


class InputGradients(NamedTuple):
    """Gradients of q [T, H, C], k [S, K, C] and v [S, K, W], in float32 or wider, which tiles are added to."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def zeros(cls, q: Tensor, k: Tensor, v: Tensor) -> InputGradients:
        """Returns gradients of zero, to which tiles are added."""
        wide = torch.promote_types(q.dtype, torch.float32)
        return cls(*(torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v)))


def add_gradients(
    total: InputGradients,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: OutputGradient,
    plan: TilePlan,
    settings: TileSettings,
) -> None:
    """Adds the gradients of attention in tiles to `total`, in place; arguments as of `add_tiles`."""
    if plan.kernel is not None and plan.calls:
        wide_q, wide_k, wide_v = _of_one_width(q, k, v)
        grad, out = (widened(x, wide_q.shape[2]) for x in (output.grad, output.out))
        for call, tiles in plan.calls:
            queries, keys = [tile.queries for tile in tiles], [tile.keys for tile in tiles]
            gradients = plan.kernel.backward(
                _laid(grad, queries), _laid(wide_q, queries), _laid(wide_k, keys), _laid(wide_v, keys),
                _laid(out, queries), _laid(output.lse, queries), call, settings.scale,
            )  # fmt: skip
            for of_all, of_calls, rows in zip(total, gradients, (queries, keys, keys), strict=True):
                for own, part in zip(rows, of_calls.split([each.stop - each.start for each in rows]), strict=True):
                    of_all[own] += part[..., : of_all.shape[2]]
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    for tile in plan.products:
        own = tile.queries
        scores, slope = _scores(q[own], k[tile.keys], tile, settings)
        lse, mean = (by_head(x[own].unflatten(1, (kv_heads, groups)).unsqueeze(-1)) for x in (output.lse, output.mean))
        probabilities = scores.sub_(lse).exp_()  # [K, G*B, L]
        grad = by_head(output.grad[own].unflatten(1, (kv_heads, groups)))  # [K, G*B, W]
        values, key_rows = (x[tile.keys].transpose(0, 1) for x in (v, k))  # [K, L, W], [K, L, C]
        of_values = torch.bmm(probabilities.to(v.dtype).transpose(1, 2), grad)
        grad_scores = attention_scores(grad, values, 1.0).sub_(mean).mul_(probabilities)
        if slope is not None:
            grad_scores.mul_(slope)
        narrow = grad_scores.mul_(settings.scale).to(q.dtype)
        query_rows = by_head(q[own].unflatten(1, (kv_heads, groups)))
        total.q[own] += _by_token(torch.bmm(narrow, key_rows), tile.shape[0])
        total.k[tile.keys] += torch.bmm(narrow.transpose(1, 2), query_rows).transpose(0, 1)
        total.v[tile.keys] += of_values.transpose(0, 1)


def _of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Widens q, k and v to one width, as `TileKernel` takes them."""
    width = max(q.shape[2], v.shape[2])
    return widened(q, width), widened(k, width), widened(v, width)


def _laid(x: Tensor, rows: Sequence[slice]) -> Tensor:
    """Rows of x, laid end to end; of one tile without a copy."""
    return x[rows[0]] if len(rows) == 1 else torch.cat([x[each] for each in rows])


def finished(total: Attended, sinks: Tensor | None) -> Attended:
    """Returns the merged output of all tiles, with the sinks [H], one more key of each row, added once."""
    return total if sinks is None else with_sinks(total, sinks.to(total.lse.dtype).expand_as(total.lse))


class TiledAttention(torch.autograd.Function):
    """Attention of q [T, H, C] over k [S, K, C] and v [S, K, W] in tiles -> [T, H, W]; sinks [H], or None."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: TilePlan, settings: TileSettings
    ) -> Tensor:
        total = nothing_attended(q, v.shape[2])
        add_tiles(total, q, k, v, plan, settings)
        out, lse = finished(total, sinks)
        out = out.to(q.dtype)
        ctx.plan, ctx.settings = plan, settings
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        output = OutputGradient(out, lse, grad)
        total = InputGradients.zeros(q, k, v)
        add_gradients(total, q, k, v, output, ctx.plan, ctx.settings)
        of_inputs = (gradient.to(x.dtype) for gradient, x in zip(total, (q, k, v), strict=True))
        return *of_inputs, None if sinks is None else output.of_sinks(sinks), None, None


def _scores(q: Tensor, k: Tensor, tile: Tile, settings: TileSettings) -> tuple[Tensor, Tensor | None]:
    """Returns scores [K, G*B, L] of q [B, H, C] and k [L, K, C], -inf where hidden, and with a softcap its
    derivative.
    """
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    queries = by_head(q.unflatten(1, (kv_heads, groups)))
    scores = attention_scores(queries, k.transpose(0, 1), settings.scale)
    slope = None
    if settings.softcap is not None:
        scores.div_(settings.softcap).tanh_()
        slope = scores.square().neg_().add_(1)
        scores.mul_(settings.softcap)
    hidden = tile.hidden(settings.window, q.device)
    if hidden is not None:
        scores.view(kv_heads, groups, *hidden.shape).masked_fill_(hidden, float("-inf"))
    return scores, slope


def _by_token(x: Tensor, tokens: int) -> Tensor:
    """[K, G*B, W] -> [B, H, W], for B tokens."""
    return x.unflatten(1, (-1, tokens)).permute(2, 0, 1, 3).flatten(1, 2)
