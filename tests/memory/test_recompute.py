"""Recomputation: the bits of a step without it, for what is claimed to be kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from builders.covering import fast
from builders.process_group import run_group
from builders.recompute import (
    ADAPTERS,
    BOUNDARIES,
    FAMILIES,
    LAYERS,
    RecomputeCase,
    adapted,
    full,
    made_again,
    same,
    step,
)
from builders.recompute_worker import sharded_steps
from builders.small_config import small_config
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from danlu.memory.layer_plan import KINDS, Kind, LayerPlan
from danlu.memory.recompute import describe, plan_of, unwrap_layer, wrap
from danlu.models.attend import PackedAttention
from danlu.models.chunks import Chunks
from danlu.models.decoder import Decoder
from danlu.models.modules import MLP
from danlu.numerics.four_bit_weight import FourBitWeight
from danlu.recipe.sections import Recompute

Plan = Sequence[LayerPlan]
PLANS: dict[str, Plan] = {
    "full": [LayerPlan(layer, "full") for layer in range(LAYERS)],
    "elementwise": [LayerPlan(layer, "elementwise") for layer in range(LAYERS)],
    "selective": [LayerPlan(layer, "selective") for layer in range(LAYERS)],
    "every-2": [LayerPlan(layer, "full", layer // 2) for layer in range(LAYERS)],
    "every-3": [LayerPlan(layer, "full", layer // 3) for layer in range(LAYERS)],
    "mixed": [LayerPlan(layer, kind) for layer, kind in enumerate((*KINDS, "full"))],
}
BASES: dict[str, Callable[[], RecomputeCase]] = {
    **{family: lambda family=family: full(family) for family in FAMILIES},  # type: ignore[misc]
    "biased": lambda: full(attention_bias=True, mlp_bias=True),
    **{kind: lambda kind=kind: adapted(kind) for kind in ADAPTERS},  # type: ignore[misc]
    "lora on shared keys": lambda: adapted("lora-dropout", **FAMILIES["gemma4-e2b"]),
    "qlora": lambda: adapted("lora-dropout", FourBitWeight.quantize),
    "qdora": lambda: adapted("dora-dropout", FourBitWeight.quantize),
}


def unwrap(model: Decoder) -> None:
    for layer in model.layers.values():
        unwrap_layer(layer)  # type: ignore[arg-type]
    model.segments = {}
    model.recomputed_attention = frozenset()


FEW, EVERY = ("mixed", "every-3"), tuple(PLANS)


@pytest.mark.parametrize(
    ("base", "every"),
    fast(
        itertools.product(sorted(BASES), [False, True]),
        *((base, False) for base in BASES if base != "qdora"),
        ("qdora", True),
    ),
)
def test_the_bits_are_those_of_a_step_that_keeps_everything(base: str, every: bool) -> None:
    """With plans that have every kind and segments; or with every plan, and the former in bfloat16 too."""
    made = BASES[base]()
    for dtype, plans in ((torch.float32, EVERY), (torch.bfloat16, FEW)) if every else ((torch.float32, FEW),):
        before = step(made, dtype)
        for name in plans:
            plan = PLANS[name]
            wrap(made.model, plan)
            after = step(made, dtype)
            assert same(after, before), f"{name}, {dtype}"
            # Under some adapters no product saves what norms give, and there is nothing to be saved by making it again.
            gain = after.kept_bytes < before.kept_bytes
            assert gain or (name == "elementwise" and after.kept_bytes == before.kept_bytes), f"{name}, {dtype}"
            unwrap(made.model)
        again = step(made, dtype)
        assert same(again, before) and again.kept_bytes == before.kept_bytes
    # Negative controls: what is compared depends on the tokens, and on the step that dropout goes by.
    assert not same(step(made, dtype, seed=2), before)
    dropout = "dropout" in base or base in ("qlora", "qdora", "lora on shared keys")
    assert same(step(made, dtype, number=2), before) != dropout


def numbers(made: RecomputeCase, kind: Kind) -> int:
    """What the module's table says, for all tokens and layers."""
    config = made.model.config
    spec = config.layers[0]
    d, q, k = config.hidden_size, spec.mixer.query_width, spec.mixer.kv_width
    f = spec.feed.intermediate_size
    each = {
        "none": 4 * d + 2 * q + 2 * k + 3 * f,
        "elementwise": 2 * d + 2 * q + 2 * k + 2 * f,
        "selective": 2 * d + q + 2 * k + 2 * f,
        "full": d,
    }[kind]
    return LAYERS * BOUNDARIES[-1] * each


def scores(made: RecomputeCase) -> int:
    """Attention probabilities in blocks of rows (on a CPU), which count as attention's statistics."""
    lengths = [end - start for start, end in pairwise(BOUNDARIES)]
    filled = [-(-length // 32) * 32 for length in lengths]
    return LAYERS * made.model.config.layers[0].mixer.heads * sum(rows * rows for rows in filled)


def around(made: RecomputeCase) -> int:
    """Bytes kept outside of the layers: the final norm's input and statistics, two rotary tables, tokens."""
    config, tokens = made.model.config, BOUNDARIES[-1]
    return tokens * (4 * config.hidden_size + 4 + 2 * 4 * config.layers[0].mixer.head_dim + 8)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_what_the_table_says(kind: Kind) -> None:
    made = full()
    wrap(made.model, [LayerPlan(layer, kind) for layer in range(LAYERS)])
    statistics = {"none": 2 * LAYERS * BOUNDARIES[-1], "elementwise": 0, "selective": 0, "full": 0}[kind]
    attention = scores(made) if kind == "none" else 0
    assert step(made).kept_bytes == 4 * (numbers(made, kind) + statistics + attention) + around(made)


@pytest.mark.parametrize("kind", ["lora-dropout", "dora-dropout", "vera", "mora", "ia3", "bottleneck"])
def test_no_adapter_holds_what_its_layer_drops(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not what autograd keeps, which other tests count, but what is alive: a Function may hold tensors of its own.
    made = adapted(kind)
    seen: list[StorageWeakRef] = []
    inner = MLP.gated_activation

    def watched(mlp: MLP, gate: Tensor, up: Tensor) -> Tensor:
        seen.extend(StorageWeakRef(one.untyped_storage()) for one in (gate, up))
        return inner(mlp, gate, up)

    monkeypatch.setattr(MLP, "gated_activation", watched)
    tokens, dropped = torch.arange(8), {}
    for recompute in ("none", "full"):
        seen.clear()
        made.dropout_state.begin(1, [(0, 8)])
        if recompute == "full":
            wrap(made.model, [LayerPlan(layer, "full") for layer in range(LAYERS)])
        hidden = made.model(tokens, tokens, PackedAttention((0, 8)))
        dropped[recompute] = sum(one.expired() for one in seen)
        assert len(seen) == 2 * LAYERS
        hidden.sum().backward()
        made.dropout_state.end()
    assert dropped == {"none": 0, "full": 2 * LAYERS}


def test_every_kth_layer_keeps_inputs_of_segments_alone_and_makes_layers_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = full()
    wrap(made.model, PLANS["every-2"])  # segments of 2, 2 and 1 layers
    with made_again(monkeypatch) as places:
        kept = step(made).kept_bytes
    assert kept == 3 * BOUNDARIES[-1] * 4 * made.model.config.hidden_size + around(made)
    second, first = "segment 1 of the layers", "segment 0 of the layers"
    assert places == ["layers.4", "layers.3", second, "layers.2", "layers.1", first, "layers.0"]


def test_nothing_is_made_twice_and_what_nobody_needs_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = full()
    wrap(trained.model, PLANS["selective"])
    with made_again(monkeypatch) as places:
        step(trained)
    assert len(places) == 4 * LAYERS == len(set(places))
    # LoRA makes the MLP's product of its factors by itself, which are kept.
    lora = adapted("lora-dropout")
    wrap(lora.model, PLANS["selective"])
    with made_again(monkeypatch) as places:
        step(lora)
    assert not [place for place in places if place.endswith(".mlp")] and len(places) == len(set(places))


def test_a_copy_of_a_wrapped_model_has_layers_of_its_own() -> None:
    made = full()
    wrap(made.model, PLANS["every-2"])
    model = deepcopy(made.model)
    with torch.no_grad():
        for one in made.model.layers.parameters():
            one.zero_()
    copied = RecomputeCase(model, dict(model.named_parameters()), made.dropout_state)
    assert same(step(copied), step(full())) and not same(step(copied), step(made))


def test_plans_by_the_words_of_a_recipe() -> None:
    model = full().model
    assert plan_of(Recompute(), model) == [LayerPlan(layer, "none") for layer in range(LAYERS)]
    assert plan_of(Recompute(kind="selective"), model) == PLANS["selective"]
    assert plan_of(Recompute(kind="every", layers=3), model) == PLANS["every-3"]
    assert plan_of(Recompute(kind="every"), model) == PLANS["every-2"]  # the root of 5
    assert plan_of(Recompute(kind="planned", budget=1.0), model, lambda: PLANS["mixed"]) == PLANS["mixed"]


def test_a_plan_in_words() -> None:
    assert describe(PLANS["full"]) == "recompute: full in layers 0-4"
    assert describe(PLANS["every-2"]) == "recompute: all but the inputs of layers 0, 2, 4"
    some = [LayerPlan(layer, "full" if layer in (0, 1, 4) else "none") for layer in range(6)]
    assert describe(some) == "recompute: none in layers 2-3 and 5, full in layers 0-1 and 4"


@pytest.mark.distributed
def test_parameters_that_are_gathered_for_each_layer() -> None:
    """FSDP2 with its hooks around wrapped layers: the gradients of the same, unwrapped."""
    for rank in run_group(sharded_steps, 2, [*PLANS.values()]):
        plain, *wrapped, doubled = rank
        for name, one in zip(PLANS, wrapped, strict=True):
            assert one.keys() == plain.keys() and plain
            assert all(torch.equal(one[key], plain[key]) for key in plain), name
        assert not all(torch.equal(doubled[key], plain[key]) for key in plain)  # negative control


def test_segments_end_with_their_chunk_of_a_pipeline() -> None:
    model = Decoder(small_config(layers=6))
    section = Recompute(kind="every", layers=2)
    assert [entry.segment for entry in plan_of(section, model)] == [0, 0, 1, 1, 2, 2]  # control: one chunk
    model.keep_chunks(Chunks.of_sizes([1, 2, 1, 2], [0, 2]))  # layers 0 and 3, behind which others come elsewhere
    assert [(entry.layer, entry.segment) for entry in plan_of(section, model)] == [(0, 0), (3, 1)]
