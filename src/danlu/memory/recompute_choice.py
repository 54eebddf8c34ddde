"""The choice of recomputation for each layer with the least time under a budget of bytes: a knapsack over layers,
solved exactly. Imports no torch.

The backward pass goes from the last layer to the first, and the activations of a layer are freed when it is done. So
while layer l is in its backward pass, memory holds at most the kept activations of the layers before it, all
activations of layer l, and the kept activations of all layers for the other micro-batches that are in flight (of a
pipeline): at no l may that be more than the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from danlu.core.errors import RecipeError
from danlu.memory.layer_plan import Kind, LayerPlan

_FRONTIER = 4096
"""Partial plans that are extended at a time. Where all layers are alike there are far fewer; with more, the fastest of
each 4096th part of the budget is kept, so that a plan always fits, and is the best but for that grain."""
_SHARES_TRIED = 16
"""How finely the budget is divided between the micro-batch in its backward pass and the others in flight."""


@dataclass(frozen=True)
class Option:
    """One way to run a layer, with its costs."""

    kind: Kind
    kept_bytes: int  # between forward and backward
    time_s: float  # more than without recomputation, for forward and backward of a micro-batch


@dataclass(frozen=True)
class LayerCosts:
    """The options for running a layer, with their costs."""

    layer: int
    whole_bytes: int  # all activations that its backward pass needs, kept or recomputed
    options: tuple[Option, ...]


@dataclass(frozen=True)
class _Partial:
    """Kinds chosen for the first layers."""

    kept_bytes: int
    time_s: float
    kinds: tuple[Kind, ...] = ()


def fastest_plan(costs: Sequence[LayerCosts], budget_bytes: int, in_flight: float = 1.0) -> list[LayerPlan]:
    """Returns the plan that takes least time, of those with a peak of at most `budget_bytes`.

    in_flight: micro-batches of which activations are kept at once (`Pipeline.micro_batches_in_flight`); the last of
        them is in its backward pass, and all layers keep the activations of the others.
    Raises RecipeError when there is none, with the smallest peak of any plan.
    """
    others = max(0.0, in_flight - 1)
    least, most = (sum(pick(o.kept_bytes for o in each.options) for each in costs) for pick in (min, max))
    # Without others what all layers keep is bounded by the peak alone.
    caps = [least + (most - least) * share // _SHARES_TRIED for share in range(_SHARES_TRIED + 1)] if others else [most]
    fastest = [_fastest_within(costs, budget_bytes - int(others * cap), cap) for cap in caps]
    plans = [plan for plan in fastest if plan is not None]
    if not plans:
        several = f" with {in_flight:.3g} micro-batches in flight" if others else ""
        needed = int(others * least) + least_peak_bytes(costs)
        raise RecipeError(
            f"memory.recompute.budget: {_gib(budget_bytes)} GiB is less than the activations of a micro-batch need "
            f"however much is recomputed{several}: {_gib(needed)} GiB. Raise it, or lower batch.micro or "
            "data.max_length"
        )
    kinds = min(plans, key=lambda partial: partial.time_s).kinds
    return [LayerPlan(each.layer, kind) for each, kind in zip(costs, kinds, strict=True)]


def _fastest_within(costs: Sequence[LayerCosts], peak_bytes: int, most_kept: int) -> _Partial | None:
    """Returns the fastest choice of kinds within a peak of the backward pass and a limit of the bytes kept between the
    passes.

    None where there is none.
    """
    frontier = [_Partial(0, 0.0)]
    for layer_costs in costs:
        extended = [
            _Partial(kept, partial.time_s + option.time_s, (*partial.kinds, option.kind))
            for partial in frontier
            if partial.kept_bytes + layer_costs.whole_bytes <= peak_bytes
            for option in layer_costs.options
            if (kept := partial.kept_bytes + option.kept_bytes) <= most_kept
        ]
        frontier = _pareto_frontier(extended, min(peak_bytes, most_kept))
        if not frontier:
            return None
    return min(frontier, key=lambda partial: partial.time_s)


def _pareto_frontier(partials: list[_Partial], most_kept: int) -> list[_Partial]:
    """Those that no other beats in both bytes and time, by rising bytes."""
    best: list[_Partial] = []
    for partial in sorted(partials, key=lambda partial: (partial.kept_bytes, partial.time_s)):
        if not best or partial.time_s < best[-1].time_s:
            best.append(partial)
    if len(best) <= _FRONTIER:
        return best
    # Of each grain the last, which is the fastest, and the smallest of all, so that a plan still fits.
    by_grain = {partial.kept_bytes * _FRONTIER // max(1, most_kept): partial for partial in best}
    return [best[0], *(partial for partial in by_grain.values() if partial is not best[0])]


def least_peak_bytes(costs: Sequence[LayerCosts]) -> int:
    """The smallest peak of any plan, in bytes: each layer keeps as little as it can."""
    kept = peak = 0
    for each in costs:
        peak = max(peak, kept + each.whole_bytes)
        kept += min(option.kept_bytes for option in each.options)
    return peak


def _gib(count: int) -> str:
    return f"{count / 2**30:.3g}"
