"""The seconds of layers and steps: FLOPs of their primitives against the closed form, and the passes that run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType

import pytest
from builders.small_config import small_config
from builders.small_layers import FEEDS, MIXERS

from danlu.models.config import ModelConfig
from danlu.planning.batch_shape import BatchShape, ContextCut, DocumentRun, RankShare
from danlu.planning.cards import Card, find_card
from danlu.planning.chunk_costs import LayerTimes
from danlu.planning.flops import DecoderFlops
from danlu.planning.layer_graph import LayerGraph, LayerTraining, LowRankAdapter
from danlu.planning.layer_seconds import layer_seconds
from danlu.planning.layer_work import layer_work
from danlu.planning.machine_profile import BYTES_BEFORE, Machine, MachineProfile
from danlu.planning.measured_table import Table
from danlu.planning.primitives import Attention, Grouped, Moved, OperationWork, PassSeconds, Primitive, Product, sum_of
from danlu.planning.speeds import CardSpeeds, Efficiency, ProfileSpeeds
from danlu.planning.step_work import clip_work, embedding_work, loss_work, norm_work, update_work
from danlu.recipe import sections

WIDTH, LENGTHS = 128, (64, 128, 192)
CARD = Card("card", 1 << 30, 1e11, {"fp32": 1.25e12, "bf16": 5e12})  # of which products reach 1 and 4 TFLOP/s
SPEEDS = CardSpeeds(
    CARD, Efficiency(product=0.5, narrow=0, attention=0.25, memory=0.5, call_s=1e-6, passes=MappingProxyType({}))
)


def config_of(mixer: str = "grouped", feed: str | None = None) -> ModelConfig:
    config = small_config(hidden_size=WIDTH, intermediate_size=384, layers=1)
    return config.with_layers(
        lambda layer: replace(layer, mixer=MIXERS[mixer], feed=layer.feed if feed is None else FEEDS[feed])
    )


def graph_of(
    mixer: str = "grouped", feed: str | None = None, element_bytes: int = 4, lengths: Iterable[int] = LENGTHS
) -> LayerGraph:
    return LayerGraph(config_of(mixer, feed).layers[0], WIDTH, BatchShape.of_lengths(lengths, element_bytes))


def flops(primitives: Iterable[Primitive], *, of_model: bool = True) -> float:
    with_flops = (each for each in primitives if isinstance(each, Product | Grouped | Attention))
    return sum(each.flops for each in with_flops if each.is_model is of_model)


def passes(work: Iterable[OperationWork], *names: str) -> list[Primitive]:
    return [primitive for each in work for name in names for primitive in getattr(each, name)]


@pytest.mark.parametrize("mixer", MIXERS)
def test_products_of_mixers_are_those_that_mfu_counts(mixer: str) -> None:
    counter, work = DecoderFlops(config_of(mixer)), layer_work(graph_of(mixer))
    assert flops(passes(work, "forward")) == counter.forward(LENGTHS, 0)
    assert flops(passes(work, "forward", "backward_input", "backward_weight")) == counter.training(LENGTHS, 0)
    assert flops(passes(work, "forward")) != counter.forward((sum(LENGTHS),), 0) or mixer == "delta rule"  # control


@pytest.mark.parametrize("feed", FEEDS)
def test_products_of_feed_forward_networks_are_those_that_mfu_counts(feed: str) -> None:
    counter, work = DecoderFlops(config_of(feed=feed)), layer_work(graph_of(feed=feed, element_bytes=2))
    assert flops(passes(work, "forward")) == counter.forward(LENGTHS, 0)
    assert flops(passes(work, "forward", "backward_input", "backward_weight")) == counter.training(LENGTHS, 0)
    shared = layer_work(graph_of(feed=feed, element_bytes=2), expert_ranks=2)
    assert flops(passes(shared, "forward")) == flops(passes(work, "forward"))


def test_branches_see_the_tokens_before_them() -> None:
    graph = graph_of()
    batch = replace(graph.batch, documents=((DocumentRun(100), DocumentRun(30, 100), DocumentRun(20, 100)),))
    (attend,) = (each for each in layer_work(replace(graph, batch=batch)) if each.kind == "attention")
    pairs = 100 * 101 // 2 + 30 * 100 + 30 * 31 // 2 + 20 * 100 + 20 * 21 // 2
    assert flops(attend.forward) == pairs * 8 * 4 * 16


def test_context_ranks_share_the_pairs_of_whole_documents() -> None:
    graph = graph_of()
    lengths = [length // 4 for length in LENGTHS]
    batch = replace(BatchShape.of_lengths(lengths, 4), context=ContextCut(ring=2, heads=2))
    work = layer_work(replace(graph, batch=batch))
    assert 4 * flops(passes(work, "forward")) == flops(passes(layer_work(graph), "forward"))
    alone = layer_work(replace(graph, batch=replace(batch, context=None)))
    assert 4 * flops(passes(alone, "forward")) < flops(passes(layer_work(graph), "forward"))  # control


def test_tensor_ranks_share_products() -> None:
    graph = graph_of()
    halves = layer_work(replace(graph, share=RankShare(2)))
    for name in ("forward", "backward_input", "backward_weight"):
        assert 2 * flops(passes(halves, name)) == flops(passes(layer_work(graph), name)) > 0
    for work, whole in zip(halves, layer_work(graph), strict=True):
        for own, of_all in zip(work.forward, whole.forward, strict=True):
            if isinstance(own, Product) and isinstance(of_all, Product):
                assert own.rows == of_all.rows, "tensor ranks have all tokens"


def test_a_frozen_layer_has_the_gradients_of_its_inputs_alone() -> None:
    adapter = LowRankAdapter(8)
    training = LayerTraining(weights=False, adapters=(("attention.q_proj", adapter), ("attention.v_proj", adapter)))
    graph = replace(graph_of(element_bytes=2), training=training)
    work, counter = layer_work(graph), DecoderFlops(config_of())
    both = flops(passes(work, "forward", "backward_input", "backward_weight"))
    attend = flops(passes((each for each in work if each.kind == "attention"), "forward"))
    assert both == counter.training(LENGTHS, 0, frozen=True) + attend  # which MFU leaves out: it has two gradients
    tokens, queries, values = sum(LENGTHS), 128, 64
    of_factors = [2 * tokens * 8 * (WIDTH + out) for out in (queries, values)]  # A x and B of it
    assert flops(passes(work, "forward"), of_model=False) == sum(of_factors)
    assert flops(passes(work, "backward_input"), of_model=False) == sum(of_factors)
    assert flops(passes(work, "backward_weight"), of_model=False) == sum(of_factors)
    first = replace(graph, training=replace(training, input_needs_gradient=False))
    assert flops(passes(layer_work(first), "backward_input")) < flops(passes(work, "backward_input"))
    quantized = layer_seconds(replace(graph, training=replace(training, quantized=True)), SPEEDS)
    magnitudes = replace(training, adapters=(("attention.q_proj", replace(adapter, has_magnitude=True)),))
    plain = layer_seconds(graph, SPEEDS)
    assert quantized.forward > plain.forward and quantized.backward_input > plain.backward_input
    one = layer_seconds(replace(graph, training=replace(training, adapters=training.adapters[:1])), SPEEDS)
    assert layer_seconds(replace(graph, training=magnitudes), SPEEDS).forward > one.forward


def test_an_adapter_makes_its_wide_input_again_and_draws_the_mask_of_its_dropout() -> None:
    """In three passes: forward, for the gradient of A, and for that of x."""

    def moved(product: str, *, drops_out: bool = False) -> tuple[float, ...]:
        training = LayerTraining(False, ((product, LowRankAdapter(8, drops_out=drops_out)),))
        (work,) = (each for each in layer_work(replace(graph_of(), training=training)) if each.name == product)
        passes = (work.forward, work.backward_input, work.backward_weight)
        return tuple(sum(each.bytes * each.passes for each in own if isinstance(each, Moved)) for own in passes)

    graph = graph_of()
    for product, value in (("attention.q_proj", "attention.normed"), ("mlp.down_proj", "mlp.activated")):
        with_mask, without = moved(product, drops_out=True), moved(product)
        more = [own - plain for own, plain in zip(with_mask, without, strict=True)]
        assert more == [pytest.approx(2 * (13 + 2) * graph.bytes_of(value))] * 3
    (activation,) = (each for each in layer_work(graph) if each.name == "mlp.gated_activation")
    again = moved("mlp.down_proj")[2] - sum(each.bytes for each in activation.forward if isinstance(each, Moved))
    assert 0 <= again < moved("mlp.down_proj")[2] / 2


def test_recomputed_functions_run_again() -> None:
    graph = graph_of()
    seconds = {kind: layer_seconds(replace(graph, recompute=kind), SPEEDS) for kind in ("none", "full")}
    assert seconds["none"].recompute == 0
    assert seconds["full"].recompute == pytest.approx(seconds["none"].forward)
    assert seconds["full"].backward_input == pytest.approx(seconds["none"].backward_input)
    again = {each.name for each in layer_work(replace(graph, recompute="selective")) if each.recomputed}
    assert again == {
        "attention_norm", "mlp_norm", "attention.rotate_q", "attention.rotate_k", "attention.attend",
        "mlp.gated_activation",
    }  # fmt: skip
    work = layer_work(replace(graph, recompute="elementwise"))
    again = {each.name for each in work if each.recomputed}
    assert again == {"attention_norm", "mlp_norm", "mlp.gated_activation"}
    attend = next(each for each in work if each.kind == "attention")
    assert flops(attend.backward_input, of_model=False) == flops(attend.forward)  # the probabilities of short documents
    long = replace(graph, recompute="elementwise", batch=BatchShape.of_lengths((1000,), 4))
    attend = next(each for each in layer_work(long) if each.kind == "attention")
    assert flops(attend.backward_input, of_model=False) == 0


def test_sums_of_gradients_are_those_of_values_with_several_readers() -> None:
    work = {each.name: each for each in layer_work(graph_of())}
    tensor = sum(LENGTHS) * WIDTH * 4
    of_input, of_middle = (
        [each for each in work[name].backward_input if isinstance(each, Moved) and each.kind == "add"]
        for name in ("attention_norm", "attention.join")
    )
    assert of_input == [Moved(3 * tensor, "add", "fp32", 1), Moved(3 * tensor, "add", "fp32", 2)]  # of x; of q, k, v
    assert of_middle == [Moved(3 * tensor, "add", "fp32", 1)]
    elements = 128 * WIDTH
    assert work["attention.q_proj"].accumulation == (Moved(12 * elements, "add"),)


def test_the_head_is_multiplied_four_times_or_twice() -> None:
    targets, vocabulary = 100, 1000
    one = 2 * targets * vocabulary * WIDTH
    trained = loss_work(targets, WIDTH, vocabulary, 2)
    assert flops(trained.forward) == 3 * one and flops(trained.forward, of_model=False) == one
    frozen = loss_work(targets, WIDTH, vocabulary, 2, frozen=True)
    assert flops(frozen.forward) == 2 * one and flops(frozen.forward, of_model=False) == 0
    assert flops(loss_work(targets, WIDTH, vocabulary, 2, gradients=False).forward) == one
    assert trained.accumulation and not frozen.accumulation


def test_an_update_costs_as_its_state() -> None:
    shapes = {"model.layers.0.mlp.up_proj.weight": (512, 128), "model.norm.weight": (128,)}
    seconds = {
        section.kind: PassSeconds.of([update_work(section, shapes)], SPEEDS).forward
        for section in (
            sections.AdamW(), sections.AdamW8bit(), sections.SGD(), sections.Lion(), sections.Muon(),
            sections.GaLore(rank=16), sections.Adafactor(),
        )
    }  # fmt: skip
    assert seconds["adamw"] == pytest.approx(SPEEDS.update(512 * 128) + SPEEDS.update(128))
    assert seconds["adamw8bit"] > seconds["adamw"] < seconds["muon"]
    muon = update_work(sections.Muon(newton_schulz_steps=3), shapes).forward
    assert flops(muon, of_model=False) == 3 * 2 * (128 * 128 * 512 * 2 + 128**3)
    half = update_work(sections.Muon(), {"model.norm.weight": (128,)}).forward
    assert flops(half, of_model=False) == 0  # AdamW's


def test_ends_and_sums() -> None:
    tokens, rows = sum(LENGTHS), 5000
    parts = [
        PassSeconds.of([work], SPEEDS)
        for work in (
            embedding_work(tokens, WIDTH, rows, 2),
            norm_work(tokens, WIDTH, 2),
            clip_work(rows * WIDTH),
        )
    ]
    total = sum_of(parts)
    assert total.total == pytest.approx(sum(part.total for part in parts))
    assert total.by_kind.keys() == {"embedding", "norm", "clip"}
    assert sum(total.by_kind.values()) == pytest.approx(total.total)
    sparse = PassSeconds.of([embedding_work(tokens, WIDTH, rows, 2, sparse=True)], SPEEDS)
    assert sparse.backward < parts[0].backward and sparse.accumulation == 0 < parts[0].accumulation
    assert PassSeconds.of([embedding_work(tokens, WIDTH, rows, 2, trained=False)], SPEEDS).backward == 0


def test_a_roofline_takes_the_longer_of_arithmetic_and_traffic() -> None:
    assert SPEEDS.product(1000, 1000, 1000, "fp32") == pytest.approx(2e9 / 0.5e12)
    assert SPEEDS.product(1, 1000, 1000, "fp32") == pytest.approx((1000 + 1e6 + 1000) * 4 / 0.5e11)
    assert SPEEDS.product(1, 1, 1, "fp32") == 1e-6
    assert SPEEDS.moved(1e9) == pytest.approx(1e9 / 0.5e11)
    causal = 4 * 8 * 64 * 4096 * 4097 / 2
    assert SPEEDS.attention(4096, 8, 64, "bf16") == pytest.approx(causal / 1e12)
    assert SPEEDS.attention(4096, 8, 64, "bf16", backward=True) == pytest.approx(2.5 * causal / 1e12)
    a100 = find_card("A100-80G")
    assert isinstance(a100, Card)
    assert CardSpeeds(a100, SPEEDS.efficiency).product(8192, 8192, 8192, "bf16") == pytest.approx(
        2 * 8192**3 / (0.5 * 271.2e12)
    )
    narrow = CardSpeeds(CARD, replace(SPEEDS.efficiency, narrow=500.0))
    assert narrow.product(1000, 1000, 500, "fp32") == pytest.approx(2 * SPEEDS.product(1000, 1000, 500, "fp32"))


def test_products_of_a_backward_pass_say_which_gradient_they_make() -> None:
    adapters = (("attention.o_proj", LowRankAdapter(4)),)
    for training in (LayerTraining(), LayerTraining(weights=False, adapters=adapters)):
        for work in layer_work(replace(graph_of(), training=training)):
            for primitives, result in (
                (work.forward, "output"),
                (work.backward_input, "input_gradient"),
                (work.backward_weight, "weight_gradient"),
            ):
                assert {each.result for each in primitives if isinstance(each, Product)} <= {result}, work.name
    q_proj = next(each for each in layer_work(graph_of()) if each.name == "attention.q_proj")
    (output,), (to_input,), (to_weight,) = (
        [each for each in primitives if isinstance(each, Product)]
        for primitives in (q_proj.forward, q_proj.backward_input, q_proj.backward_weight)
    )
    tokens, outputs, inputs = output[:3]
    assert to_input[:3] == (tokens, inputs, outputs) and to_weight[:3] == (outputs, inputs, tokens)


def test_a_profile_answers_from_its_tables() -> None:
    sizes = ((1, 1024), (64, 512), (64, 512))
    product = Table(sizes, tuple(1e-6 * (index + 1) for index in range(8)))
    tables = {
        "product fp32": product,
        "copy fp32": Table(((1, 1 << 20),), (1e-6, 1e-4)),
        "call": Table(((1,),), (2e-6,)),
        "call_behind_products": Table(((1,),), (3e-6,)),
        "call_trained": Table(((1,),), (8e-6,)),
    }
    speeds = ProfileSpeeds(MachineProfile(Machine("here", "cpu", 1, 1, "2"), tables))
    assert speeds.product(1024, 512, 64, "fp32") == pytest.approx(7e-6)
    assert not speeds.product(1024, 512, 64, "fp32").extrapolated
    work = OperationWork("one", "product", (Product(2048, 512, 64, "fp32"), Moved(1 << 20, passes=3)))
    seconds = PassSeconds.of([work], speeds)
    assert seconds.forward == pytest.approx(14e-6 + 3e-4 + 4e-6 + 3e-6) and seconds.extrapolated
    update = PassSeconds.of([replace(work, kind="update")], speeds)  # one call takes all parameters
    assert update.forward == pytest.approx(14e-6 + 3e-4 + 4e-6)
    small = OperationWork("small", "product", (Product(1, 512, 64, "fp32"), Moved(1 << 10)))
    share = (4 * (64 + 512 * 64 + 512) + (1 << 10)) / BYTES_BEFORE  # of the caches
    warm, cold = 2 * 2e-6, 4e-6 + 3e-6
    of_work = sum(each.seconds(speeds) for each in small.forward)
    assert PassSeconds.of([small], speeds).forward == pytest.approx(of_work + warm + share * (cold - warm))
    assert speeds.call() == 2e-6


@pytest.mark.parametrize("mixer", ["grouped", "latent"])
def test_kinds_of_recomputation_share_the_seconds_of_operations(mixer: str) -> None:
    """Whichever is asked for first; control: seconds of another kind differ."""
    speeds = CardSpeeds(find_card("H100-80G"))
    known = LayerTimes(speeds)
    base = graph_of(mixer)
    adapted = replace(base, training=LayerTraining(weights=False, adapters=(("attention.o_proj", LowRankAdapter(4)),)))
    for graph in (base, adapted):
        kinds = [replace(graph, recompute=kind) for kind in ("full", "selective", "none", "elementwise")]
        alone = [layer_seconds(each, speeds) for each in kinds]
        assert [known.of(each, 1) for each in kinds] == alone
        assert len({each.recompute for each in alone}) > 2
