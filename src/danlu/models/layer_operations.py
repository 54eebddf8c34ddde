"""The operations of a whole layer: norms, its mixer, its feed-forward network, the residual stream. Imports no torch.

D model width · E experts · F inner width, of each expert · k experts of a token
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from danlu.models.layer_spec import Dense, Experts, LayerSpec
from danlu.models.mixer_operations import mixer_operations, norm, product
from danlu.models.operations import EMBEDDINGS, OF_OTHERS, Operation, Value, Weights

_ACTIVATION, _ROWS, ENTER = "gated_activation", "rows_by_expert", "enter"


def layer_operations(spec: LayerSpec, width: int) -> tuple[Operation, ...]:
    """The operations of a layer from its input `x` to its output, the last value that is made. width: D."""
    return tuple(_layer(spec, width))


def _layer(spec: LayerSpec, width: int) -> Iterator[Operation]:
    stream = "x"
    statistics = 1 if spec.norm_kind == "rms" else 2
    has_bias = spec.norm_kind == "layer-bias"
    normed = "x"
    for half, part in (("attention", mixer_operations(spec.mixer, width)), ("mlp", _feed(spec.feed, width))):
        source = "x" if spec.parallel else stream
        if half in spec.normed_before:
            name = f"{half}_norm"
            before = Value(f"{half}.normed", width, is_local=True)
            normed = before.name
            yield norm(
                name, source, before, width, statistics=statistics, bias=has_bias, elementwise=name, selective=name
            )
        elif spec.norms != "shared":
            normed = source
        entered = Value(f"{half}.input", width)
        yield Operation(f"{half}.{ENTER}", "gather", (normed,), (entered,))
        yield from (_within(half, operation) for operation in part)
        branch = Value(f"{half}.left", width, is_local=True)
        yield Operation(f"{half}.leave", "gather", (f"{half}.output",), (branch,))
        if spec.normed_behind:
            name = f"post_{half}_norm"
            behind = Value(f"{half}.post", width, is_local=True)
            yield norm(name, branch.name, behind, width, statistics=statistics, bias=has_bias)
            branch = behind
        joined = Value(f"{half}.joined", width, is_local=True)
        yield Operation(f"{half}.join", "add", (stream, branch.name), (joined,))
        stream = joined.name
    if spec.per_layer_width:
        yield from _own_embeddings(spec, stream, width)
        stream = "per_layer.joined"
    if spec.scalar:
        scaled, narrow = Value("scaled", width, is_local=True), Value("layer_scalar.narrow", 1, "layer", "narrow")
        yield Operation("scale", "elementwise", (stream,), (scaled, narrow), (narrow.name,))


def _own_embeddings(spec: LayerSpec, stream: str, width: int) -> Iterator[Operation]:
    """The network of the layer's own embeddings, and the residual stream with its normed output."""
    of_tokens = partial(Value, is_local=True)
    gate, gated = (of_tokens(f"per_layer.{name}", spec.per_layer_width) for name in ("gate", "gated"))
    down, normed = (of_tokens(f"per_layer.{name}", width) for name in ("down", "normed"))
    yield product("per_layer.gate_proj", stream, gate, width)
    region = f"per_layer.{_ACTIVATION}"
    reads: tuple[str, ...] = (gate.name, EMBEDDINGS)
    values: tuple[Value, ...] = (gated,)
    factors: tuple[tuple[str, str], ...] = ()
    if spec.feed.activation in ("gelu", "gelu_tanh"):  # the product with embeddings saves what it multiplies
        activated = of_tokens("per_layer.activated", spec.per_layer_width)
        values, factors = (activated, gated), ((activated.name, EMBEDDINGS),)
    yield Operation(region, "elementwise", reads, values, reads, factors, elementwise=region, selective=region)
    yield product("per_layer.down_proj", gated.name, down, spec.per_layer_width)
    yield norm("post_per_layer_norm", down.name, normed, width, statistics=1 if spec.norm_kind == "rms" else 2)
    yield Operation("per_layer.join", "add", (stream, normed.name), (of_tokens("per_layer.joined", width),))


def _within(half: str, operation: Operation) -> Operation:
    """An operation of a sublayer with the names that it has in the layer."""

    def named(name: str) -> str:
        return name if name in OF_OTHERS else f"{half}.{name}"

    return replace(
        operation,
        name=named(operation.name),
        reads=tuple(map(named, operation.reads)),
        makes=tuple(replace(value, name=named(value.name)) for value in operation.makes),
        saves=tuple(map(named, operation.saves)),
        factors=tuple((named(value), named(other)) for value, other in operation.factors),
        weights=tuple((named(name), shape) for name, shape in operation.weights),
        elementwise=None if operation.elementwise is None else named(operation.elementwise),
        selective=None if operation.selective is None else named(operation.selective),
    )


def _feed(feed: Dense | Experts, width: int) -> Iterator[Operation]:
    if isinstance(feed, Dense):
        return _dense(feed, width)
    return _experts(feed, width)


def _dense(
    feed: Dense, width: int, prefix: str = "", output: str = "output", source: str = "input"
) -> Iterator[Operation]:
    inner, region = feed.intermediate_size, f"{prefix}{_ACTIVATION}"
    up, gate = (Value(f"{prefix}{name}", inner, parts=inner) for name in ("up", "gate"))
    for value in (gate, up) if feed.gated else (up,):
        yield product(f"{value.name}_proj", source, value, width, bias=feed.bias, parts=inner)
    yield _activation(feed, prefix, region, Value(f"{prefix}activated", inner, parts=inner))
    down = Value(output, width)
    yield product(f"{prefix}down_proj", f"{prefix}activated", down, inner, bias=feed.bias, parts=inner)


def _activation(feed: Dense | Experts, prefix: str, region: str, makes: Value) -> Operation:
    """The activation of gate and up, each of the shape of its output."""
    reads: tuple[str, ...] = (f"{prefix}gate", f"{prefix}up")
    values: tuple[Value, ...] = (makes,)
    saves = reads
    if isinstance(feed, Dense) and not feed.gated:
        reads = saves = reads[1:]
    elif feed.activation in ("gelu", "gelu_tanh"):  # the product with up saves what it multiplies
        of_gate = replace(makes, name=f"{prefix}gate.activated")
        values, saves = (of_gate, makes), (*reads, of_gate.name)
    return Operation(
        region, "elementwise", reads, values, saves, elementwise=region, selective=region, parts=makes.parts
    )


def _experts(feed: Experts, width: int) -> Iterator[Operation]:
    chosen, inner = feed.top_k, feed.intermediate_size
    source = "input"
    if feed.router.input_jitter:
        drawn, jittered = Value("input.factors", width), Value("input.jittered", width)
        yield Operation("jitter", "elementwise", ("input",), (drawn, jittered), (drawn.name,))
        source = jittered.name
    yield from _router(feed, source, width)
    places, order = Value("places", chosen, type="int64"), Value("order", chosen, type="int64")
    counts = Value("counts", feed.num_experts, "layer", "int64")
    yield Operation("order", "gather", ("routes",), (places, order, counts))
    if feed.branch_norms:
        normed = Value("input.normed", width)
        yield norm("input_norm", source, normed, width, elementwise="input_norm", selective="input_norm")
        source = normed.name
    rows = Value("rows", width, "row")
    yield Operation(
        _ROWS, "gather", (source, "places", "order"), (rows,), ("places",), elementwise=_ROWS, selective=_ROWS
    )
    up, gate = (Value(f"experts.{name}", inner, "row", parts=inner) for name in ("up", "gate"))
    for value in (gate, up):
        yield _grouped(feed, value, "rows", inputs=width)
    activated = Value("experts.activated", inner, "row", parts=inner)
    yield _activation(feed, "experts.", f"experts.{_ACTIVATION}", activated)
    said = Value("experts.down", width, "row")
    yield _grouped(feed, said, activated.name, inputs=inner)
    total = Value("output" if feed.shared is None else "routed", width)
    reads = (said.name, "weights", "places", "order")
    yield Operation("weighted_sum", "gather", reads, (total,), (said.name, "weights", "order"))
    if feed.shared is not None:
        yield from _with_shared(feed, feed.shared, width)


def _router(feed: Experts, source: str, width: int) -> Iterator[Operation]:
    """The choice of a token's experts, `routes`, and the weights of their outputs, `weights`."""
    count, chosen, router = feed.num_experts, feed.top_k, feed.router
    of_chosen = partial(Value, width=chosen, type="float32")
    if router.input_norm:
        yield norm("router.scale", source, normed := Value("router.input", width), width)
        source = normed.name
    logits, routes = Value("logits", count, type="float32"), Value("routes", chosen, type="int64")
    weight: Weights = (("router.weight", (count, width)),)
    yield Operation("router", "product", (source,), (logits,), (source,), weights=weight, in_float32=True)
    bias: Weights = (("router.bias", (count,)),) if router.bias else ()
    taken = of_chosen("weights.taken")
    if router.score == "sparse-mixer":  # for each of two choices a softmax over the logits that are near the largest
        shares, far = Value("shares", 2 * count, type="float32"), Value("far", 2 * count, type="bool")
        saves = shares.name, far.name, routes.name
        yield Operation("router.mix", "elementwise", ("logits",), (shares, far, routes, taken), saves, weights=bias)
    else:
        scores = Value("scores", count, type="float32")
        yield Operation("router.scores", "elementwise", ("logits",), (scores,), ("scores",), weights=bias)
        yield Operation("router.choose", "gather", ("scores",), (routes, taken), ("routes",))
    if router.normalise:
        total, normalised = Value("weights.total", 1, type="float32"), of_chosen("weights.normalised")
        reads = taken.name, total.name
        yield Operation("router.normalise", "elementwise", (taken.name,), (total, normalised), reads)
        taken = normalised
    if router.expert_scales:
        scales, scaled = of_chosen("weights.scales"), of_chosen("weights.scaled")
        saves = taken.name, scales.name, "routes"
        numbers: Weights = (("router.expert_scales", (count,)),)
        yield Operation("router.expert_scales", "elementwise", (taken.name,), (scales, scaled), saves, weights=numbers)
        taken = scaled
    yield Operation("router.weights", "elementwise", (taken.name,), (of_chosen("weights"),))


def _with_shared(feed: Experts, shared: Dense, width: int) -> Iterator[Operation]:
    """The shared network, and the sum of its output and that of the experts."""
    source, routed, said = "input", "routed", "shared.output"
    if feed.branch_norms:
        name, normed = "shared_input_norm", Value("shared.input", width)
        yield norm("output_norm", routed, Value("routed.normed", width), width)
        yield norm(name, source, normed, width, elementwise=name, selective=name)
        source, routed = normed.name, "routed.normed"
    yield from _dense(shared, width, "shared.", said, source)
    if feed.shared_gate:
        yield product("shared_gate", "input", Value("shared.gate.logit", 1), width)
        sigmoid, scaled = Value("shared.gate.sigmoid", 1), Value("shared.scaled", width)
        reads = ("shared.gate.logit", said)
        factors = ((said, "shared.gate.logit"),)
        yield Operation("shared.scale", "elementwise", reads, (sigmoid, scaled), (sigmoid.name,), factors)
        said = scaled.name
    if feed.branch_norms:
        yield norm("shared_output_norm", said, normed := Value("shared.normed", width), width)
        said = normed.name
    yield Operation("add_shared", "add", (routed, said), (Value("output", width),))


def _grouped(feed: Experts, makes: Value, reads: str, *, inputs: int) -> Operation:
    """The linear layers of all experts, their weights in one tensor [E, O, I]."""
    name, count = f"{makes.name}_proj", feed.num_experts
    weights: Weights = ((f"{name}.weight", (count, makes.width, inputs)),)
    values: tuple[Value, ...] = (makes,)
    saves: tuple[str, ...] = (reads, "counts")
    if feed.bias:  # each row's own is looked up by the number of its expert
        weights += ((f"{name}.bias", (count, makes.width)),)
        numbers = Value(f"{name}.numbers", feed.top_k, type="int64")
        values, saves = (makes, numbers), (*saves, numbers.name)
    parts = feed.intermediate_size
    return Operation(name, "grouped", (reads, "counts"), values, saves, weights=weights, parts=parts)
