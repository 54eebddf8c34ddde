"""Attention of some queries over some keys, in tiles of both, that is merged with what the queries see elsewhere.

What a tile says is weighted by the log of the sum of exp(score) of its rows, so tiles may come in any order and at any
time (`models.blockwise.merge`). Nothing of a tile is kept: the backward pass makes its probabilities again from the
scores and from the sum over all tiles, as in flash attention (arXiv:2205.14135, arXiv:2310.01889).

T query rows · S key rows · H query heads · K key/value heads · G = H / K queries a key/value head serves · C head width
W width of a value · B queries and L keys of a tile
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from danlu.models.block_attention import attention_scores, by_head
from danlu.models.blockwise import Attended, merge, with_sinks
from danlu.types import Run

QUERY_ROWS = 256
KEY_ROWS = 1024
"""The most of a tile: its scores are float32, 32 MiB of 32 heads."""


class Tile(NamedTuple):
    """Rows of queries and of keys that are of the same document, some of which see some."""

    queries: slice
    keys: slice
    distance: int  # position of the first query less that of the first key

    def with_keys_from(self, row: int) -> Tile:
        """The same tile where there are so many rows before the keys."""
        return self._replace(keys=slice(self.keys.start + row, self.keys.stop + row))

    def hidden(self, window: int | None, device: torch.device) -> Tensor | None:
        """[B, L] bool, True where a query does not see a key; None where all see all."""
        queries, keys = (part.stop - part.start for part in (self.queries, self.keys))
        if self.distance >= keys - 1 and (window is None or self.distance + queries <= window):
            return None
        after = torch.arange(self.distance, self.distance + queries, device=device).unsqueeze(1)
        distances = after - torch.arange(keys, device=device)  # [B, L] of each query from each key
        return distances < 0 if window is None else (distances < 0) | (distances >= window)


def tiles_between(queries: Sequence[Run], keys: Sequence[Run], window: int | None) -> tuple[Tile, ...]:
    """The tiles in which queries see keys: those of their document (of a tree, of their branch and its ancestors) up to
    themselves, at most `window` of them.

    queries, keys: rows `start` to `stop` of each, of the tokens from `position` on of a document or branch.
    """
    of_document: dict[int, list[Run]] = defaultdict(list)
    for run in keys:
        of_document[run.document].append(run)
    return tuple(
        tile
        for rows in _cut(queries, QUERY_ROWS)
        for document in (*rows.ancestors, rows.document)
        for run in of_document[document]
        for tile in _tiles_of(rows, run, window)
    )


def _cut(runs: Sequence[Run], most: int) -> Iterator[Run]:
    """The same runs, in parts of at most so many rows."""
    for run in runs:
        for first in range(run.start, run.stop, most):
            position = run.position + first - run.start
            yield run._replace(position=position, start=first, stop=min(first + most, run.stop))


def _tiles_of(queries: Run, keys: Run, window: int | None) -> Iterator[Tile]:
    last = queries.position + queries.tokens - 1
    first_seen = 0 if window is None else queries.position - window + 1
    begin = max(keys.position, first_seen)
    end = min(keys.position + keys.tokens, last + 1)
    to_row = keys.start - keys.position
    for position in range(begin, end, KEY_ROWS):
        rows = slice(position + to_row, min(position + KEY_ROWS, end) + to_row)
        yield Tile(slice(queries.start, queries.stop), rows, queries.position - position)


@dataclass(frozen=True)
class TileSettings:
    """What scores are made of, and which are hidden."""

    scale: float
    window: int | None
    softcap: float | None


def nothing_attended(q: Tensor, width: int) -> Attended:
    """What attention of q [T, H, C] over no keys says, whose values are of `width`: what tiles are added to."""
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
    return Attended(q.new_zeros(*q.shape[:2], width, dtype=wide), lse)


def add_tiles(total: Attended, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], settings: TileSettings) -> None:
    """Merges attention of q [T, H, C] over k [S, K, C] and v [S, K, W] in tiles into `total`, in place."""
    for tile in tiles:
        rows = tile.queries
        scores, _ = _scores(q[rows], k[tile.keys], tile, settings)  # [K, G*B, L]
        lse = scores.logsumexp(-1, keepdim=True)
        # A row that sees none of these keys has -inf throughout, and exp(-inf - 0) is what it ought to be.
        weights = scores.sub_(lse.masked_fill(lse.isneginf(), 0)).exp_().to(v.dtype)
        attended = torch.bmm(weights, v[tile.keys].transpose(0, 1))
        queries = rows.stop - rows.start
        part = Attended(_by_token(attended, queries).to(total.out.dtype), _by_token(lse, queries).squeeze(-1))
        merged = merge(Attended(total.out[rows], total.lse[rows]), part)
        total.out[rows], total.lse[rows] = merged


class OutputGradient:
    """The gradient of attention's output, and what each tile needs of the output: of the sum over all tiles.

    out, grad: [T, H, W]; lse [T, H], with that of the sinks, of whose probability the values are zero.
    """

    def __init__(self, out: Tensor, lse: Tensor, grad: Tensor) -> None:
        self.grad, self.lse = grad, lse
        self.mean = (grad.to(lse.dtype) * out).sum(-1)  # [T, H]: sum of p dp

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
        """Of no tile yet."""
        wide = torch.promote_types(q.dtype, torch.float32)
        return cls(*(torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v)))


def add_gradients(
    total: InputGradients,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: OutputGradient,
    tiles: Sequence[Tile],
    settings: TileSettings,
) -> None:
    """Adds the gradients of attention in tiles to `total`, in place; arguments as of `add_tiles`."""
    kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
    for tile in tiles:
        rows = tile.queries
        scores, slope = _scores(q[rows], k[tile.keys], tile, settings)
        lse, mean = (by_head(x[rows].unflatten(1, (kv_heads, groups)).unsqueeze(-1)) for x in (output.lse, output.mean))
        probabilities = scores.sub_(lse).exp_()  # [K, G*B, L]
        grad = by_head(output.grad[rows].unflatten(1, (kv_heads, groups)))  # [K, G*B, W]
        values, keys = (x[tile.keys].transpose(0, 1) for x in (v, k))  # [K, L, W], [K, L, C]
        of_values = torch.bmm(probabilities.to(v.dtype).transpose(1, 2), grad)
        grad_scores = attention_scores(grad, values, 1.0).sub_(mean).mul_(probabilities)
        if slope is not None:
            grad_scores.mul_(slope)
        narrow = grad_scores.mul_(settings.scale).to(q.dtype)
        queries = by_head(q[rows].unflatten(1, (kv_heads, groups)))
        total.q[rows] += _by_token(torch.bmm(narrow, keys), rows.stop - rows.start)
        total.k[tile.keys] += torch.bmm(narrow.transpose(1, 2), queries).transpose(0, 1)
        total.v[tile.keys] += of_values.transpose(0, 1)


def finished(total: Attended, sinks: Tensor | None) -> Attended:
    """What all tiles say together, with the sinks [H], which are one more key of each row: once, whatever its tiles."""
    return total if sinks is None else with_sinks(total, sinks.to(total.lse.dtype).expand_as(total.lse))


class TiledAttention(torch.autograd.Function):
    """Attention of q [T, H, C] over k [S, K, C] and v [S, K, W] in tiles -> [T, H, W]; sinks [H], or None."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tiles: Sequence[Tile], settings: TileSettings
    ) -> Tensor:
        total = nothing_attended(q, v.shape[2])
        add_tiles(total, q, k, v, tiles, settings)
        out, lse = finished(total, sinks)
        out = out.to(q.dtype)
        ctx.tiles, ctx.settings = tiles, settings
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        output = OutputGradient(out, lse, grad)
        total = InputGradients.zeros(q, k, v)
        add_gradients(total, q, k, v, output, ctx.tiles, ctx.settings)
        of_inputs = (gradient.to(x.dtype) for gradient, x in zip(total, (q, k, v), strict=True))
        return *of_inputs, None if sinks is None else output.of_sinks(sinks), None, None


def _scores(q: Tensor, k: Tensor, tile: Tile, settings: TileSettings) -> tuple[Tensor, Tensor | None]:
    """Scores [K, G*B, L] of q [B, H, C] and k [L, K, C], -inf where hidden; and with a softcap their derivative by what
    they were without."""
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
