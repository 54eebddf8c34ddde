"""The operations that mix a layer's tokens, by kind of mixer: see `operations`. Imports no torch.

D model width · H query heads · K key/value heads · C head width · R width of a latent · Q rank of factorized queries
W width of a value
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from danlu.models.layer_spec import Mixer
from danlu.models.mixer_spec import Delta, Factorized, Heads, Latent
from danlu.models.operations import KEYS, ROTATION, VALUES, Operation, Value, Weights
from danlu.models.rope_config import Rope

_MIX, _GATED = "attend_heads", "gated"


def mixer_operations(mixer: Mixer, width: int) -> Iterator[Operation]:
    """Yields the operations from `input`, which the sublayer reads, to `output` [T, D]. width: D."""
    match mixer:
        case Heads(sharing="reads"):
            return _queries(mixer, width)
        case Heads():
            return _heads(mixer, width)
        case Latent():
            return _latent(mixer, width)
        case Factorized():
            return _factorized(mixer, width)
        case Delta():
            return _delta(mixer, width)


def product(
    name: str,
    reads: str,
    makes: Value,
    inputs: int,
    *,
    bias: bool = False,
    parts: int = 1,
    selective: str | None = None,
) -> Operation:
    """A linear layer with its weight [O, I], O the width of its output."""
    weights: Weights = ((f"{name}.weight", (makes.width, inputs)),)
    weights += ((f"{name}.bias", (makes.width,)),) if bias else ()
    return Operation(name, "product", (reads,), (makes,), (reads,), weights=weights, parts=parts, selective=selective)


def norm(
    name: str,
    reads: str,
    makes: Value,
    width: int,
    *,
    rows: int = 1,
    statistics: int = 1,
    bias: bool = False,
    elementwise: str | None = None,
    selective: str | None = None,
) -> Operation:
    """A norm of `rows` rows of `width` features a token, which saves its input and float32 statistics of each row.

    width: 0 of a norm without a weight.
    """
    kept = Value(f"{name}.statistics", statistics * rows, type="float32", parts=makes.parts, is_local=makes.is_local)
    weights: Weights = ((f"{name}.weight", (width,)),) if width else ()
    weights += ((f"{name}.bias", (width,)),) if bias else ()
    return Operation(
        name, "norm", (reads,), (makes, kept), (reads, kept.name), weights=weights,
        elementwise=elementwise, selective=selective, parts=makes.parts,
    )  # fmt: skip


def _rotated(name: str, reads: str, makes: Value, selective: str | None = _MIX) -> Operation:
    """A rotation, which saves the tables that it multiplies by, and neither queries nor keys."""
    reads_all, saves = (reads, ROTATION), (ROTATION,)
    return Operation(name, "elementwise", reads_all, (makes,), saves, selective=selective, parts=makes.parts)


def _scales_queries(rope: Rope | None) -> bool:
    return rope is not None and rope.temperature is not None


def _queries(mixer: Heads, width: int) -> Iterator[Operation]:
    """Attention to keys and values that another layer has made."""
    heads = mixer.heads
    queries = Value("q", mixer.query_width, parts=heads)
    yield product("q_proj", "input", queries, width, bias=mixer.qkv_bias, parts=heads)
    if mixer.qk_norm is not None:
        normed = Value("q.normed", queries.width, parts=heads)
        yield norm(
            "q_norm", "q", normed, mixer.head_dim, rows=heads, elementwise="q_norm", selective=_MIX
        )  # fmt: skip
        queries = normed
    if mixer.rope is not None:
        yield _rotated("rotate_q", queries.name, queries := Value("q.rotated", queries.width, parts=heads))
    if _scales_queries(mixer.rope):
        yield _rotated("scale_queries", queries.name, queries := Value("q.scaled", queries.width, parts=heads))
    mixed = Value("mixed", mixer.query_width, parts=heads)
    reads = (queries.name, KEYS, VALUES)
    yield Operation("attend", "attention", reads, (mixed,), reads, selective=_MIX, parts=heads)
    yield product("o_proj", "mixed", Value("output", width), mixed.width, bias=mixer.o_bias, parts=heads)


def _heads(mixer: Heads, width: int) -> Iterator[Operation]:
    heads, groups, size = mixer.heads, mixer.kv_heads, mixer.head_dim
    queries = Value("q", mixer.query_width, parts=heads)
    keys, values = (Value(name, mixer.kv_width, parts=groups) for name in ("k", "v"))
    yield product("q_proj", "input", queries, width, bias=mixer.qkv_bias, parts=heads)
    yield product("k_proj", "input", keys, width, bias=mixer.qkv_bias, parts=groups)
    if mixer.values_are_keys:
        values = keys
    else:
        yield product("v_proj", "input", values, width, bias=mixer.qkv_bias, parts=groups)
    if mixer.output_gate:
        gate = Value("gate", mixer.query_width, parts=heads)
        yield product("gate_proj", "input", gate, width, parts=heads)
    names = {"q": queries, "k": keys}
    of_keys = None if mixer.sharing == "gives" else _MIX  # what is given to other layers is not made again

    def changed(name: str, suffix: str) -> tuple[str, Value]:
        """The present name of queries or keys, and their next value."""
        before = names[name]
        names[name] = Value(f"{before.name}.{suffix}", before.width, parts=before.parts)
        return before.name, names[name]

    def norms() -> Iterator[Operation]:
        is_full = mixer.qk_norm == "full"
        for name, count, normed in zip(("q", "k"), (heads, groups), mixer.normed_widths, strict=True):
            reads, makes = changed(name, "normed")
            yield norm(
                f"{name}_norm", reads, makes, normed, rows=1 if is_full else count, elementwise=f"{name}_norm",
                selective=_MIX if name == "q" else of_keys,
            )  # fmt: skip

    if mixer.value_norm:
        normed = Value("v.normed", values.width, parts=groups)
        yield norm("v_norm", values.name, normed, 0, rows=groups, elementwise="normed_values", selective=of_keys)
        values = normed
    if mixer.qk_norm is not None and not mixer.norm_behind_rope:
        yield from norms()
    if mixer.rope is not None:
        for name in ("q", "k"):
            yield _rotated(f"rotate_{name}", *changed(name, "rotated"), _MIX if name == "q" else of_keys)
    if mixer.norm_behind_rope:
        yield from norms()
    if _scales_queries(mixer.rope):
        yield _rotated("scale_queries", *changed("q", "scaled"))
    mixed = Value("mixed", heads * size, parts=heads)
    sinks = ((("sinks", (heads,)),)) if mixer.sinks else ()
    reads = (names["q"].name, names["k"].name, values.name)
    yield Operation("attend", "attention", reads, (mixed,), reads, weights=sinks, selective=_MIX, parts=heads)
    if mixer.output_gate:
        sigmoid, gated = (Value(name, mixed.width, parts=heads) for name in ("gate.sigmoid", "mixed.gated"))
        yield Operation(
            "gated", "elementwise", ("mixed", "gate"), (sigmoid, gated), ("mixed", "gate.sigmoid"),
            elementwise=_GATED, selective=_MIX, parts=heads,
        )  # fmt: skip
        mixed = gated
    yield product("o_proj", mixed.name, Value("output", width), mixed.width, bias=mixer.o_bias, parts=heads)


def _latent(mixer: Latent, width: int) -> Iterator[Operation]:
    heads = mixer.heads
    queries = Value("q", mixer.query_width, parts=heads)
    if mixer.q_lora_rank is None:
        yield product("q_proj", "input", queries, width, parts=heads)
    else:
        rank = mixer.q_lora_rank
        yield product("q_a_proj", "input", Value("q.latent", rank), width, bias=mixer.bias)
        normed = Value("q.latent.normed", rank)
        yield norm("q_a_norm", "q.latent", normed, rank, elementwise="q_a_norm", selective="q_a_norm")
        yield product("q_b_proj", normed.name, queries, rank, parts=heads)
    latent, rank = Value("latent", mixer.cached_width), mixer.kv_lora_rank
    yield product("kv_a_proj", "input", latent, width, bias=mixer.bias)
    turned = Value("q.turned", heads * mixer.rope.dim, parts=heads), Value("latent.turned", mixer.rope.dim)
    yield Operation("rotate", "elementwise", ("q", "latent", ROTATION), turned, (ROTATION,), selective=_MIX)
    joined = Value("q.rotated", queries.width, parts=heads)
    yield Operation("join_q", "elementwise", ("q", "q.turned"), (joined,), selective=_MIX, parts=heads)
    if _scales_queries(mixer.rope):
        yield _rotated("scale_queries", joined.name, joined := Value("q.scaled", queries.width, parts=heads))
    normed = Value("latent.normed", rank)
    yield norm("kv_a_norm", "latent", normed, rank, elementwise="kv_a_norm", selective=_MIX)
    stored = Value("latent.stored", mixer.cached_width)
    yield Operation("store", "elementwise", (normed.name, "latent.turned"), (stored,), selective=_MIX)
    expanded = Value("expanded", mixer.expanded_width, parts=heads)  # of all heads: keys, and values behind each
    yield product("kv_b_proj", stored.name, expanded, rank, parts=heads, selective=_MIX)
    keys = Value("k", mixer.query_width, parts=heads)
    yield Operation("join_k", "elementwise", (expanded.name, stored.name), (keys,), selective=_MIX, parts=heads)
    mixed = Value("mixed", mixer.value_width, parts=heads)
    reads = (joined.name, "k", expanded.name)
    yield Operation("attend", "attention", reads, (mixed,), reads, selective=_MIX, parts=heads)
    yield product("o_proj", "mixed", Value("output", width), mixed.width, bias=mixer.bias, parts=heads)


def _factorized(mixer: Factorized, width: int) -> Iterator[Operation]:
    heads, size, rank = mixer.heads, mixer.head_dim, mixer.query_rank
    of_queries = Value("q.shared", rank)
    yield product("q_a_proj", "input", of_queries, width)
    if mixer.query_norm:
        normed = Value("q.shared.normed", rank)
        yield norm("q_a_norm", of_queries.name, normed, rank, elementwise="q_a_norm", selective="q_a_norm")
        of_queries = normed
    queries, keys, values = Value("q", mixer.query_width, parts=heads), Value("k", size), Value("v", size)
    yield product("q_b_proj", of_queries.name, queries, rank, parts=heads)
    yield product("k_proj", "input", keys, width)
    if mixer.key_reuse:
        of_key = Value("k.times_n", size)
        yield product("key_reuse", "k", of_key, size, selective=_MIX)
        gate = (("key_reuse_gate", (size,)),)
        narrow = Value("key_reuse_gate.narrow", size, "layer", "narrow")
        saves = (of_key.name, narrow.name)
        yield Operation(
            "reuse", "elementwise", ("k", of_key.name), (values, narrow), saves, weights=gate, selective=_MIX
        )
    else:
        yield product("v_proj", "input", values, width)
    if mixer.rope is not None:
        yield _rotated("rotate_q", "q", queries := Value("q.rotated", queries.width, parts=heads))
        yield _rotated("rotate_k", "k", keys := Value("k.rotated", size))
    if _scales_queries(mixer.rope):
        yield _rotated("scale_queries", queries.name, queries := Value("q.scaled", queries.width, parts=heads))
    mixed = Value("mixed", mixer.query_width, parts=heads)
    reads = (queries.name, keys.name, "v")
    yield Operation("attend", "attention", reads, (mixed,), reads, selective=_MIX, parts=heads)
    yield product("o_proj", "mixed", Value("output", width), mixed.width, parts=heads)


def _delta(mixer: Delta, width: int) -> Iterator[Operation]:
    heads, groups = mixer.heads, mixer.key_heads
    sizes = {"q": mixer.key_width, "k": mixer.key_width, "v": mixer.value_width, "gate": mixer.value_width}
    for name, size in (*sizes.items(), ("b", heads), ("a", heads)):
        yield product(f"{name}_proj", "input", Value(name, size, parts=groups), width, parts=groups)
    mix = partial(Operation, selective="mix_heads", parts=groups)
    beta, decay, step, rate = (
        Value(name, heads, type="float32", parts=groups) for name in ("beta", "g", "a.shifted", "a.softplus")
    )
    yield mix("beta", "elementwise", ("b",), (beta,), ("beta",))
    scalars: Weights = (("A_log", (heads,)), ("dt_bias", (heads,)))
    rates = Value("A_log.exp", 2 * heads, "layer", "float32", groups)  # and the same with its sign changed
    saves = step.name, rate.name, rates.name
    yield mix("decay", "elementwise", ("a",), (step, rate, rates, decay), saves, weights=scalars)
    for name in ("q", "k", "v"):
        conv = f"{name}_conv1d"
        weight: Weights = ((f"{conv}.weight", (sizes[name], 1, mixer.conv_width)),)
        makes = Value(f"{name}.convolved", sizes[name], parts=groups)
        yield mix(conv, "elementwise", (name,), (makes,), (name,), weights=weight, elementwise=conv)
    mixed = Value("mixed", mixer.value_width, parts=groups)
    states = Value("states", heads * mixer.key_dim * mixer.value_dim, "chunk", "float32", groups)
    reads = ("q.convolved", "k.convolved", "v.convolved", "g", "beta")
    yield mix("delta_rule", "scan", reads, (mixed, states), (*reads, "states"))
    normed = Value("mixed.normed", mixer.value_width, parts=groups)
    yield norm("o_norm", "mixed", normed, mixer.value_dim, rows=heads, elementwise=_GATED, selective="mix_heads")
    of_gate = "gate", normed.name
    gated = Value("gated", mixer.value_width, parts=groups)
    yield mix("gated", "elementwise", of_gate, (gated,), of_gate, elementwise=_GATED)
    yield product("o_proj", "gated", Value("output", width), mixer.value_width, parts=groups)
