"""The config of a shrunken model: small in every size, the same in everything that decides how a layout shards it.

It keeps the family with its norms, biases, ties, windows and caps, and whether and how often each size divides by the
layout's degrees. The result runs in seconds on a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from danlu.core.types import Pack
from danlu.models.config import ModelConfig
from danlu.models.families import FAMILIES
from danlu.models.layer_spec import Dense, Feed, LayerSpec, Mixer
from danlu.models.mixer_spec import Delta, Factorized, Heads, Latent
from danlu.models.rope_config import DynamicScaling, LongRopeScaling, Rope
from danlu.parallel.layout import Layout

MAX_LENGTH = 128  # tokens of a pack
WINDOW = 24  # tokens, of sliding attention
VOCAB_SIZE = 256
BLOCK = 32  # numbers, of quantized weights: the smallest block in 4 bits
EXPERTS, TOP_K, GROUPS = 8, 2, 4
LENGTH_OF_ROUTES = 48
"""Tokens of a pack of a model with experts: with fewer tokens more seeds have no two experts of almost one score."""
CANDIDATES = 6
"""Times as many items of a model with experts, from which those are chosen that rounding routes alike."""
_FIRST_STAGE = 2**20  # key of the first stage of lengths


def proxy_config(
    config: ModelConfig,
    layout: Layout,
    *,
    quantized: bool = False,
    deep: bool = False,
    other_width: int | None = None,
    least_layers: int = 2,
    trained_length: int | None = None,
) -> ModelConfig:
    """Returns the config with small sizes; those that divide by the layout's degrees do so still, and the rest do not.

    quantized: widths stay multiples of a block. deep: four layers, for features that work on segments of them.
    other_width: the width of a model that this one must differ from. least_layers: the layers that the chunks of a
    pipeline need. trained_length: tokens from which a document is rotated as one longer than the large model was
    trained at; None: as in the large one.
    """
    tensor = layout.tensor
    large = _sample_layers(config.layers, max(least_layers, 4 if deep or len(config.kinds) > 1 else 2))
    mixers = _with_equal_heads([_small_mixer(layer.mixer, tensor, quantized=quantized) for layer in large])
    unit = BLOCK * tensor if quantized else 8
    splits_width = FAMILIES[config.family].heads_split_width
    step = math.lcm(unit, mixers[0].query_width) if splits_width else unit
    hidden = _round_to(mixers[0].query_width * config.hidden_size / large[0].mixer.query_width, step)
    hidden += step if hidden == other_width else 0
    mixers = [_splitting(mixer, hidden) for mixer in mixers] if splits_width else mixers
    inner_unit = unit if quantized else 4 * tensor
    feeds = [_small_feed(layer.feed, hidden / config.hidden_size, inner_unit, layout.expert) for layer in large]
    if config.shares_keys:
        feeds = _in_proportion([layer.feed for layer in large], feeds)
    own_width = min(config.per_layer_width, unit)
    multiplier = config.embedding_multiplier
    small = replace(
        config,
        vocab_size=_with_remainder(config.vocab_size, VOCAB_SIZE, layout.tensor * layout.data),
        hidden_size=hidden,
        layers=tuple(
            replace(layer, mixer=mixer, feed=feed, per_layer_width=own_width)
            for layer, mixer, feed in zip(large, mixers, feeds, strict=True)
        ),
        embedding_multiplier=math.sqrt(hidden) if multiplier == math.sqrt(config.hidden_size) else multiplier,
        bos_token_id=1,
        eos_token_ids=(2,),
        pad_token_id=None,
    )
    return small if trained_length is None else _trained_at(small, trained_length)


def _trained_at(config: ModelConfig, length: int) -> ModelConfig:
    """The config as if rotations that follow lengths had been trained at documents of `length` tokens."""

    def changed(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        if isinstance(mixer, Delta) or mixer.rope is None:
            return layer
        return replace(layer, mixer=replace(mixer, rope=rope_trained_at(mixer.rope, length)))

    small = config.with_layers(changed)
    if not any(rope.follows_length for rope in small.ropes):
        return small
    return replace(small, max_position_embeddings=max(rope.max_position_embeddings for rope in small.ropes))


def rope_trained_at(rope: Rope, length: int) -> Rope:
    """A rotary embedding that begins to follow the length of a document, or a token's position, at `length` tokens."""
    scaling, positions = rope.scaling, rope.max_position_embeddings
    if isinstance(scaling, DynamicScaling):
        positions = length
    if isinstance(scaling, LongRopeScaling):
        positions = max(length, round(length * positions / scaling.original_max_position_embeddings))
        scaling = replace(scaling, original_max_position_embeddings=length)
    temperature = None if rope.temperature is None else replace(rope.temperature, length=length)
    return replace(rope, max_position_embeddings=positions, scaling=scaling, temperature=temperature)


def trained_length(packs: Sequence[Pack]) -> int:
    """Tokens that a small model is trained at, so that the longest documents of most of these packs are longer, and a
    quarter of them, which a rank of two has of a document's beginning, is not."""
    longest = sorted(max(len(sample.tokens) for sample in pack.samples) for pack in packs)
    return max(2, longest[len(longest) // 2] // 2)


def staged_ropes(
    config: ModelConfig, small: ModelConfig, by_length: Mapping[int, Sequence[Rope]], length: int | None
) -> dict[int, tuple[Rope, ...]]:
    """Returns the rotary embeddings of stages of lengths (`Decoder.staged_ropes`) of a small model, by a key of each
    stage.

    Keys are alike in size: micro-batches of all stages have the same number of packs.

    Args:
        config: of the large model, at its longest stage; its `ropes` give the order of those in `by_length`.
        length: as `trained_length`; None for the model as it is.
    """
    sampled = _sample_layers(config.layers, len(small.layers))
    places = {
        own: config.ropes.index(large.mixer.rope)
        for own, large in zip((layer.mixer.rope for layer in small.layers), sampled, strict=True)
        if own is not None and large.mixer.rope is not None
    }

    def of_stage(ropes: Sequence[Rope]) -> tuple[Rope, ...]:
        own = [_small_rope(ropes[places[rope]], rope.dim) for rope in small.ropes]
        return tuple(own if length is None else (rope_trained_at(rope, length) for rope in own))

    return {_FIRST_STAGE + number: of_stage(ropes) for number, ropes in enumerate(by_length.values())}


def _small_mixer(large: Mixer, tensor: int, *, quantized: bool) -> Mixer:
    """The mixer of a layer with few and narrow heads, which tensor ranks share as they share the large ones."""
    unit = 16 if quantized else 8  # of what is cut by blocks of quantized weights
    match large:
        case Delta():
            return _small_delta(large, tensor, quantized=quantized)
        case Heads():
            return _small_heads(large, tensor, quantized=quantized)
        case Latent():
            heads = _queries_per_key(large.heads, 1, tensor)
            return replace(
                large,
                heads=heads,
                kv_lora_rank=4 * unit,
                qk_nope_head_dim=unit,
                v_head_dim=unit if large.v_head_dim == large.qk_nope_head_dim else 2 * unit,
                q_lora_rank=None if large.q_lora_rank is None else 6 * unit,
                rope=_small_rope(large.rope, unit),
            )
        case Factorized():
            heads = _queries_per_key(large.heads, 1, tensor)
            share = 1.0 if large.rope is None else large.rope.dim / large.head_dim
            head_dim = _narrow_head(share, quantized=quantized)
            return replace(
                large,
                heads=heads,
                head_dim=head_dim,
                query_rank=head_dim if large.query_rank == large.head_dim else 2 * head_dim,
                rope=None if large.rope is None else _small_rope(large.rope, int(head_dim * share)),
            )


def _with_equal_heads(mixers: list[Mixer]) -> list[Mixer]:
    """The mixers with as many query heads in all layers, for a config.json has one number of them; key heads may
    differ.
    """
    count = math.lcm(*(mixer.heads for mixer in mixers if isinstance(mixer, Heads)))
    return [replace(mixer, heads=count) if isinstance(mixer, Heads) else mixer for mixer in mixers]


def _narrow_head(share: float, *, quantized: bool) -> int:
    """A width of heads of which that share, when it is rotated, is an even number of features."""
    return next(
        size
        for size in (8, 16, 32, 64, 128, 256)
        if (turned := int(size * share)) and turned % 2 == 0
        if size >= (16 if quantized else 8)
    )


def _small_delta(large: Delta, tensor: int, *, quantized: bool) -> Delta:
    """Few and narrow heads of linear attention, several to a key head where there were."""
    key_heads = min(large.key_heads, tensor * (2 if tensor <= 2 else 1))
    shared = min(2, large.heads // large.key_heads)
    width = 16 if quantized else 8
    return replace(large, heads=key_heads * shared, key_heads=key_heads, key_dim=width, value_dim=width)


def _small_heads(large: Heads, tensor: int, *, quantized: bool) -> Heads:
    """Few and narrow heads that tensor ranks share as they share the large ones."""
    kv_per_rank = 2 if tensor <= 2 else 1
    kv_heads = large.kv_heads if large.kv_heads <= tensor else tensor * min(kv_per_rank, large.kv_heads // tensor)
    queries = _queries_per_key(large.heads // large.kv_heads, kv_heads, tensor)
    share = 1.0 if large.rope is None else large.rope.dim / large.head_dim
    head_dim = _narrow_head(share, quantized=quantized)
    return replace(
        large,
        heads=kv_heads * queries,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=None if large.rope is None else _small_rope(large.rope, int(head_dim * share)),
        scale=_small_scale(large, head_dim),
        window=None if large.window is None else WINDOW,
    )


def _small_scale(large: Heads, head_dim: int) -> float | None:
    """The factor of q·k of narrower heads; 1, where norms of queries and keys stand for a factor, is that of all."""
    if large.scale is None or large.scale == 1.0:
        return large.scale
    return _as_one_over_a_root(large.scale * math.sqrt(large.head_dim / head_dim))


def _splitting(mixer: Mixer, width: int) -> Mixer:
    """The mixer with heads that share a width, a multiple of theirs, among them."""
    assert isinstance(mixer, Heads), "families with another mixer say how wide a head is"
    head_dim = width // mixer.heads
    rope = mixer.rope
    rope = None if rope is None else _small_rope(rope, rope.dim * head_dim // mixer.head_dim)
    return replace(mixer, head_dim=head_dim, rope=rope)


def _small_rope(large: Rope, dim: int) -> Rope:
    """The rotary embedding of fewer features; of LongRoPE's factors as many as these have pairs, from all of them."""
    scaling = large.scaling
    if isinstance(scaling, LongRopeScaling):
        places = [pair * (large.dim // 2) // (dim // 2) for pair in range(dim // 2)]
        short, long = (tuple(each[place] for place in places) for each in (scaling.short_factor, scaling.long_factor))
        scaling = replace(scaling, short_factor=short, long_factor=long)
    return replace(large, dim=dim, scaling=scaling)


def _small_feed(large: Feed, share: float, unit: int, expert: int) -> Feed:
    """A feed-forward network of `share` of the width, in units; of experts a few, shared as all of them are."""
    if isinstance(large, Dense):
        return _small_dense(large, share, unit)
    router = large.router
    if router.groups > GROUPS:  # as many of them are left out, roughly, but always some where there were some
        kept = max(1, round(GROUPS * router.top_groups / router.groups))
        kept = min(kept, GROUPS - 1) if router.top_groups < router.groups else GROUPS
        router = replace(router, groups=GROUPS, top_groups=kept)
    # Groups are chosen by their two best experts, and each rank has as many experts as the others.
    multiple = math.lcm(router.groups, expert)
    least = max(2 * router.groups, min(EXPERTS, large.num_experts))
    return replace(
        large,
        intermediate_size=_round_to(share * large.intermediate_size, unit),
        num_experts=min(large.num_experts, -(-least // multiple) * multiple),
        top_k=min(large.top_k, TOP_K),
        router=router,
        shared=None if large.shared is None else _small_dense(large.shared, share, unit),
    )


def _small_dense(large: Dense, share: float, unit: int) -> Dense:
    return replace(large, intermediate_size=_round_to(share * large.intermediate_size, unit))


def _as_one_over_a_root(scale: float) -> float:
    """Rounds the scale to nine digits of its inverse square, the number that a config.json holds."""
    return 1 / math.sqrt(round(scale**-2, 9))


def _queries_per_key(large: int, kv_heads: int, tensor: int) -> int:
    """Query heads for each key/value head: the fewest that tensor ranks can share, but several where there were."""
    fitting = [count for count in range(1, large + 1) if large % count == 0 and kv_heads * count % tensor == 0]
    return min([count for count in fitting if count > 1] or fitting, default=large)


def _round_to(size: float, unit: int) -> int:
    """The multiple of `unit` nearest to `size`, at least one."""
    return max(1, round(size / unit)) * unit


def _with_remainder(size: int, small: int, degree: int) -> int:
    """Returns a size of about `small`, with the remainder of `size` modulo `degree`: an uneven size stays uneven for
    the layout."""
    if size <= small:
        return size
    return max(degree, small // degree * degree) + size % degree


def _sample_layers(layers: tuple[LayerSpec, ...], count: int) -> tuple[LayerSpec, ...]:
    """Selects `count` layers: the first ones and the last, or, where those lack a kind that others have, layers spread
    over all."""
    count = min(count, len(layers))
    if any(layer.mixer.sharing for layer in layers):
        return _sample_sharing(layers, count)
    first = (*layers[: count - 1], layers[-1])
    if len(set(first)) == len(set(layers)):
        return first
    return tuple(layers[place * (len(layers) - 1) // max(1, count - 1)] for place in range(count))


def _sample_sharing(layers: tuple[LayerSpec, ...], count: int) -> tuple[LayerSpec, ...]:
    """Selects a layer of each kind where some read the keys of others, in the model's order, and more up to `count`."""
    chosen = {layers.index(kind) for kind in dict.fromkeys(layers)}
    more = (place for place, layer in enumerate(layers) if layer.mixer.sharing is None or layer.mixer.reads_keys)
    for place in more:
        if len(chosen) < count:
            chosen.add(place)
    return tuple(layers[place] for place in sorted(chosen | {len(layers) - 1}))


def _in_proportion(large: Sequence[Feed], small: Sequence[Feed]) -> list[Feed]:
    """Small networks as many times as wide as the first one as the large ones are (Gemma 4 E2B has two widths)."""
    base, own = large[0].intermediate_size, small[0].intermediate_size
    return [
        replace(feed, intermediate_size=own * wide.intermediate_size // base)
        for wide, feed in zip(large, small, strict=True)
    ]
