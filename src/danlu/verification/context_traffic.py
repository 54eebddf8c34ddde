"""Traffic between the context ranks of a decoder in a step of a recipe, by `planning.context_traffic`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from danlu.memory.layer_plan import Plan
from danlu.models.decoder import Layer
from danlu.models.layer_spec import Mixer
from danlu.models.mixer_spec import Delta, Factorized, Heads, Latent
from danlu.parallel.collective_traffic import CollectiveTraffic
from danlu.parallel.layout import Layout, attention_heads
from danlu.planning.context_traffic import ContextLayer, TokenTensor, context_traffic, document_load_traffic
from danlu.stages.learner import DecoderLearner
from danlu.stages.placed import PlacedDecoder
from danlu.verification.collective_traffic import first_half_with_gradient, gives_inputs, takes_input
from danlu.verification.proxy import MicroBatches, ProxyTraining


def context_ranks_traffic(training: ProxyTraining, micro_batches: MicroBatches) -> list[CollectiveTraffic]:
    """The traffic of this process to other context ranks; nothing where there are none."""
    layout, learner, placed = training.ranks.layout, training.learner, training.placed
    if layout.context == 1:
        return []
    assert isinstance(learner, DecoderLearner) and isinstance(placed, PlacedDecoder), "those of a decoder"
    batches = [learner.collate([item for _, item in micro_batch]) for micro_batch in micro_batches]
    rows = [[sum(run.tokens for run in share.chunks) for share in batch.shares] for batch in batches]
    groups = learner.context
    assert groups is not None, "a layout of context ranks has their groups"
    traffic = list(
        context_traffic(_layers(learner, placed.placed.plan, layout), rows, layout, groups.index, groups.transport)
    )
    if learner.balancer is not None and learner.balancer.balancing.sequence:
        runs = ([run.document for share in batch.shares for run in share.runs] for batch in batches)
        documents = sum(max(numbers, default=-1) + 2 for numbers in runs)  # and what fills each share up
        experts = sum(layer.router.num_experts for layer in learner.balancer.layers.values())
        traffic += document_load_traffic(documents * experts, layout)
    return traffic


def _layers(learner: DecoderLearner, plan: Plan, layout: Layout) -> list[ContextLayer]:
    model = learner.model
    first, _ = first_half_with_gradient(model)
    places = {entry.layer: place for place, entry in enumerate(plan)}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def makes_gradients(layer: int) -> bool:
        """Whether something is trained in a layer or in front of it, so that it has a backward pass."""
        return 2 * places[layer] + 1 >= first or any(name.startswith(f"layers.{layer}.") for name in trained)

    last_layers = {entry.segment: entry.layer for entry in plan}
    layers = []
    for entry, gives_input in zip(plan, gives_inputs(plan), strict=True):
        layer = model.layers[str(entry.layer)]
        assert isinstance(layer, Layer)
        prefix = f"layers.{entry.layer}.attention."
        own = [name.removeprefix(prefix) for name in trained if name.startswith(prefix)]
        mixer = model.config.layers[entry.layer].mixer
        traffic = _layer_traffic(learner, layout, mixer, own, input_has_gradient=2 * places[entry.layer] >= first)
        # Layers of a segment but the last run once more for the input of the next, if that has a backward pass.
        again = gives_input and makes_gradients(last_layers[entry.segment])
        if entry.kind == "full":
            layers.append(_repeated(traffic, again + makes_gradients(entry.layer)))
        elif entry.kind == "selective" and traffic.output.has_gradient:
            layers.append(_repeated(traffic, 1, output=_saves_output(layer)))
        else:
            layers.append(traffic)
    return layers


def _repeated(traffic: ContextLayer, times: int, *, output: bool = True) -> ContextLayer:
    """Returns the traffic of a layer that is recomputed `times` times.

    output: whether attention's output is recomputed too.
    """
    return replace(traffic, runs=1 + times, output_runs=1 + times * output)


def _saves_output(layer: Layer) -> bool:
    """Whether an operation after attention saves its output: a gate, or the product of a trained module on it."""
    attention: Any = layer.attention
    gated = getattr(attention, "gate_proj", None) is not None
    return gated or any(takes_input(module, attention.o_proj) for module in attention.o_proj.modules())


def _layer_traffic(
    learner: DecoderLearner, layout: Layout, mixer: Mixer, trained: Sequence[str], *, input_has_gradient: bool
) -> ContextLayer:
    """Returns a layer's tensors that a forward pass without recomputation sends, and which of them have a gradient.

    trained: names of its attention's trained parameters. input_has_gradient: whether its input has one.
    """

    def tensor(width: int, *makers: str, element_bytes: int = learner.dtype.itemsize) -> TokenTensor:
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
    if "stored" in makers and layout.ulysses == 1 and learner.adapters is None:
        keys = (tensor(mixer.cached_width, *makers["stored"]),)
    output = tensor(heads * value_width, "sinks", *itertools.chain.from_iterable(makers.values()))
    return ContextLayer((q, k, v), output, keys)


def _makers(mixer: Heads | Latent | Factorized) -> dict[str, tuple[str, ...]]:
    """The prefixes of the names of parameters that make queries, keys, values, and the tensor that is stored in place
    of both.

    Products of one input that an adapter makes together, and queries and keys that are rotated together, all have a
    gradient where one of them needs it.
    """
    if isinstance(mixer, Latent):
        rotated = ("q_", "kv_a_")
        return {"q": rotated, "k": (*rotated, "kv_b_"), "v": (*rotated, "kv_b_"), "stored": rotated}
    if isinstance(mixer, Heads):
        return dict.fromkeys("qkv", ("q_", "k_", "v_", "gate_"))
    shared = ("q_a_proj", "k_proj", "v_proj")
    if mixer.key_reuse:
        return {"q": (*shared, "q_"), "k": shared, "v": (*shared, "key_reuse"), "stored": shared}
    return {"q": (*shared, "q_"), "k": shared if mixer.rope is None else (*shared, "q_"), "v": shared}
