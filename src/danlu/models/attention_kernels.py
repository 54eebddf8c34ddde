"""Attention kernels of a device besides `scaled_dot_product_attention`, and how torch's versions call them.

`attend.PackedAttention` asks a `Kernels` for the kernels that it may use and does not look at a tensor's device, so
that a test can give kernels that run anywhere.

T packed tokens · S tokens of one document · H query heads · K key/value heads · C head width · W width of a value
B query rows and L key rows of a tile
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.models.kernel_limits import DOCUMENT_MULTIPLE, SHORT_DOCUMENT
from danlu.models.segments import Document

NARROW = (torch.float16, torch.bfloat16)
EVERY = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLASH_WIDTHS = range(8, 257, 8)
"""The widths of heads that flash attention takes."""
FLEX_BLOCK = 128
FLEX_VARIANTS = 64
"""The largest number of variants of flex attention that may be compiled in one process."""
FLEX_WIDTH = 16
"""Heads narrower than this are refused by flex attention."""

# Tiles of fewer scores are done by `tiled_attention`'s own products in half precision, in which the backward pass of
# torch's flash kernel is slow for short rows (8 heads of 32, bf16, one thread, forward and backward: 64 x 64 1.3 ms
# against 0.9, 128 x 128 3.0 against 1.9, 256 x 256 5.3 against 7.4). In float32 it was faster at all sizes from 32 on.
SMALLEST_NARROW_TILE = 256 * 256


@dataclass(frozen=True)
class Varlen:
    """Causal flash attention over documents laid end to end: `torch.nn.attention.varlen.varlen_attn`, since torch 2.10.

    Its signature differs by version: `window_size` came for `is_causal` in 2.11, `enable_gqa` in 2.13.
    """

    kernel: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = NARROW

    @property
    def windows(self) -> bool:
        return "window_size" in _parameters(self.kernel)

    @property
    def grouped_heads(self) -> bool:
        return "enable_gqa" in _parameters(self.kernel)

    def takes(self, q: Tensor, v: Tensor, window: int | None, softcap: float | None) -> bool:
        fits = q.dtype in self.dtypes and q.shape[-1] in FLASH_WIDTHS and v.shape[-1] <= q.shape[-1]
        return fits and softcap is None and (window is None or self.windows)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, *, scale: float, window: int | None
    ) -> Tensor:
        """q [T, H, C], k [T, K, C], v [T, K, W]; offsets [documents + 1] int32, from 0 to T; longest document ->
        [T, H, W]. The kernel knows one width: narrower values are filled up with zeros."""
        width = v.shape[-1]
        v = widened(v, q.shape[-1])
        options: dict[str, Any] = {"scale": scale}
        if self.windows:  # tokens to the left and right that a query sees besides itself; -1: all
            options["window_size"] = (-1 if window is None else window - 1, 0)
        else:
            options["is_causal"] = True
        groups = q.shape[1] // k.shape[1]
        if groups > 1 and self.grouped_heads:
            options["enable_gqa"] = True
        elif groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out: Tensor = self.kernel(q, k, v, offsets, offsets, longest, longest, **options)
        return out if out.shape[-1] == width else out[..., :width]


@dataclass(frozen=True)
class Flex:
    """Attention with a softcap, with sinks or along the branches of trees, by `torch.nn.attention.flex_attention`."""

    attention: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = NARROW

    def takes(self, q: Tensor, v: Tensor) -> bool:
        return q.dtype in self.dtypes and min(q.shape[-1], v.shape[-1]) >= FLEX_WIDTH

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        *,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, C], k [T, K, C], v [T, K, W]; mask: of `documents_mask`; sinks [H] -> [T, H, W]."""
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, T, C]
        out = self.attention(
            q, k, v,
            score_mod=None if softcap is None else _softcap(softcap, q.device),
            block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            # Left to choose, torch takes its kernel for decoding for packs of less than 128 tokens, and finds no size
            # of blocks for it where these times the queries of a key/value head are more than 128 (torch 2.11, 2.13).
            kernel_options={"BACKEND": "TRITON"},
            **({} if sinks is None else {"return_lse": True}),
        )  # fmt: skip
        if sinks is not None:
            out, lse = out  # [1, H, T, W], [1, H, T]
            out = out * torch.sigmoid(lse - sinks.to(lse.dtype).unsqueeze(1)).unsqueeze(-1).to(out.dtype)
        attended: Tensor = out.squeeze(0).transpose(0, 1)
        return attended


class FlashWithSinks(torch.autograd.Function):
    """Causal attention of a document with sinks, by torch's flash kernel on a CPU.

    A sink is one more score of a row with a value of zero, so it makes the output smaller: out * sigmoid(lse - sink),
    with lse the log of the sum of exp(score). In the backward pass the kernel makes probabilities again from the lse it
    is given; from that of scores and sink together it makes the right ones.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> Tensor:
        """q [1, H, S, C]; k, v [1, K, S, C]; sinks [H] -> [1, H, S, C]."""
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        of_sinks = sinks.to(lse.dtype).unsqueeze(1)  # [H, 1]
        out = out * torch.sigmoid(lse - of_sinks).unsqueeze(-1).to(out.dtype)
        # Laid out as the kernel's own, [1, S, H, ..], which its backward pass takes for granted.
        merged = torch.empty_like(lse).copy_(torch.logaddexp(lse, of_sinks))
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, sinks, out, merged)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        of_inputs = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, True, scale=ctx.scale
        )
        grad_sinks = None
        if ctx.needs_input_grad[3]:
            means = (grad.to(lse.dtype) * out).sum(-1)  # [1, H, S]: of p dp
            shares = torch.exp(sinks.to(lse.dtype).unsqueeze(1) - lse)  # the sink's own probability
            grad_sinks = -(shares * means).sum((0, 2)).to(sinks.dtype)
        return *of_inputs, grad_sinks, None


@dataclass(frozen=True, eq=False)
class TileCall:
    """Tiles of a document's scores that one call of a kernel computes, with their rows laid end to end.

    In a tile with B query rows and L key rows, query i sees the keys j with i + L - B - left <= j <= i + L - B + right,
    where -1 is no bound: FlashAttention's `window_size`, by which the last query stands at the last key. Every query
    sees a key: kernels differ in their result for a row that sees none (a logsumexp of 0 on CPUs, of inf or -inf on
    GPUs).
    """

    queries: tuple[int, ...]
    """Query rows of each tile."""
    keys: tuple[int, ...]
    """Key rows of each tile."""
    left: int = -1
    right: int = -1
    _offsets: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    @property
    def is_causal(self) -> bool:
        """Whether a query sees all up to the key that it stands at."""
        return (self.left, self.right) == (-1, 0)

    def offsets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns the offsets of the query rows and of the key rows of the tiles: two [tiles + 1] int32, copied
        once.
        """
        if device not in self._offsets:
            queries, keys = (torch.tensor((0, *rows)).cumsum(0).int() for rows in (self.queries, self.keys))
            self._offsets[device] = copy_to(queries, device), copy_to(keys, device)
        return self._offsets[device]


class TileKernel(Protocol):
    """A kernel that returns the logsumexp of each row; its backward pass takes that of all tiles together.

    Heads have one width C; narrower queries, keys or values are filled up with zeros (`widened`); keys and values may
    have fewer heads than queries.
    """

    @property
    def joins_tiles(self) -> bool:
        """Whether a call takes several tiles."""

    def takes(self, q: Tensor, v: Tensor, softcap: float | None) -> bool:
        """Whether the kernel computes attention of queries [T, H, C] like q over values [S, K, W] like v."""

    def smallest(self, dtype: torch.dtype) -> int:
        """The fewest scores of a tile for which it is faster than products."""

    def needs_mask(self, call: TileCall) -> bool:
        """Whether the call needs a mask as large as the scores; tiles are cut small for it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: TileCall, scale: float) -> tuple[Tensor, Tensor]:
        """q [T, H, C], k and v [S, K, C], of all tiles -> out [T, H, C] and logsumexp [T, H], float32 or wider."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: TileCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. grad and out [T, H, C] and lse [T, H] are those of all keys, of which the tiles may
        have a part: probabilities are exp(score - lse)."""


@dataclass(frozen=True)
class CpuTiles:
    """Computes a tile at a time by torch's flash kernel for CPUs; its causal mask needs as many queries as keys."""

    dtypes: tuple[torch.dtype, ...] = EVERY
    joins_tiles: bool = False

    def takes(self, q: Tensor, v: Tensor, softcap: float | None) -> bool:
        return q.dtype in self.dtypes and softcap is None

    def smallest(self, dtype: torch.dtype) -> int:
        return SMALLEST_NARROW_TILE if dtype in NARROW else 0

    def needs_mask(self, call: TileCall) -> bool:
        return (call.left, call.right) != (-1, -1) and not _is_square(call)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: TileCall, scale: float) -> tuple[Tensor, Tensor]:
        rows, multiple = len(q), self._multiple(q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_heads_first(padded(x, multiple)) for x in (q, k, v)), 0.0, _is_square(call),
            attn_mask=self._mask(call, q), scale=scale,
        )  # fmt: skip
        return _rows_first(out)[:rows], _rows_first(lse)[:rows]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: TileCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, keys, multiple = len(q), len(k), self._multiple(q.dtype)
        # Rows that queries are filled up with have no gradient. The kernel takes for granted that the logsumexp is laid
        # out as its own: by rows, and the heads of each.
        of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_heads_first(padded(x, multiple)) for x in (grad, q, k, v, out, lse.contiguous())), 0.0, _is_square(call),
            attn_mask=self._mask(call, q), scale=scale,
        )  # fmt: skip
        return _rows_first(of_q)[:rows], _rows_first(of_k)[:keys], _rows_first(of_v)[:keys]

    def _multiple(self, dtype: torch.dtype) -> int:
        """Returns the multiple to which rows are filled up: few shapes in half precision, as for documents
        (`DOCUMENT_MULTIPLE`).
        """
        return DOCUMENT_MULTIPLE if dtype in NARROW else 1

    def _mask(self, call: TileCall, q: Tensor) -> Tensor | None:
        """[1, 1, B or 1, L] in q's type: 0 where a query sees a key, else -inf, with the rows that both are filled up
        with. None where the kernel knows it: all is seen, or all up to the query's own place."""
        (queries,), (keys,) = call.queries, call.keys
        multiple = self._multiple(q.dtype)
        more_queries, more_keys = -queries % multiple, -keys % multiple
        if not self.needs_mask(call):
            if _is_square(call) or not more_keys:
                return None
            return F.pad(q.new_zeros(1, 1, 1, keys), (0, more_keys), value=float("-inf"))
        ahead = torch.arange(keys).unsqueeze(0) - torch.arange(keys - queries, keys).unsqueeze(1)  # [B, L]
        hidden = torch.zeros(queries, keys, dtype=torch.bool)
        if call.left >= 0:
            hidden |= ahead < -call.left
        if call.right >= 0:
            hidden |= ahead > call.right
        mask = F.pad(q.new_zeros(queries, keys).masked_fill_(hidden, float("-inf")), (0, 0, 0, more_queries))
        return F.pad(mask, (0, more_keys), value=float("-inf"))[None, None]


@dataclass(frozen=True)
class VarlenTiles:
    """All tiles of one mask by FlashAttention on a GPU.

    attend, gradients: `aten._flash_attention_forward` and `aten._flash_attention_backward`, which
    `torch.nn.attention.varlen.varlen_attn` calls too. They have the same arguments in torch 2.11 and 2.13 and know
    grouped heads in both; `varlen_attn` knows these since 2.13 alone, and its backward pass takes no logsumexp but that
    of its own keys.
    """

    attend: Callable[..., Any]
    gradients: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...] = NARROW
    joins_tiles: bool = True

    def takes(self, q: Tensor, v: Tensor, softcap: float | None) -> bool:
        width = max(q.shape[-1], v.shape[-1])
        return q.dtype in self.dtypes and width in FLASH_WIDTHS and softcap is None

    def smallest(self, dtype: torch.dtype) -> int:
        return 0

    def needs_mask(self, call: TileCall) -> bool:
        return False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: TileCall, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = map(_with_whole_rows, (q, k, v))
        out, lse, *_ = self.attend(q, k, v, *self._lengths(call, q), False, **self._options(call, scale))
        return out, lse.transpose(0, 1)  # which is [H, T] there

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: TileCall, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = map(_with_whole_rows, (q, k, v))
        no_dropout = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # the state of a generator, which is not read
        of_q, of_k, of_v = self.gradients(
            grad, q, k, v, out, lse.transpose(0, 1).contiguous(), *self._lengths(call, q), *no_dropout,
            **self._options(call, scale),
        )  # fmt: skip
        return of_q, of_k, of_v

    def _lengths(self, call: TileCall, q: Tensor) -> tuple[Any, ...]:
        """Offsets and longest of query and key rows, dropout, and whether the mask is causal."""
        return *call.offsets(q.device), max(call.queries), max(call.keys), 0.0, call.is_causal

    def _options(self, call: TileCall, scale: float) -> dict[str, Any]:
        return {"scale": scale, "window_size_left": call.left, "window_size_right": call.right}


def widened(x: Tensor, width: int) -> Tensor:
    """x [T, heads, C] with zeros behind each head's numbers up to `width`: they change neither scores nor values."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def padded(x: Tensor, multiple: int) -> Tensor:
    """x [T, ..] with rows of zeros behind it up to a multiple."""
    more = -len(x) % multiple
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, more)) if more else x


def _is_square(call: TileCall) -> bool:
    return call.is_causal and call.queries == call.keys


def _heads_first(x: Tensor) -> Tensor:
    """[T, heads, ..] -> [1, heads, T, ..]"""
    return x.transpose(0, 1).unsqueeze(0)


def _rows_first(x: Tensor) -> Tensor:
    """[1, heads, T, ..] -> [T, heads, ..]"""
    return x.squeeze(0).transpose(0, 1)


def _with_whole_rows(x: Tensor) -> Tensor:
    """The same numbers, those of a head one behind the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True)
class Kernels:
    """The attention kernels of a device besides `scaled_dot_product_attention`; by default none."""

    varlen: Varlen | None = None
    flex: Flex | None = None
    grouped_heads: tuple[torch.dtype, ...] = EVERY
    """Types in which `scaled_dot_product_attention` has a kernel for grouped heads that keeps no scores."""
    short_document: int = -1
    """Documents up to this length are done in blocks of products."""
    document_multiple: int = 1
    """Longer ones are filled up to a multiple of this."""
    has_sinks: bool = False
    """Whether `FlashWithSinks` works on the device."""
    tiles: TileKernel | None = None
    """The kernel for attention over some of the keys, which `tiled_attention` merges."""


def kernels_of(device: torch.device) -> Kernels:
    """The attention kernels that the installed torch has for a device."""
    if device.type == "cuda":
        return _cuda_kernels(device)
    if device.type != "cpu":
        return Kernels()
    return Kernels(short_document=SHORT_DOCUMENT, document_multiple=DOCUMENT_MULTIPLE, has_sinks=True, tiles=CpuTiles())


@cache
def _cuda_kernels(device: torch.device) -> Kernels:
    flash = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    if not flash:  # the only kernel that keeps no scores knows no groups
        return Kernels(grouped_heads=())
    # Imported here: it brings torch._dynamo along, a second at the start of every process, and only GPUs use it.
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        varlen = None
    else:
        varlen = Varlen(varlen_attn)
    tiles = VarlenTiles(torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    return Kernels(varlen=varlen, flex=_compiled_flex(), grouped_heads=NARROW, tiles=tiles)


def _compiled_flex() -> Flex | None:
    """flex_attention, compiled; None without a compiler: uncompiled it would keep all scores of a pack."""
    if importlib.util.find_spec("triton") is None:
        return None
    from torch.nn.attention.flex_attention import flex_attention

    # Code that cannot be compiled must fail, not go on uncompiled with all scores of a pack. Beyond the limit nothing
    # is compiled any more: one model may have windows, softcaps, sinks and trees, each again for a pack of one block.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_VARIANTS)
    return Flex(torch.compile(flex_attention, dynamic=True, fullgraph=True))


@cache
def _parameters(kernel: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(kernel).parameters)


@cache  # compiled code is kept by function, and the tensor is copied to the device once
def _softcap(cap: float, device: torch.device) -> Callable[..., Tensor]:
    """Scores become cap x tanh(score / cap). The cap is a tensor: with dynamic shapes dynamo takes a number for one
    that may change, and cannot ask for its value within flex attention."""
    limit = copy_to(torch.tensor(cap), device)

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return capped


def documents_mask(documents: Sequence[Document], window: int | None, device: torch.device) -> Any:
    """Returns the `BlockMask` of causal attention inside each document, along its branches, with a window or without.

    Branches are in pre-order, so a token is seen by those from itself to the end of its subtree, with a window by those
    at a position less than `window` ahead. The blocks to look at follow from the segments; torch's own way compares all
    tokens with all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    total = documents[-1][-1].stop
    until, positions = torch.empty(2, total, dtype=torch.int64)  # [T] end of the subtree; place on the path
    blocks = -(-total // FLEX_BLOCK)
    seen = torch.zeros(blocks, blocks, dtype=torch.bool)  # [queries, keys] some query of a block sees some key of one
    complete = torch.zeros(blocks, blocks, dtype=torch.int64)  # queries of a block that see all keys of one
    for segment in itertools.chain.from_iterable(documents):
        for start, stop in segment.path:
            until[start:stop] = segment.stop  # the last descendant to say so ends the subtree
        positions[segment.start : segment.stop] = segment.before + torch.arange(segment.stop - segment.start)
        for row in range(segment.start // FLEX_BLOCK, -(-segment.stop // FLEX_BLOCK)):
            queries = max(segment.start, row * FLEX_BLOCK), min(segment.stop, (row + 1) * FLEX_BLOCK)
            for start, stop in segment.keys_of_any(*queries, window):
                seen[row, start // FLEX_BLOCK : -(-stop // FLEX_BLOCK)] = True
            for start, stop in segment.keys_of_all(*queries, window):
                complete[row, -(-start // FLEX_BLOCK) : stop // FLEX_BLOCK] += queries[1] - queries[0]
    full = complete == FLEX_BLOCK  # as torch has it, a block of queries that the end cuts sees none entirely
    seen_until, place = copy_to(until, device), copy_to(positions, device)
    passed = None if window is None else place + window  # [T] the position from which on a key is not seen

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        below = (key <= query) & (query < seen_until[key])
        return below if passed is None else below & (place[query] < passed[key])

    counts, indices = (copy_to(column, device) for column in _ordered(seen & ~full))
    full_counts, full_indices = (copy_to(column, device) for column in _ordered(full))
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(total, total)
    )


def _ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The count and the indices of the chosen blocks of each row: [1, 1, blocks], [1, 1, blocks, blocks] int32."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1)[None, None].int(), order[None, None].int()
