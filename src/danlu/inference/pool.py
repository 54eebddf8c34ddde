"""The pool of cache blocks: each layer's entries of its tokens, in blocks of a few tokens that any sequence may have.

The entries' shapes come from `LayerCache.shapes`. Nothing here knows that they are keys and values.

N blocks · B tokens of a block · T tokens of a pass, flat · S tokens of one sequence · K key/value heads · C head width
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from danlu.core.device_moves import copy_to
from danlu.core.layer_types import LayerCache
from danlu.inference.decode_buffers import DecodeBuffers, DecodeRows
from danlu.inference.paged import PagedAttention
from danlu.inference.route_cache import RouteCache
from danlu.inference.scheduler import Plan
from danlu.inference.state_pool import StatePool
from danlu.planning.cache_memory import TILE, CacheKind, block_bytes, groups_of

if TYPE_CHECKING:
    from danlu.inference.encoded_blocks import EncodedBlocks
    from danlu.inference.grouped_blocks import GroupedBlocks, NewestTokens

    Blocks = Tensor | EncodedBlocks | GroupedBlocks

_Kind = tuple[tuple[int, ...], int]
"""The shape of a token's entries, and which groups they have (`cache_memory.group_of`) where these are in 4 bits."""
ROUTE_DTYPE = torch.int16
ALIGNMENT = 64
"""Bytes of a cache line and of the widest vector registers; numpy aligns to 16."""


class CachePool:
    """Blocks of cached tokens of all layers.

    A tensor that a layer keeps as [*lead, C] of each token, such as keys of shape (K, C), is stored as
    [N, *lead, B, C]: the keys of a head in a block are one matrix, and a block is contiguous. Those of like shape, over
    all layers, lie in one tensor [layers and kinds, N, *lead, B, C], so that moving blocks takes few calls.

    host_blocks: of a second pool in the host's memory, for blocks that are swapped out. slots: one for each sequence
    that runs, where layers keep states (`states`) or `cache` is int4. route_shape: (layers with experts, experts of a
    token) where it is recorded which experts tokens go to (`routes`). cache: fp8, int8 and int4 keep entries as codes
    with scales (`encoded_blocks`, `grouped_blocks`), which move together. newest: with int4 the tokens of a sequence
    that its slot has, as `cache_memory.newest_tokens`.
    """

    def __init__(
        self,
        layers: Sequence[LayerCache],
        *,
        blocks: int,
        block: int,
        dtype: torch.dtype,
        device: torch.device,
        host_blocks: int = 0,
        slots: int = 0,
        route_shape: tuple[int, int] | None = None,
        cache: CacheKind = "auto",
        newest: int = 0,
    ) -> None:
        self.cache: CacheKind = cache
        self._newest_tokens = newest
        self.slots, self.route_shape = slots, route_shape
        self.routes: RouteCache | None = None
        self.states: StatePool | None = None
        self.layers = tuple(layers)
        self.blocks, self.block, self.host_blocks = blocks, block, host_blocks
        self.dtype, self.device = dtype, device
        self.token_bytes = block_bytes(layers, 1, dtype.itemsize)
        self.decode_buffers = DecodeBuffers(block, device)
        # By shape of a token: [layers and kinds, N, *lead, B, C], and of encoded entries their scales too.
        self._storage: dict[_Kind, tuple[Tensor, ...]] = {}
        self._host: dict[_Kind, tuple[Tensor, ...]] = {}
        self._newest: dict[_Kind, Tensor] = {}  # [layers and kinds, slots, R, *lead, C]
        self._views: list[tuple[Blocks, ...]] = []
        self._slots = Slots(Plan(), block, device)
        self._of_newest: NewestTokens | None = None  # of the plan that was carried out last
        self.allocate()

    def allocate(self) -> None:
        """Takes memory for the blocks, which are zeros. On a CPU a page is taken when it is first written."""
        kinds = [kind for layer in self.layers for kind in self._kinds(layer)]
        for kind in dict.fromkeys(kinds):
            (*lead, width), _ = kind
            count, parts = kinds.count(kind), self._parts(kind)
            self._storage[kind] = tuple(
                _zeros((count, self.blocks, *lead, *size), dtype, self.device) for size, dtype in parts
            )
            if self.host_blocks:
                of_host, pinned = (count, self.host_blocks, *lead), self.device.type == "cuda"
                self._host[kind] = tuple(_host_zeros((*of_host, *size), dtype, pinned=pinned) for size, dtype in parts)
            if self.cache == "int4":
                shape = count, self.slots, self._newest_tokens, *lead, width
                self._newest[kind] = _zeros(shape, self.dtype, self.device)
        if self.route_shape is not None:
            of_block = (self.block, *self.route_shape)
            host = _host_zeros((self.host_blocks, *of_block), ROUTE_DTYPE, pinned=False) if self.host_blocks else None
            self.routes = RouteCache(_zeros((self.blocks, *of_block), ROUTE_DTYPE, self.device), host)
        next_of = {kind: self._blocks_of(kind, parts) for kind, parts in self._storage.items()}
        self._views = [tuple(next(next_of[kind]) for kind in self._kinds(layer)) for layer in self.layers]
        if self.slots and any(layer.states for layer in self.layers):
            self.states = StatePool(self.layers, self.slots, self.dtype, self.device)

    def _kinds(self, layer: LayerCache) -> Iterator[_Kind]:
        """Yields the kind of each tensor of a layer: of one kind are those that lie in one tensor."""
        for number, shape in enumerate(layer.shapes):
            yield shape, min(number, 1) if self.cache == "int4" else 0

    def _parts(self, kind: _Kind) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Returns (size for a head and block, type) of each tensor that keeps entries of a kind."""
        (*_, width), number = kind
        match self.cache:
            case "auto":
                return [((self.block, width), self.dtype)]
            case "int4":
                from danlu.inference.grouped_blocks import SCALE_DTYPE, ZERO_DTYPE

                groups = groups_of(number, self.block, width)
                return [((self.block, -(-width // 2)), torch.uint8), (groups, SCALE_DTYPE), (groups, ZERO_DTYPE)]
        from danlu.inference.encoded_blocks import CODE_DTYPES

        scales = self.block, -(-width // TILE)
        return [((self.block, width), CODE_DTYPES[self.cache]), (scales, torch.float32)]

    def _blocks_of(self, kind: _Kind, parts: tuple[Tensor, ...]) -> Iterator[Blocks]:
        """Yields the blocks of each layer and kind in the tensors of a kind."""
        match self.cache:
            case "auto":
                yield from parts[0]
            case "int4":
                from danlu.inference.grouped_blocks import GroupedBlocks

                for codes, scales, zeros, newest in zip(*parts, self._newest[kind], strict=True):
                    yield GroupedBlocks(codes, scales, zeros, newest, kind[1])
            case _:
                from danlu.inference.encoded_blocks import EncodedBlocks

                for codes, scales in zip(*parts, strict=True):
                    yield EncodedBlocks(codes, scales, self.cache, self.dtype)

    def release(self) -> None:
        """Gives the memory back, with all that was cached, until `allocate`."""
        self._storage, self._host, self._views, self.states, self.routes = {}, {}, [], None, None
        self._newest, self._of_newest = {}, None
        self.decode_buffers.clear()

    @property
    def is_encoded(self) -> bool:
        """Whether entries are kept as codes with scales."""
        return self.cache != "auto"

    def tensors(self, layer: int) -> tuple[Blocks, ...]:
        """The blocks of a layer, [N, *lead, B, C] for each of its shapes; encoded where the pool's entries are."""
        return self._views[layer]

    def carry_out(self, plan: Plan) -> None:
        """Moves, copies and clears blocks as the plan has it, and makes `write` write to the slots of its chunks."""
        if plan.swapped_out:
            source, target = _pairs(plan.swapped_out)
            for host, blocks in self._with_host():
                host[:, target] = blocks[:, source.to(self.device)].to("cpu")
        if plan.swapped_in:
            source, target = _pairs(plan.swapped_in)
            for host, blocks in self._with_host():
                blocks[:, target.to(self.device)] = host[:, source].to(self.device)
        if plan.copies:
            source, target = (self.index(numbers) for numbers in zip(*plan.copies, strict=True))
            for blocks in itertools.chain.from_iterable(self._storage.values()):
                blocks.index_copy_(1, target, blocks.index_select(1, source))
        if self.routes is not None:
            self.routes.carry_out(plan)
        if plan.state_copies:
            if self.states is not None:
                self.states.copy(plan.state_copies)
            source, target = (self.index(slots) for slots in zip(*plan.state_copies, strict=True))
            for newest in self._newest.values():
                newest.index_copy_(1, target, newest.index_select(1, source))
        if plan.fresh:  # what was left there may be NaN, and a probability of 0 times NaN is NaN
            fresh = self.index(plan.fresh)
            for blocks in itertools.chain.from_iterable(self._storage.values()):
                blocks.index_fill_(1, fresh, 0)
        self._slots = Slots(plan, self.block, self.device)
        if self.cache == "int4":
            from danlu.inference.grouped_blocks import NewestTokens

            self._of_newest = NewestTokens(plan.chunks, self.block, self._newest_tokens, self.device)

    def _with_host(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each tensor of the host's pool with the one that its blocks come from."""
        for kind, parts in self._storage.items():
            yield from zip(self._host[kind], parts, strict=True)

    def attend(self, plan: Plan) -> PagedAttention:
        """Attention of the plan's chunks, laid end to end."""
        if self._of_newest is not None:
            from danlu.inference.grouped_attention import GroupedAttention

            return GroupedAttention(plan, self, self._of_newest)
        return PagedAttention(plan, self)

    def decode_rows(self, plan: Plan) -> DecodeRows | None:
        """The rows of a plan that brings one token to each sequence; None where buffers for them would be too large."""
        return self.decode_buffers.rows_of(plan.chunks, self.token_bytes)

    def write(self, layer: int, *rows: Tensor) -> tuple[Tensor, ...]:
        """Writes a layer's entries of the latest plan's tokens, [T, *lead, C] each, and returns them as they are read:
        rounded where entries are encoded; in 4 bits as they are, which is how the tokens of their block read them."""
        if self._of_newest is not None:
            self._of_newest.write(layer, cast("tuple[GroupedBlocks, ...]", self._views[layer]), rows)
            return rows
        read = []
        for blocks, new in zip(self._views[layer], rows, strict=True):
            slots, width = self._slots.rows(math.prod(new.shape[1:-1])), new.shape[-1]
            if isinstance(blocks, Tensor):
                blocks.view(-1, width).index_copy_(0, slots, new.reshape(-1, width))
                read.append(new)
            else:
                read.append(cast("EncodedBlocks", blocks).write(slots, new))
        return tuple(read)

    def rounded(self, layer: int, *rows: Tensor) -> tuple[Tensor, ...]:
        """Returns entries [.., *lead, C] of a layer as they are read once they are written."""
        if self.cache == "int4":
            return rows
        views = cast("tuple[Tensor | EncodedBlocks, ...]", self._views[layer])
        pairs = zip(views, rows, strict=True)
        return tuple(new if isinstance(blocks, Tensor) else blocks.rounded(new) for blocks, new in pairs)

    def write_routes(self, routes: Tensor) -> None:
        """Keeps the experts that the tokens of the plan that was carried out last went to, [T, L, k] int16."""
        assert self.routes is not None, "routes are recorded"
        self.routes.write(self._slots.rows(1), routes)

    def write_layers(self, rows: Tensor) -> None:
        """`write` for all layers at once, where each keeps tensors of one shape: [layers, kinds, T, heads, C]."""
        ((storage,),) = self._storage.values()  # [layers * kinds, N, heads, B, C]
        heads, width = rows.shape[-2:]
        new = rows.reshape(len(storage), -1, width)
        storage.view(len(storage), -1, width).index_copy_(1, self._slots.rows(heads), new)

    def gather(self, layer: int, blocks: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """Returns a layer's entries of the first S = `tokens` tokens in these blocks: [S, *lead, C], contiguous.

        blocks: their numbers in order, int64 on the pool's device.
        """
        return tuple(
            view.movedim(-2, 1)[blocks].flatten(0, 1)[:tokens]
            if isinstance(view, Tensor)
            else view.index_select(0, blocks).movedim(-2, 1).flatten(0, 1)[:tokens]
            for view in self._views[layer]
        )

    def index(self, numbers: Sequence[int]) -> Tensor:
        """Numbers as int64 on the pool's device."""
        return copy_to(torch.tensor(numbers), self.device)


class Slots:
    """The slots of the tokens of a plan's chunks: [T] block of each, and its place there."""

    def __init__(self, plan: Plan, block: int, device: torch.device) -> None:
        self._block, self._device = block, device
        positions = [(chunk, position) for chunk in plan.chunks for position in range(chunk.start, chunk.stop)]
        self._blocks = np.array([chunk.blocks[position // block] for chunk, position in positions], dtype=np.int64)
        self._places = np.array([position % block for _, position in positions], dtype=np.int64)
        self._rows: dict[int, Tensor] = {}

    def rows(self, heads: int) -> Tensor:
        """[T * heads]: in blocks [N * heads * B, C], the row of each token's heads."""
        if heads not in self._rows:
            first = self._blocks * (heads * self._block) + self._places
            rows = first[:, None] + np.arange(heads) * self._block
            self._rows[heads] = copy_to(torch.from_numpy(rows.ravel()), self._device)
        return self._rows[heads]


def _pairs(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    source, target = zip(*pairs, strict=True)
    return torch.tensor(source), torch.tensor(target)


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return _host_zeros(shape, dtype, pinned=False)
    return torch.zeros(shape, dtype=dtype, device=device)


def _host_zeros(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Zeros on the host; of memory that is not pinned, a page is taken when it is first written.

    torch's own zeros are written at once; numpy asks the system for pages that are zero.
    """
    if pinned:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
