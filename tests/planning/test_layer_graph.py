"""The values that layers keep, by name, against the bytes of the tensors that autograd saves: equal to the byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from builders.covering import fast
from builders.small_layers import (
    FEEDS,
    MIXERS,
    bytes_outside_layers,
    recomputed,
    saved_bytes,
    sharing_decoder,
    small_decoder,
    with_draws,
)

from danlu.assembly.arithmetic import set_arithmetic
from danlu.assembly.frozen_base import adapters_of, quantize_stack, quantize_weight
from danlu.memory.layer_plan import KINDS, Kind
from danlu.models.config import ModelConfig, is_matrix
from danlu.models.decoder import Decoder
from danlu.models.layer_operations import layer_operations
from danlu.models.layer_spec import Dense, Experts
from danlu.models.operations import ROTATION
from danlu.planning.batch_shape import BatchShape, DocumentRun, RankShare
from danlu.planning.layer_graph import TRAINED, LayerGraph, LayerTraining, LowRankAdapter
from danlu.recipe import sections

SHORT, LONG = [100, 156, 200, 56], [900, 64, 32, 832]
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def predicted(
    config: ModelConfig, lengths: Sequence[int], dtype: torch.dtype, recompute: Kind, training: LayerTraining = TRAINED
) -> int:
    batch = BatchShape.of_lengths(lengths, dtype.itemsize)
    graphs = [LayerGraph(spec, config.hidden_size, batch, training, recompute) for spec in config.layers]
    rotated = any(ROTATION in graph.kept.names for graph in graphs)
    outside = bytes_outside_layers(config, batch.tokens, dtype.itemsize, rotated=rotated)
    return sum(graph.kept_bytes for graph in graphs) + outside


def of_no_hook(config: ModelConfig, tokens: int, recompute: Kind) -> int:
    """Bytes of the places of experts' rows that a recomputed function holds as an argument that is no tensor."""
    if recompute not in ("elementwise", "selective"):
        return 0
    return sum(8 * tokens * layer.feed.top_k for layer in config.layers if isinstance(layer.feed, Experts))


def half(names: Iterable[str]) -> list[tuple[str, Kind]]:
    """Each name with two kinds of recomputation, and each kind with half of the names."""
    return [(name, KINDS[(number + step) % len(KINDS)]) for number, name in enumerate(names) for step in (0, 1)]


@pytest.mark.parametrize(("mixer", "recompute"), fast(itertools.product(MIXERS, KINDS), *half(MIXERS)))
def test_every_mixer_keeps_what_is_predicted(mixer: str, recompute: Kind) -> None:
    number = list(MIXERS).index(mixer) + KINDS.index(recompute)
    dtype, lengths = list(TYPES.values())[number % 2], (SHORT, LONG)[number // 2 % 2]
    model = recomputed(small_decoder(mixer, None, layers=2), recompute)
    assert saved_bytes(model, lengths, dtype) == predicted(model.config, lengths, dtype, recompute)


@pytest.mark.parametrize(("feed", "recompute"), fast(itertools.product(FEEDS, KINDS), *half(FEEDS)))
def test_every_network_keeps_what_is_predicted(feed: str, recompute: Kind) -> None:
    model = recomputed(small_decoder(None, feed, layers=2, scalar="apart" in feed), recompute)
    if "drawn" in feed:
        with_draws(model, SHORT)
    rest = of_no_hook(model.config, sum(SHORT), recompute)
    real = saved_bytes(model, SHORT, torch.float32)
    # Of draws autograd saves some numbers of a token for a moment, and frees them with what they are for.
    moments = (4 * 8 + 4 * 8 + 2) * sum(SHORT) * 2 if "drawn" in feed and recompute != "full" else 0
    assert real - moments == predicted(model.config, SHORT, torch.float32, recompute) - rest


FP8_CASES: list[Any] = [
    (None, None, "none", "tile"),
    ("latent", None, "elementwise", "tile"),
    (None, "experts", "selective", "tensor"),
    *(
        pytest.param(mixer, feed, recompute, fp8, marks=pytest.mark.slow)
        for mixer, feed in (
            *((mixer, None) for mixer in MIXERS),
            *((None, feed) for feed in FEEDS if "drawn" not in feed),
        )
        for recompute in KINDS
        for fp8 in ("tile", "tensor", "mxfp8")
    ),
]


@pytest.mark.parametrize(("mixer", "feed", "recompute", "fp8"), FP8_CASES)
def test_inputs_in_8_bits_are_predicted(mixer: str | None, feed: str | None, recompute: Kind, fp8: Any) -> None:
    """Codes with scales, once of layers that share an input; gate and up in front of a product, which is not kept."""
    model = recomputed(small_decoder(mixer, feed, layers=2), recompute)
    set_arithmetic(model, sections.Fp8Products(recipe=fp8))
    lengths = [100, 56]
    real = saved_bytes(model, lengths, torch.float32) + of_no_hook(model.config, sum(lengths), recompute)

    def expected(recipe: str | None) -> int:
        return predicted(model.config, lengths, torch.float32, recompute, replace(TRAINED, fp8=recipe))

    assert real == expected(fp8)
    if recompute == "none" and fp8 != "mxfp8":
        assert real < expected(None)  # control


@pytest.mark.parametrize(
    ("recompute", "lengths"),
    fast(
        itertools.product(KINDS, [SHORT, LONG]), *zip(KINDS, itertools.cycle([SHORT, SHORT, LONG, LONG]), strict=False)
    ),
)
def test_layers_that_share_keys_keep_them_once(recompute: Kind, lengths: list[int]) -> None:
    """With embeddings of each layer; the control counts keys and values at every layer."""
    dtype = TYPES["bf16" if KINDS.index(recompute) % 2 else "fp32"]
    model = recomputed(sharing_decoder(), recompute)
    real = saved_bytes(model, lengths, dtype)
    assert real == predicted(model.config, lengths, dtype, recompute)
    alone = model.config.with_layers(lambda layer: replace(layer, mixer=replace(layer.attention, sharing=None)))
    assert predicted(alone, lengths, dtype, recompute) != real


PLACES: dict[str, tuple[str | None, dict[str, Any]]] = {
    "gpt_neox": ("no gate", {"norm_kind": "layer-bias", "parallel": True}),
    "cohere2": (None, {"norm_kind": "layer", "parallel": True, "norms": "shared"}),
    "gemma": ("gelu", {"norms": "sandwich"}),
    "olmo": (None, {"norms": "post"}),
}


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("name", PLACES)
def test_norms_of_every_place_and_parallel_halves(name: str, recompute: Kind) -> None:
    feed, changes = PLACES[name]
    model = recomputed(small_decoder(None, feed, layers=2, **changes), recompute)
    real = saved_bytes(model, SHORT, torch.bfloat16)
    assert real == predicted(model.config, SHORT, torch.bfloat16, recompute)
    plain = model.config.with_layers(lambda layer: replace(layer, parallel=False, norms="pre", feed=Dense(400)))
    assert predicted(plain, SHORT, torch.bfloat16, recompute) != real  # control


ATTENTION = ("q_proj", "v_proj")
LINEAR = (*ATTENTION, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS: dict[str, Any] = {
    "attention": sections.Lora(rank=4, targets=list(ATTENTION)),
    "all": sections.Lora(rank=4, targets=list(LINEAR)),
    "down": sections.Lora(rank=4, targets=["down_proj"]),
    "dora": sections.Dora(rank=4, targets=list(LINEAR)),
    "frozen a": sections.LoraFa(rank=4, targets=list(LINEAR)),
}


def adapted(model: Decoder, section: Any, dtype: torch.dtype, *, quantized: bool) -> dict[str, LowRankAdapter]:
    """Adds an adapter to a frozen model, as `load_frozen` leaves it, and returns it by its products."""
    adapters = adapters_of(model)
    adapters.add("a", section)
    adapters.finish_loading()
    adapters.activate("a")
    adapters.train_only("a")
    for site in adapters.sites if quantized else ():
        if site.layer is not None:
            pack = quantize_weight if site.experts is None else quantize_stack
            site.module.store(pack(site.module.weight.data, sections.Int8()))
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and is_matrix(name, parameter.ndim):
            parameter.data = parameter.data.to(dtype)
    is_dora, trains_a = isinstance(section, sections.Dora), not section.freeze_a
    return {name: LowRankAdapter(4, is_dora, trains_a) for name in adapters.added["a"].modules}


def predicted_with(
    config: ModelConfig, batch: BatchShape, adapters: Mapping[str, LowRankAdapter], recompute: Kind, *, quantized: bool
) -> int:
    total, rotated, with_gradient = 0, False, False
    on_product = "per_layer_model_projection" in adapters
    for index, spec in enumerate(config.layers):
        products = [each.name for each in layer_operations(spec, config.hidden_size) if each.is_product]
        own = tuple((name, adapters[full]) for name in products if (full := f"layers.{index}.{name}") in adapters)
        training = LayerTraining(
            False, own, quantized=quantized, input_needs_gradient=with_gradient, adapts_embeddings=on_product
        )
        graph = LayerGraph(spec, config.hidden_size, batch, training, recompute)
        total, rotated = total + graph.kept_bytes, rotated or ROTATION in graph.kept.names
        with_gradient = graph.output in graph.gradients
    outside = partial(bytes_outside_layers, config, batch.tokens, batch.element_bytes, rotated=rotated, ids=False)
    return total + outside(own=on_product)


@pytest.mark.parametrize(("name", "recompute"), fast(itertools.product(ADAPTERS, KINDS), *half(ADAPTERS)))
def test_adapters_keep_what_is_predicted(name: str, recompute: Kind) -> None:
    """The first layer's input has no gradient; products that share an input make one function with their adapters."""
    model = small_decoder("normed heads", None, layers=2)
    dtype = TYPES["bf16" if KINDS.index(recompute) % 2 else "fp32"]
    adapters = adapted(model, ADAPTERS[name], dtype, quantized=False)
    batch = BatchShape.of_lengths(SHORT, dtype.itemsize)
    real = saved_bytes(recomputed(model, recompute), SHORT, dtype)
    assert real == predicted_with(model.config, batch, adapters, recompute, quantized=False)
    if recompute == "none":  # control: as if all weights were trained
        assert real < predicted(model.config, SHORT, dtype, recompute)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("targets", [["all-linear"], list(ATTENTION)], ids=["all linear", "attention"])
def test_adapters_on_layers_that_share_keys(targets: list[str], recompute: Kind) -> None:
    """Of all linear products one makes layers' own embeddings: its input and its factors' product are kept too."""
    model = sharing_decoder()
    adapters = adapted(model, sections.Lora(rank=4, targets=targets), torch.float32, quantized=False)
    batch = BatchShape.of_lengths(SHORT, 4)
    on_product = "per_layer_model_projection" in adapters
    rest = 4 * batch.tokens * (4 + 128 * (recompute == "none")) if on_product else 0
    real = saved_bytes(recomputed(model, recompute), SHORT, torch.float32)
    assert real - rest == predicted_with(model.config, batch, adapters, recompute, quantized=False)
    assert on_product == (targets == ["all-linear"])


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["attention", "down"])
def test_adapters_next_to_frozen_experts(name: str, quantized: bool) -> None:
    model = small_decoder(None, "experts", layers=2)
    adapters = adapted(model, ADAPTERS[name], torch.float32, quantized=quantized)
    batch = BatchShape.of_lengths(SHORT, 4)
    real = saved_bytes(model, SHORT, torch.float32)
    assert real == predicted_with(model.config, batch, adapters, "none", quantized=quantized)
    assert real != predicted_with(model.config, batch, adapters, "none", quantized=not quantized)  # control


def test_branches_of_a_tree_keep_probabilities_of_their_paths() -> None:
    tree = DocumentRun(96), DocumentRun(96, 96), DocumentRun(64, 96)
    pairs = [
        LayerGraph(small_decoder(None, None, 1).config.layers[0], 128, BatchShape((each,), 4))
        for each in ((tree[0],), tree)
    ]
    stem, whole = (graph.kept.elements for graph in pairs)
    assert stem == 8 * 96 * 96 and whole == stem + 8 * (96 * 192 + 64 * 160)


def test_a_rank_keeps_its_share() -> None:
    """Heads and inner width are cut, the residual stream is not; under sequence parallelism it is, and what is gathered
    at the entrances is not kept."""
    spec = small_decoder(None, None, 1).config.layers[0]
    batch = BatchShape.of_lengths([256], 4)

    def graph(degree: int, *, sequence: bool = False) -> LayerGraph:
        return LayerGraph(spec, 128, batch, share=RankShare(degree, sequence))

    whole, half, shared = graph(1), graph(2), graph(2, sequence=True)
    assert half.bytes_of("attention.q.rotated") * 2 == whole.bytes_of("attention.q.rotated")
    assert half.bytes_of("x") == whole.bytes_of("x") == 2 * shared.bytes_of("x")
    assert half.kept.elements * 2 == whole.kept.elements
    assert "attention.normed" in half.kept.names
    assert "attention.input" not in shared.kept.names and "attention.normed" in shared.kept.names
    assert graph(8).bytes_of("attention.k.rotated") == whole.bytes_of("attention.k.rotated") // 4  # of four heads
