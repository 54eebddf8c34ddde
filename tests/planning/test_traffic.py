"""What the formulas say against what is counted, to the byte, in steps of a decoder under DDP and FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from builders.process_group import run_group
from builders.traffic_worker import (
    Counted,
    TensorCase,
    remade,
    steps,
    tensor_step,
    tensor_steps,
    with_adapters,
    with_frozen,
)

from danlu.parallel.collective_traffic import CollectiveTraffic, table
from danlu.parallel.layout import Layout
from danlu.parallel.ranks import ranks_of
from danlu.parallel.traffic_counter import fake_process_group
from danlu.planning.traffic import (
    Crossings,
    TensorStep,
    Weight,
    data_traffic,
    decoder_regions,
    padded_elements,
    tensor_traffic,
)
from danlu.recipe.sections import Parallel

SHARDS = ("zero1", "zero2", "zero3")
SECTIONS = [
    Parallel(),
    Parallel(reduce="bf16"),
    *(Parallel(shard=shard) for shard in SHARDS),  # type: ignore[arg-type]
    Parallel(shard="zero1", accumulate="sharded"),
    Parallel(shard="zero2", accumulate="local"),
    Parallel(shard="zero3", accumulate="local", reduce="bf16"),
    Parallel(shard="zero3", prefetch=0),
]
HYBRID = [
    *(Parallel(shard=shard, replicate=2) for shard in SHARDS),  # type: ignore[arg-type]
    Parallel(shard="zero3", replicate=2, accumulate="local", reduce="bf16"),
]


def disagreements(counted: Counted) -> list[str]:
    """The rows in which what is counted is not what the formulas say, and cases of which nothing was counted."""
    found = [] if counted else ["no case was counted"]
    for case, (measured, formula) in counted.items():
        rows = table(measured, formula, beside_bytes=0)
        found += [f"{case}: nothing was counted"] if not rows else []
        found += [f"{case}: {' '.join(row.cells())}" for row in rows if not row.agrees]
    return found


def fits(measured: list[CollectiveTraffic], formula: list[CollectiveTraffic]) -> bool:
    return all(row.agrees for row in table(measured, formula, beside_bytes=0))


@pytest.fixture(scope="module")
def of_four() -> list[Counted]:
    return run_group(steps, 4, [*SECTIONS, *HYBRID])


@pytest.mark.distributed
def test_data_ranks_send_what_the_formulas_say(of_four: list[Counted]) -> None:
    for counted in [*run_group(steps, 2, SECTIONS[:5]), *of_four]:
        assert disagreements(counted) == []
    assert len(of_four[0]) == 40


@pytest.mark.distributed
def test_another_formula_does_not_fit(of_four: list[Counted]) -> None:
    for (name, (measured, _)), (other, (_, formula)) in product(of_four[0].items(), of_four[0].items()):
        if alike(name) != alike(other):
            assert not fits(measured, formula), f"{name} as {other}"


def alike(name: str) -> str:
    """Cases that send the same have one name: when gradients are sent after the only micro-batch or after the last,
    and DDP, which sends no parameters."""
    shard, replicate, accumulate, reduce, kind, rounds = name.split(", ")
    sharded = accumulate == "accumulate sharded" or (accumulate == "accumulate auto" and shard in ("zero2", "zero3"))
    if shard == "none":
        return reduce
    stage = "zero3" if shard == "zero3" else "zero1 or zero2"
    times = rounds if sharded or shard == "zero3" else "1 micro-batches"
    each = "each" if sharded and rounds != "1 micro-batches" else "once"
    return ", ".join([stage, replicate, each, reduce, kind, times])


@pytest.mark.distributed
def test_frozen_parameters_are_gathered_and_have_no_gradients() -> None:
    for counted in run_group(with_frozen, 2, ["_proj"]):
        assert disagreements(counted) == []
        (measured, formula), (_, another) = counted["zero2"], counted["zero3"]
        assert fits(measured, formula) and not fits(measured, another)


@pytest.mark.distributed
def test_packed_weights_are_gathered_as_they_are() -> None:
    for counted in run_group(with_adapters, 2):
        wide = counted.pop("codes as float32")
        assert disagreements(counted) == []
        assert not fits(*wide)


@pytest.mark.distributed
def test_recompute_gathers_nothing_more() -> None:
    for counted in run_group(remade, 2):
        assert disagreements(counted) == []
        assert counted.keys() == {"selective", "full", "every"}


CUT: list[TensorCase] = [
    (Parallel(tensor=2, sequence=sequence), kind, family)
    for sequence in (False, True)
    for kind, family in [
        ("selective", "llama"),
        ("full", "llama"),
        ("none", "llama"),
        ("every", "llama"),
        ("full", "gemma2"),
        ("every", "gemma2"),
    ]
]


@pytest.mark.distributed
def test_tensor_ranks_send_what_the_formulas_say() -> None:
    for counted in run_group(tensor_steps, 2, CUT):
        assert disagreements(counted) == []
        for (_, formula), (measured, _) in pairwise(counted.values()):
            assert not fits(measured, formula)
    for counted in run_group(tensor_steps, 4, [(Parallel(tensor=4), "none", "qwen3")]):  # two of them hold each head
        assert disagreements(counted) == []
    normed: list[TensorCase] = [(Parallel(tensor=2), kind, "olmo2") for kind in ("none", "selective", "full", "every")]
    for counted in run_group(tensor_steps, 2, normed):
        assert disagreements(counted) == []
    whole = [(Parallel(tensor=2, sequence=sequence, shard="zero3"), "none", "llama") for sequence in (False, True)]
    for counted in run_group(tensor_steps, 4, whole):
        assert disagreements(counted) == []
        axes = {one.axis for measured, _ in counted.values() for one in measured}
        assert axes == {"shard", "tensor"}


@pytest.mark.parametrize(
    ("layout", "section"),
    [
        (Layout(shard=64, tensor=8), Parallel(shard="zero3", tensor=8)),
        (Layout(shard=64, tensor=8), Parallel(shard="zero2", tensor=8, sequence=True)),
        (Layout(replicate=8, shard=8, tensor=8), Parallel(shard="zero3", replicate=8, tensor=8)),
    ],
    ids=["zero3 and tensor", "zero2 and sequence", "hybrid and tensor"],
)
def test_of_512_processes_one_sends_what_the_formulas_say(layout: Layout, section: Parallel) -> None:
    with fake_process_group(512, rank=77):
        ranks = ranks_of(layout, "cpu")
        assert disagreements({"512": tensor_step(section, ranks, "none", "llama", True)}) == []


Formula = Callable[[int, int], Fraction | int]
EVEN = [Weight((64, 10)), Weight((128, 5)), Weight((32,))]
PSI = 4 * (640 + 640 + 32)


@pytest.mark.parametrize(
    ("shard", "formula"),
    [
        ("none", lambda n, m: 2 * Fraction(n - 1, n) * PSI),
        ("zero1", lambda n, m: 2 * Fraction(n - 1, n) * PSI),
        ("zero2", lambda n, m: (m + 1) * Fraction(n - 1, n) * PSI),
        ("zero3", lambda n, m: 3 * m * Fraction(n - 1, n) * PSI),
    ],
)
def test_formulas_are_those_of_the_papers(shard: str, formula: Formula) -> None:
    for n, m in product((1, 2, 8, 32), (1, 4)):
        layout = Layout(replicate=n) if shard == "none" else Layout(shard=n)
        assert total(data_traffic(EVEN, layout, Parallel(shard=shard), micro_batches=m)) == formula(n, m)  # type: ignore[arg-type]


def test_copies_of_a_sharded_model_sum_shares_alone() -> None:
    section = Parallel(shard="zero3", replicate=4)
    sent = {one.axis: one for one in data_traffic(EVEN, Layout(replicate=4, shard=8), section, micro_batches=3)}
    assert sent["replicate"].bytes == 2 * Fraction(3, 4) * Fraction(PSI, 8)


def test_half_as_many_bytes_are_sent_where_they_are_said_to_be() -> None:
    narrow = [Weight(weight.shape, gathered_bytes=2) for weight in EVEN]
    for weights, section, gathered, scattered in [
        (EVEN, Parallel(shard="zero2"), 1, 1),
        (narrow, Parallel(shard="zero2"), 2, 1),
        (narrow, Parallel(shard="zero2", reduce="bf16"), 2, 2),
    ]:
        sent = {one.kind: one.bytes for one in data_traffic(weights, Layout(shard=4), section, micro_batches=1)}
        assert sent == {
            "all-gather": Fraction(3, 4) * PSI / gathered,
            "reduce-scatter": Fraction(3, 4) * PSI / scattered,
        }


@pytest.mark.parametrize(
    ("shape", "shards", "travel"),
    [((10, 3), 4, 36), ((12, 3), 4, 36), ((2, 3), 4, 12), ((7,), 4, 8), ((), 4, 4), ((0, 3), 4, 0)],
)
def test_rows_are_filled_up(shape: tuple[int, ...], shards: int, travel: int) -> None:
    assert padded_elements(shape, shards) == travel


NO_RECOMPUTE = [("none", None)] * 3


def crossings(phase: str, **options: Any) -> list[Crossings]:
    """Entrances and exits of embedding, attention and MLP of two layers, and head."""
    recompute = options.pop("recompute", NO_RECOMPUTE[:2])
    return [getattr(region, phase) for region in decoder_regions(recompute, **options)]


def test_regions_of_a_decoder_name_what_crosses_their_borders() -> None:
    assert [(region.layer, region.half) for region in decoder_regions(NO_RECOMPUTE[:1])] == [
        (None, "embedding"), (0, "attention"), (0, "mlp"), (None, "head"),
    ]  # fmt: skip
    assert crossings("forward") == crossings("backward") == [(0, 1), (1, 1), (1, 1), (1, 1), (1, 1), (1, 0)]
    assert crossings("recomputed") == [(0, 0)] * 6


@pytest.mark.parametrize(
    ("first", "between", "backward"),
    [
        (1, False, [(0, 0), (0, 1), (1, 1), (1, 1), (1, 1), (1, 0)]),  # an adapter in the first attention
        (0, True, [(0, 0), (1, 1), (1, 1), (1, 1), (1, 1), (1, 0)]),  # the first norm
        (4, True, [(0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (1, 0)]),  # the head alone
    ],
)
def test_gradients_go_back_to_the_first_that_is_trained(first: int, between: bool, backward: list[Any]) -> None:
    assert crossings("backward", first_with_gradient=first, trained_between=between) == backward


@pytest.mark.parametrize(
    ("options", "recomputed"),
    [
        ({"recompute": [("full", None)] * 2}, [(0, 0), (1, 1), (1, 0), (1, 1), (1, 0), (0, 0)]),
        ({"recompute": [("full", None)] * 2, "to_the_end": True}, [(0, 0), *[(1, 1)] * 4, (0, 0)]),
        ({"recompute": [("full", 0)] * 2}, [(0, 0), (2, 2), (2, 1), (1, 1), (1, 0), (0, 0)]),
        ({"gathered_again": [1, 3]}, [(0, 0), (0, 0), (1, 0), (0, 0), (1, 0), (0, 0)]),
    ],
)
def test_what_is_recomputed_crosses_borders_again(options: dict[str, Any], recomputed: list[Any]) -> None:
    assert crossings("recomputed", **options) == recomputed


def test_sequence_parallelism_sends_as_many_bytes_and_gathers_again() -> None:
    step, layout = TensorStep(100, 40, 8, 2, regions=decoder_regions(NO_RECOMPUTE)), Layout(tensor=4)
    again = replace(step, regions=decoder_regions(NO_RECOMPUTE, gathered_again=range(6)))
    without, with_, and_again = (
        total(tensor_traffic(one, layout, Parallel(tensor=4, sequence=sequence)))
        for one, sequence in ((step, False), (step, True), (again, True))
    )
    each, numbers = Fraction(3, 4) * 100 * 8 * 2, 2 * Fraction(3, 4) * 5 * 40 * 4
    assert without == with_ == 14 * 2 * each + numbers
    assert and_again == with_ + 6 * each


def test_alone_nothing_is_sent() -> None:
    step = TensorStep(100, 40, 8, 2, regions=decoder_regions(NO_RECOMPUTE))
    assert list(tensor_traffic(step, Layout(), Parallel())) == []
    for shard in ("none", *SHARDS):
        assert list(data_traffic(EVEN, Layout(), Parallel(shard=shard), micro_batches=2)) == []  # type: ignore[arg-type]


def total(sent: Sequence[CollectiveTraffic] | object) -> Fraction:
    return sum((one.bytes for one in sent), Fraction(0))  # type: ignore[attr-defined]


def test_formulas_need_no_torch() -> None:
    import danlu.parallel.collective_traffic
    import danlu.planning.traffic

    assert not any(
        vars(module).get("torch") is torch for module in (danlu.parallel.collective_traffic, danlu.planning.traffic)
    )
