"""The tensors of each layer that travel between context ranks, from a rank's part of a model. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from danlu.models.layer_spec import Experts, Mixer
from danlu.models.mixer_spec import Delta, Factorized, Heads, Latent
from danlu.parallel.collective_traffic import CollectiveTraffic, axis_along, ring_bytes
from danlu.parallel.layout import attention_heads
from danlu.planning.context_traffic import (
    ContextLayer,
    TokenTensor,
    Transport,
    context_groups,
    context_traffic,
    document_load_traffic,
)
from danlu.planning.gradient_borders import first_half_with_gradient, gives_inputs
from danlu.planning.step_traffic import MicroBatch, RankModel, takes_input


def context_ranks_traffic(model: RankModel, micro_batches: Sequence[MicroBatch]) -> list[CollectiveTraffic]:
    """The traffic of a rank to other context ranks."""
    layout, section = model.layout, model.recipe.parallel.context
    index = layout.coordinates(model.rank)["context"]
    rows = [batch.cut_rows for batch in micro_batches]
    transport: Transport = "gather" if section.method == "gather" else "ring"
    traffic = list(context_traffic(context_layers(model), rows, layout, index, transport))
    traffic += _maxima(model, len(micro_batches))
    if _balances_documents(model):
        feeds = [model.config.layers[layer].feed for layer in model.chunks.local_layers]
        experts = sum(feed.num_experts for feed in feeds if isinstance(feed, Experts))
        traffic += document_load_traffic(sum(batch.documents for batch in micro_batches) * experts, layout)
    return traffic


def _maxima(model: RankModel, micro_batches: int) -> Iterator[CollectiveTraffic]:
    """Yields the traffic of the maxima of factors with one scale (`shared_scales`)."""
    if model.recipe.fp8 is None or model.recipe.fp8.recipe != "tensor":
        return
    from danlu.planning.shared_scales import context_maxima

    count = context_maxima(model) * micro_batches
    axis, _ = axis_along(model.layout, "context")
    for group in context_groups(model.layout):
        if group.size > 1:
            sent_bytes = ring_bytes("all-reduce", group.size, 4 * count)
            yield CollectiveTraffic(axis, "all-reduce", sent_bytes, count, "scales of whole tensors", group)


def _balances_documents(model: RankModel) -> bool:
    """Whether a loss of balance is computed of each document."""
    router = model.recipe.router
    return router is not None and router.balance in ("bias", "sequence") and bool(router.sequence)


def context_layers(model: RankModel) -> list[ContextLayer]:
    """The tensors that each layer of a rank sends, recomputation included."""
    first, _ = first_half_with_gradient(model.trained, model.chunks)
    places = {entry.layer: place for place, entry in enumerate(model.plan)}

    def makes_gradients(layer: int) -> bool:
        """Whether something is trained in a layer or in front of it, so that it has a backward pass."""
        return 2 * places[layer] + 1 >= first or model.trained.within(f"layers.{layer}")

    last_layers = {entry.segment: entry.layer for entry in model.plan}
    layers = []
    for entry, gives_input in zip(model.plan, gives_inputs(model.plan), strict=True):
        traffic = _layer_traffic(model, entry.layer, input_has_gradient=2 * places[entry.layer] >= first)
        # Layers of a segment but the last run once more for the input of the next, if that has a backward pass.
        again = gives_input and makes_gradients(last_layers[entry.segment])
        if entry.kind == "full":
            layers.append(_repeated(traffic, again + makes_gradients(entry.layer)))
        elif entry.kind == "selective" and traffic.output.has_gradient:
            layers.append(_repeated(traffic, 1, output=_saves_output(model, entry.layer)))
        else:
            layers.append(traffic)
    return layers


def _repeated(traffic: ContextLayer, times: int, *, output: bool = True) -> ContextLayer:
    """Returns the traffic of a layer that is recomputed `times` times.

    output: whether attention's output is recomputed too.
    """
    return replace(traffic, runs=1 + times, output_runs=1 + times * output)


def _saves_output(model: RankModel, layer: int) -> bool:
    """Whether an operation after attention saves its output: a gate, or the product of a trained module on it."""
    shapes = model.config.layers[layer].mixer.parameter_shapes(model.config.hidden_size)
    return "gate_proj.weight" in shapes or takes_input(model, f"layers.{layer}.attention.o_proj")


def _layer_traffic(model: RankModel, layer: int, *, input_has_gradient: bool) -> ContextLayer:
    """Returns a layer's tensors that a forward pass without recomputation sends, and which of them have a gradient.

    input_has_gradient: whether its input has one.
    """
    layout, mixer = model.layout, model.config.layers[layer].mixer
    module = f"layers.{layer}.attention"
    trained = model.trained.of(module) if model.trained.within(module) else []

    def tensor(width: int, *makers: str, element_bytes: int = model.element_bytes) -> TokenTensor:
        """makers: prefixes of the names of the parameters that make the tensor."""
        has_gradient = input_has_gradient or any(name.startswith(makers) for name in trained)
        return TokenTensor(width, element_bytes, has_gradient)

    if isinstance(mixer, Delta):
        products = ("q_", "k_", "v_", "gate_", "b_", "a_")
        keys_width, values_width = mixer.key_width // layout.tensor, mixer.value_width // layout.tensor
        # Of each head how fast its state decays and how much of a correction it takes, in float32.
        rates = tensor(2 * mixer.heads // layout.tensor, *products, "A_log", "dt_bias", element_bytes=4)
        q, v = tensor(keys_width, *products), tensor(values_width, *products)
        return ContextLayer((q, q, v, rates), tensor(values_width, *products, "A_log", "dt_bias"), keys=())
    makers = _makers(mixer)
    value_width = mixer.v_head_dim if isinstance(mixer, Latent) else mixer.head_dim
    heads, kv_heads = attention_heads(mixer, layout.tensor)
    dealt = kv_heads if kv_heads % layout.ulysses == 0 else layout.ulysses
    q, k, v = (
        tensor(width, *makers[name])
        for name, width in (("q", heads * mixer.head_dim), ("k", dealt * mixer.head_dim), ("v", dealt * value_width))
    )
    keys = tuple(x._replace(width=x.width // layout.ulysses) for x in (k, v))
    # Where keys are recomputed from what travels: not of some of the heads, and not with adapters, whose dropout
    # depends on where a token is.
    if "stored" in makers and layout.ulysses == 1 and model.recipe.adapter is None:
        keys = (tensor(mixer.cached_width, *makers["stored"]),)
    output = tensor(heads * value_width, "sinks", *itertools.chain.from_iterable(makers.values()))
    return ContextLayer((q, k, v), output, keys)


def _makers(mixer: Mixer) -> dict[str, tuple[str, ...]]:
    """The prefixes of the names of parameters that make queries, keys, values, and the tensor that is stored in place
    of both.

    Products of one input that an adapter makes together, and queries and keys that are rotated together, all have a
    gradient where one of them needs it.
    """
    assert isinstance(mixer, Heads | Latent | Factorized), "the mixers with keys"
    if isinstance(mixer, Latent):
        rotated = ("q_", "kv_a_")
        return {"q": rotated, "k": (*rotated, "kv_b_"), "v": (*rotated, "kv_b_"), "stored": rotated}
    if isinstance(mixer, Heads):
        return dict.fromkeys("qkv", ("q_", "k_", "v_", "gate_"))
    shared = ("q_a_proj", "k_proj", "v_proj")
    if mixer.key_reuse:
        return {"q": (*shared, "q_"), "k": shared, "v": (*shared, "key_reuse"), "stored": shared}
    return {"q": (*shared, "q_"), "k": shared if mixer.rope is None else (*shared, "q_"), "v": shared}
