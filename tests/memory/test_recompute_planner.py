"""Plans under a budget against all plans there are, and what is measured against what a step keeps."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
import torch
from builders.recompute import BOUNDARIES, LAYERS, RecomputeCase, adapted, full, same, step

from danlu.core.errors import RecipeError
from danlu.memory import recompute_choice, recompute_planner
from danlu.memory.layer_plan import KINDS, LayerPlan
from danlu.memory.recompute import wrap
from danlu.memory.recompute_choice import LayerCosts, Option, fastest_plan, least_peak_bytes
from danlu.memory.recompute_planner import measure_layers
from danlu.models.attend import PackedAttention

GIB = 2**30


def made_up(seed: int, layers: int) -> list[LayerCosts]:
    """Layers with costs of their own; what is kept less takes longer, mostly."""
    draw = random.Random(seed)
    costs = []
    for layer in range(layers):
        whole = draw.randint(50, 100)
        options = tuple(
            Option(kind, max(1, whole * (3 - place) // 3 - draw.randint(0, 9)), round(place * draw.random(), 3))
            for place, kind in enumerate(KINDS)
        )
        costs.append(LayerCosts(layer, whole, options))
    return costs


def every_plan(costs: list[LayerCosts]) -> list[list[LayerPlan]]:
    layers = [one.layer for one in costs]
    return [
        [LayerPlan(layer, kind) for layer, kind in zip(layers, kinds, strict=True)]
        for kinds in product(KINDS, repeat=len(costs))
    ]


def seconds(costs: list[LayerCosts], plan: list[LayerPlan]) -> float:
    return sum(
        next(option.time_s for option in one.options if option.kind == chosen.kind)
        for one, chosen in zip(costs, plan, strict=True)
    )


def peak_bytes(costs: list[LayerCosts], plan: list[LayerPlan]) -> int:
    """The most bytes of activations that a plan holds at a time."""
    kept = peak = 0
    for layer_costs, chosen in zip(costs, plan, strict=True):
        peak = max(peak, kept + layer_costs.whole_bytes)
        kept += next(option.kept_bytes for option in layer_costs.options if option.kind == chosen.kind)
    return peak


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_within_the_budget_is_faster(seed: int) -> None:
    costs = made_up(seed, 5)
    plans = [(peak_bytes(costs, plan), seconds(costs, plan)) for plan in every_plan(costs)]
    least, most = (pick(need for need, _ in plans) for pick in (min, max))
    assert least == least_peak_bytes(costs)
    found = set()
    for budget in range(least, most + 20, 7):
        plan = fastest_plan(costs, budget)
        best = min(time for need, time in plans if need <= budget)
        assert peak_bytes(costs, plan) <= budget and seconds(costs, plan) == pytest.approx(best, abs=1e-9)
        found.add(tuple(plan))
    assert len(found) > 3  # negative control: the budget decides


@pytest.mark.parametrize("in_flight", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_other_micro_batches_in_flight_share_the_budget(seed: int, in_flight: float) -> None:
    costs = made_up(seed, 5)
    others = in_flight - 1

    def kept(plan: list[LayerPlan]) -> int:
        chosen = zip(costs, plan, strict=True)
        return sum(next(o.kept_bytes for o in each.options if o.kind == own.kind) for each, own in chosen)

    # Of each plan what it needs at its peak, and how long it takes.
    plans = [(others * kept(plan) + peak_bytes(costs, plan), seconds(costs, plan)) for plan in every_plan(costs)]
    least, most = (pick(need for need, _ in plans) for pick in (min, max))
    kept_least, kept_most = (pick(kept(plan) for plan in every_plan(costs)) for pick in (min, max))
    grain = others * ((kept_most - kept_least) / 16 + 1) + 1  # a share of the budget is no finer
    chosen = set()
    for budget in range(int(least) + 1, int(most) + 20, 23):
        plan = fastest_plan(costs, budget, in_flight)
        assert others * kept(plan) + peak_bytes(costs, plan) <= budget
        within_grain = [time for need, time in plans if need <= budget - grain]
        assert not within_grain or seconds(costs, plan) <= min(within_grain) + 1e-9
        chosen.add(tuple(plan))
    assert len(chosen) > 3  # control: the budget decides
    alone = fastest_plan(costs, int(least), 1.0)
    assert others * kept(alone) + peak_bytes(costs, alone) > least  # control: it would not fit with the others
    with pytest.raises(RecipeError, match=f"with {in_flight:.3g} micro-batches in flight"):
        fastest_plan(costs, int(least) - 2, in_flight)


def test_fewer_partial_plans_give_a_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = made_up(0, 12)
    budget = (least_peak_bytes(costs) + peak_bytes(costs, [LayerPlan(layer, "none") for layer in range(12)])) // 2
    exact = fastest_plan(costs, budget)
    monkeypatch.setattr(recompute_choice, "_FRONTIER", 4)
    rough = fastest_plan(costs, budget)
    assert peak_bytes(costs, rough) <= budget
    assert seconds(costs, exact) < seconds(costs, rough) < 2 * seconds(costs, exact)
    assert peak_bytes(costs, fastest_plan(costs, least_peak_bytes(costs))) == least_peak_bytes(costs)


def test_a_budget_that_nothing_fits_says_what_would() -> None:
    options = (Option("none", 3 * GIB, 0.0), Option("full", GIB, 1.0))
    costs = [LayerCosts(layer, 3 * GIB, options) for layer in range(2)]
    with pytest.raises(RecipeError, match=r"budget: 3\.5 GiB is less than .* however much is recomputed: 4 GiB"):
        fastest_plan(costs, 7 * GIB // 2)
    assert [one.kind for one in fastest_plan(costs, 4 * GIB)] == ["full", "none"]  # the last is in use anyway
    assert [one.kind for one in fastest_plan(costs, 6 * GIB)] == ["none", "none"]


def costs_of(made: RecomputeCase) -> list[LayerCosts]:
    tokens = torch.randint(0, 64, (BOUNDARIES[-1],), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(BOUNDARIES)])
    recomputing = PackedAttention(BOUNDARIES, recomputed_layers=range(LAYERS))
    return measure_layers(
        made.model, tokens, positions, PackedAttention(BOUNDARIES), torch.float32, recomputing=recomputing
    )


@pytest.mark.parametrize("adapter", [None, "lora-dropout", "ia3"])
def test_measured_bytes_add_up_to_those_of_a_step(adapter: str | None) -> None:
    def fresh() -> RecomputeCase:
        return full() if adapter is None else adapted(adapter)

    made = fresh()
    before = step(made)
    costs = costs_of(made)
    assert all(one.grad is None for one in made.model.parameters())
    assert same(step(made), before) and step(made).kept_bytes == before.kept_bytes  # the model is what it was
    around = before.kept_bytes - sum(one.whole_bytes for one in costs)
    for kind in KINDS:
        wrapped = fresh()
        wrap(wrapped.model, [LayerPlan(layer, kind) for layer in range(LAYERS)])
        kept = sum(next(option.kept_bytes for option in one.options if option.kind == kind) for one in costs)
        assert step(wrapped).kept_bytes == around + kept, kind


def test_layers_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    measured = recompute_planner._measure_layer

    def counted(*arguments: object) -> LayerCosts:
        calls.append(arguments)
        return measured(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recompute_planner, "_measure_layer", counted)
    costs = costs_of(full("gemma2"))  # every other layer has a window
    assert len(calls) == 2 and [one.layer for one in costs] == list(range(LAYERS))
    assert costs[0].options is costs[2].options is costs[4].options and costs[1].options is costs[3].options
    assert costs[0].options is not costs[1].options
