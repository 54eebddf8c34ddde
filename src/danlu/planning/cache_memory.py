"""The memory of a rollout engine's cache: keys, values and states of the answers that grow. Imports no torch.

The engine allocates its pool by these functions (`inference.model_runner`), and the plan counts with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from danlu.core.errors import ResourceError
from danlu.core.layer_types import LayerCache
from danlu.models.config import ModelConfig

if TYPE_CHECKING:
    from danlu.recipe import Recipe

GIB = 2**30
CacheKind = Literal["auto", "fp8", "int8", "int4"]
"""How keys and values are kept: in the type of activations, or as codes of 8 or 4 bits with scales."""
RolloutPrecision = Literal["auto", "int8", "fp8"]
"""How products of linear layers are computed: in the type of activations, or with weights encoded once an update."""
TILE = 128
"""Features of a token's entry that share a scale where entries have 8 bits."""
GROUP = 32
"""Tokens of a channel (keys), or channels of a token (values), that share a scale where entries have 4 bits (KIVI,
arXiv:2402.02750)."""
GROUP_BYTES = 4
"""Bytes of a group's scale (bfloat16) and zero (int16)."""
ROUTE_BYTES = 2
"""Bytes of the number of an expert, where the routes of tokens are recorded."""
DECODE_BUFFER_BYTES = 128 << 20
"""The most memory of keys and values that lie next to each other from pass to pass (`inference.decode_buffers`)."""
DECODE_ROOM = 128
"""Room for so many more tokens than there are when they are put there."""
_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class EngineBounds:
    """The limits of the embedded rollout engine, those of a recipe's section `rollout`."""

    sequences: int
    """The most answers that grow at a time."""
    batch_tokens: int
    """The most tokens of a pass."""
    block: int
    """Tokens of a block of the cache."""
    cache_gib: float
    """The most memory that keys, values and states take, in GiB, on each process."""
    swap_gib: float = 0.0
    """The most of the host's memory for answers that make room, in GiB; 0: they are read again."""
    prefix_sharing: bool = True
    drafts: int = 0
    """Tokens of an answer that are proposed and checked in a pass, in addition to its last one."""
    routes: bool = False
    """Whether the experts of each token are recorded."""
    cache: CacheKind = "auto"

    @classmethod
    def of(cls, recipe: Recipe) -> EngineBounds:
        """Reads the bounds of a recipe with a section `rollout`."""
        from danlu.recipe.routing_replay import replays_routes

        section = recipe.rollout
        return cls(
            section.sequences,
            section.batch_tokens,
            section.block,
            section.cache_gib,
            section.swap_gib if section.preempt == "swap" else 0.0,
            section.prefix_sharing,
            0 if section.draft is None else section.draft.tokens,
            replays_routes(recipe),
            section.cache,
        )

    def for_texts(self, sizes: CacheSizes, lengths: Iterable[int], context_length: int) -> EngineBounds:
        """The same bounds with a cache that is no larger than texts of these lengths in tokens need, all present at
        once: the engine that a run trains with takes no more."""
        needed = needed_cache_bytes(sizes, self, lengths, context_length)
        return replace(self, cache_gib=min(self.cache_gib, needed / GIB))


@dataclass(frozen=True)
class CacheSizes:
    """The sizes of a model's cache."""

    block_bytes: int
    """Bytes of a block, over all layers."""
    state_bytes: int
    """Bytes of a sequence's states."""
    window: int | None
    """The largest of all layers' attention windows, in tokens; None where a layer sees everything."""
    newest_bytes: int = 0
    """Bytes of a sequence's newest tokens, which are kept as they are where entries have 4 bits."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of what a sequence that runs has for itself."""
        return self.state_bytes + self.newest_bytes

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerCache],
        block: int,
        element_bytes: int,
        routes: tuple[int, int] | None = None,
        cache: CacheKind = "auto",
        drafts: int = 0,
    ) -> CacheSizes:
        """Computes the sizes of the cache of some layers.

        block: tokens of a block; element_bytes: of an activation; routes: (layers with experts, experts of a token)
        where the experts of tokens are recorded; drafts: proposed tokens that a sequence may have to give up.
        """
        windows = [layer.window for layer in layers if layer.shapes]
        known = [window for window in windows if window is not None]
        return cls(
            block_bytes(layers, block, element_bytes, routes, cache),
            state_bytes(layers, element_bytes),
            max(known, default=1) if len(known) == len(windows) else None,
            newest_tokens(block, drafts) * block_bytes(layers, 1, element_bytes) if cache == "int4" else 0,
        )

    @classmethod
    def of_model(cls, config: ModelConfig, bounds: EngineBounds, element_bytes: int, ranks: int = 1) -> CacheSizes:
        """Computes the sizes of a whole model's cache on one of `ranks` tensor ranks."""
        routes = config.route_shape if bounds.routes else None
        layers = [layer.mixer.cache(ranks) for layer in config.layers]
        return cls.of(layers, bounds.block, element_bytes, routes, bounds.cache, bounds.drafts)

    @classmethod
    def largest(cls, several: Sequence[CacheSizes]) -> CacheSizes:
        """The largest sizes of all stages of a pipeline, by which they have the same number of blocks."""
        windows = [each.window for each in several]
        known = [window for window in windows if window is not None]
        return cls(
            max(each.block_bytes for each in several),
            max(each.state_bytes for each in several),
            max(known) if len(known) == len(windows) else None,
            max(each.newest_bytes for each in several),
        )


@dataclass(frozen=True)
class PoolSize:
    """The blocks and slots of an engine's cache."""

    blocks: int
    slots: int
    """Slots of states and of newest tokens; 0 where sequences have none."""
    running: int
    """The most sequences that are computed at a time; what these have in slots may take half of the cache."""
    host_blocks: int
    """Blocks in the host's memory for sequences that make room."""

    @classmethod
    def of(cls, sizes: CacheSizes, bounds: EngineBounds, context_length: int) -> PoolSize:
        """Divides the cache of an engine into blocks and slots.

        context_length: the most tokens of a sequence. Raises ResourceError where not one block fits.
        """
        free, running = int(bounds.cache_gib * GIB), bounds.sequences
        if sizes.slot_bytes:
            running = min(running, max(1, free // 2 // sizes.slot_bytes))
            free -= running * sizes.slot_bytes
        most = running * -(-context_length // bounds.block)  # with every context full
        blocks = min(most, free // sizes.block_bytes) if sizes.block_bytes and free > 0 else 0
        if blocks == 0 and (sizes.block_bytes or free <= 0):
            kept = "state" if sizes.state_bytes else "newest tokens"
            state = f" next to the {kept} of a sequence ({gib(sizes.slot_bytes)} GiB)" if sizes.slot_bytes else ""
            raise ResourceError(
                f"rollout.cache_gib: {bounds.cache_gib} does not hold one block of {bounds.block} tokens "
                f"({gib(sizes.block_bytes)} GiB){state}. Raise it, or lower rollout.block"
            )
        swap_bytes = 0 if sizes.state_bytes else int(bounds.swap_gib * GIB)
        return cls(
            blocks or most,  # which take no memory where no layer keeps anything of single tokens
            running if sizes.slot_bytes else 0,
            running,
            min(most, swap_bytes // sizes.block_bytes) if swap_bytes else 0,
        )

    def bytes_of(self, sizes: CacheSizes) -> int:
        """The bytes of all blocks and slots of a model, or of a pipeline's stage, with these sizes."""
        return self.blocks * sizes.block_bytes + self.slots * sizes.slot_bytes


def block_bytes(
    layers: Sequence[LayerCache],
    block: int,
    element_bytes: int,
    routes: tuple[int, int] | None = None,
    cache: CacheKind = "auto",
) -> int:
    """The bytes of a block over some layers, with the routes of its tokens where they are recorded.

    Entries of 8 bits take a byte for each number, and four for each `TILE` of a head's; for those of 4 bits see
    `groups_of`.
    """
    entries = sum(
        math.prod(lead) * _head_bytes(number, block, width, element_bytes, cache)
        for layer in layers
        for number, (*lead, width) in enumerate(layer.shapes)
    )
    return entries + (0 if routes is None else block * ROUTE_BYTES * math.prod(routes))


def _head_bytes(number: int, block: int, width: int, element_bytes: int, cache: CacheKind) -> int:
    match cache:
        case "auto":
            return block * width * element_bytes
        case "int4":
            return block * -(-width // 2) + GROUP_BYTES * math.prod(groups_of(number, block, width))
    return block * (width + _FLOAT32_BYTES * -(-width // TILE))


def group_of(number: int) -> tuple[int, int]:
    """Returns (tokens, channels) that share a scale where entries have 4 bits, of a layer's tensor by its number.

    Keys have channels of a size of their own, the same for all tokens, so their groups are of one channel (KIVI). Of
    values, which are averaged over tokens, those are of one token. MLA's latent is the first tensor of its layer, and
    both: its norm gives all tokens one size, and channels theirs, so its groups are those of keys.
    """
    return (GROUP, 1) if number == 0 else (1, GROUP)


def groups_of(number: int, block: int, width: int) -> tuple[int, int]:
    """Returns how many groups a head's entries in a block have along tokens and along channels, the last ones short."""
    tokens, channels = group_of(number)
    return -(-block // tokens), -(-width // channels)


def newest_tokens(block: int, drafts: int) -> int:
    """Returns how many of its newest tokens a sequence keeps as they are where entries have 4 bits: a block that is not
    full, and as many as may be given up again."""
    return block + drafts


def state_bytes(layers: Sequence[LayerCache], element_bytes: int) -> int:
    """The bytes of a sequence's states over some layers; the last state of a layer is float32."""
    return sum(
        math.prod(shape) * (element_bytes if number else _FLOAT32_BYTES)
        for layer in layers
        for number, shape in enumerate(reversed(layer.states))
    )


def needed_cache_bytes(sizes: CacheSizes, bounds: EngineBounds, lengths: Iterable[int], context_length: int) -> int:
    """The bytes of the cache that texts of these lengths in tokens need, virtual ones included, all present at once.

    context_length: the most tokens of a text.
    """
    lengths = list(lengths)
    blocks = sum(-(-min(length, context_length) // bounds.block) for length in lengths)
    states = min(len(lengths), bounds.sequences) * sizes.slot_bytes
    # They may take half of the cache: see `PoolSize.running`.
    return max(2 * states, states + blocks * sizes.block_bytes)


def cache_bytes(
    config: ModelConfig,
    bounds: EngineBounds,
    *,
    element_bytes: int,
    ranks: int = 1,
    draft: ModelConfig | None = None,
) -> int:
    """The bytes of the cache of an engine over a model, on one of `ranks` tensor ranks.

    element_bytes: of an activation; draft: the model that proposes tokens, which has a part of the cache, so that both
    hold as many tokens. Raises ResourceError where not one block fits.
    """
    sizes = CacheSizes.of_model(config, bounds, element_bytes, ranks)
    if draft is None:
        return PoolSize.of(sizes, bounds, config.context_length).bytes_of(sizes)
    of_draft = CacheSizes.of_model(draft, replace(bounds, routes=False), element_bytes)
    shares = shares_of_cache(bounds.cache_gib, (sizes, of_draft))
    of_both = zip((config, draft), (sizes, of_draft), shares, strict=True)
    return sum(
        PoolSize.of(own, replace(bounds, cache_gib=share), model.context_length).bytes_of(own)
        for model, own, share in of_both
    )


def shares_of_cache(cache_gib: float, sizes: Sequence[CacheSizes]) -> list[float]:
    """Divides a cache among models such that all of them hold as many tokens; returns the GiB of each."""
    total = sum(each.block_bytes for each in sizes)
    return [cache_gib * each.block_bytes / total for each in sizes]


def gib(size_bytes: int) -> str:
    """A size in GiB, rounded up so that a setting of it suffices."""
    return f"{math.ceil(size_bytes / GIB * 1e4) / 1e4:g}"
