"""What is behind a difference: which items count how much in a gradient, and which stage of a step is the first off.

A step's gradient is a sum of what its items add, and one process tells what each of them does. Least squares find by
how much each counts in the layout's gradient: 2 everywhere is a gradient summed twice, 0 a rank whose rows are not
summed, other numbers for each rank a mean of means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.parallel.comm import Group
from danlu.parallel.layout import AXES, Layout
from danlu.parallel.ranks import Ranks
from danlu.parallel.step_parallel import StepParallel
from danlu.recipe import Recipe
from danlu.report.verification import Finding
from danlu.types import Item
from danlu.verify.comparison import Compared, Comparison
from danlu.verify.trace import ItemGradient, Parts, joined
from danlu.verify.workers import Observed, Task

_SAME = 1e-3  # relative: what counts as one number, and as nothing left


@dataclass(frozen=True)
class Case:
    """What is needed beside the comparison to say what is wrong."""

    task: Task
    observed: Observed

    @property
    def layout(self) -> Layout:
        return self.task.layout

    @property
    def recipe(self) -> Recipe:
        return self.task.recipe

    def rank_of(self, items: Sequence[Item]) -> list[int]:
        """The data rank that takes each item of a step."""
        size = self.layout.data
        owners = [0] * len(items)
        for index in range(size):
            group = Group("data", tuple(range(size)), index)
            for number in StepParallel(Ranks(self.layout, data=group)).local_range(items):
                owners[number] = index
        return owners


def finding(comparison: Comparison, case: Case) -> Finding | None:
    """The first thing that is wrong, and what usually causes it; None where nothing is."""
    first = comparison.first_wrong()
    if first is None:
        return None
    parameter = first.name
    if first.kind in ("loss", "targets") and (step := first.stage.rpartition(" of ")[2]):
        # A loss has no name: the first parameter whose gradient is off tells more.
        wrong = [one for one in comparison.of(f"gradients of {step}") if not one.holds]
        parameter = wrong[0].name if wrong else None
    ratio, cause = _explained(first, comparison, case)
    return Finding(first.stage, parameter, ratio, cause)


def _explained(first: Compared, comparison: Comparison, case: Case) -> tuple[str, str]:
    """(ratio in words, usual cause)."""
    match first.kind:
        case "first weights":
            return _ratio_of(first, case), (
                "parameters are not drawn or read alike: their values must come from (seed, name) and be cut afterwards"
            )
        case "targets":
            return f"{float(first.many[0]):,.0f} targets instead of {float(first.one):,.0f}", (
                "rows are not dealt out once each: a sampler that fills up by repeating counts some rows more than "
                "once, one that cuts off drops some"
            )
        case "loss":
            return _ratio_of(first, case), _of_loss(first, comparison, case)
        case "gradients":
            return _of_gradient(first, comparison, case)
        case "gradient norm" | "clipped norm":
            return _of_norm(first, case)
        case "weights":
            return _ratio_of(first, case), _of_weights(first, case)
        case "evaluation":
            return _ratio_of(first, case), (
                "evaluation uses other parameters than training left (gathered ones that are out of date, an average "
                "that is not swapped in), or rows of some ranks are left out"
            )
    return _ratio_of(first, case), _of_checkpoint(first)


def _of_loss(first: Compared, comparison: Comparison, case: Case) -> str:
    if not bool(first.many.isfinite().all()):
        return (
            "numbers that are finite in one process are not here: memory that was never filled or is used after it was "
            "given back, or a division by the weight of a process that has no rows"
        )
    if first.stage == "loss of step 1":
        causes = []
        if getattr(case.recipe.adapter, "dropout", 0.0):
            causes.append(
                "dropout masks that depend on the rank (each has the same one, or one of its own) instead of on the "
                "row, token and feature in the whole"
            )
        if case.layout.tensor > 1:
            causes.append("a bias or residual that each tensor rank adds, or a cut matrix whose parts are not summed")
        causes.append("a loss that is averaged before it is summed")
        return "the forward pass differs: " + "; ".join(causes)
    return (
        "the step before left the right weights, and this forward pass used others: parameters that were gathered "
        "before the update are out of date"
    )


def _of_gradient(first: Compared, comparison: Comparison, case: Case) -> tuple[str, str]:
    wrong = [one for one in comparison.of(first.stage) if not one.holds]
    all_of = comparison.of(first.stage)
    if first.ranks is not None or all(one.ranks is not None for one in wrong):
        axis = _missing_sum(first, case)
        where = f"ranks {first.ranks[0]} and {first.ranks[1]} hold it with other numbers" if first.ranks else ""
        if axis is not None:
            return (
                f"/{axis}, a part on each rank ({where})",
                f"the all-reduce of this gradient over {axis} ranks is missing",
            )
        return where, "processes that hold one parameter do not sum its gradient to the same"
    if case.task.proxy.tied and [one.name for one in wrong] == ["embed_tokens.weight"] and len(all_of) > 1:
        return _ratio_of(first, case), (
            "the tie of head and embedding is lost: the head's gradient does not arrive at the shared parameter"
        )
    if first.stage == "gradients of step 1" and case.observed.one.by_item:
        shares = _shares_of_items(first, case.observed.one.by_item)
        if shares is not None:
            return _by_shares(shares, case)
    return _ratio_of(first, case), _of_some_gradients(wrong, case)


def _of_some_gradients(wrong: Sequence[Compared], case: Case) -> str:
    if wrong and all("norm" in (one.name or "") for one in wrong):
        return (
            "only norms are wrong: their gradients are parts of a sum (over tokens under sequence parallelism, over "
            "rows under sharding), and one all-reduce is missing or done twice"
        )
    if getattr(case.recipe.adapter, "dropout", 0.0):
        return "dropout masks of backward and forward pass that differ, or masks that are the same on every shard"
    return (
        "the backward pass of a cut layer: a sum over tensor ranks that is missing at its entrance, or made twice; a "
        "part that is held several times and counted so"
    )


def _missing_sum(first: Compared, case: Case) -> str | None:
    """The axis over which the copies on its ranks would add up to the gradient of one process."""
    step = int(first.stage.rpartition(" ")[2]) - 1
    parts = [seen.steps[step].gradients for seen in case.observed.many]
    assert first.name is not None
    for count in range(1, len(AXES) + 1):
        for axes in itertools.combinations([axis for axis in AXES if getattr(case.layout, axis) > 1], count):
            ranks = _line(case.layout, axes)
            value = _sum_of(first.name, [parts[rank] for rank in ranks], first.one)
            if value is not None and _close(value, first.one, 1e-4):
                names = {("replicate",): "data", ("shard",): "data", ("replicate", "shard"): "data"}
                return names.get(axes, " x ".join(axes))
    return None


def _line(layout: Layout, axes: Sequence[str]) -> list[int]:
    """The ranks that differ from rank 0 along some axes alone."""
    places = ((rank, layout.coordinates(rank)) for rank in range(layout.world))
    return [rank for rank, place in places if all(at == 0 for axis, at in place.items() if axis not in axes)]


def _sum_of(name: str, parts: Sequence[Parts], one: Tensor) -> Tensor | None:
    total = torch.zeros_like(one)
    for part in parts:
        if name not in part or part[name][0].sizes != tuple(one.shape):
            return None
        total += part[name][1]
    return total


def _shares_of_items(first: Compared, by_item: Sequence[ItemGradient]) -> Tensor | None:
    """[items] by how much each counts in the layout's gradient; None where no numbers for them explain it."""
    assert first.name is not None
    columns = [joined([one.gradients])[0].get(first.name, torch.zeros_like(first.one)) for one in by_item]
    matrix = torch.stack([column.flatten().double() for column in columns], dim=1)  # [numbers, items]
    if matrix.shape[0] < 2 * matrix.shape[1]:
        return None
    wanted = first.many.flatten().double()
    shares: Tensor = torch.linalg.lstsq(matrix, wanted.unsqueeze(1)).solution.squeeze(1)
    left = (matrix @ shares - wanted).norm().item()
    return shares if left <= _SAME * wanted.norm().item() else None


def _by_shares(shares: Tensor, case: Case) -> tuple[str, str]:
    """What it means that items count so much."""
    items = case.task.counted_in
    mean = float(shares.mean())
    if _all_are(shares, mean):
        return _named(mean, case), _of_constant(mean, case)
    ranks = case.rank_of(case.task.steps[0])
    weights = torch.tensor([one.weight for one in case.observed.one.by_item], dtype=torch.float64)
    said = (
        f"{items} count {float(shares.min()):.2f} to {float(shares.max()):.2f} times, by rank {_by_rank(shares, ranks)}"
    )
    whole = torch.round(shares)
    if _all_are(shares - whole, 0.0):
        none, more = (shares < 0.5).sum(), (shares > 1.5).sum()
        counted = f"{int(none)} {items} are not counted, {int(more)} more than once"
        if int(more) == 0 and len({rank for rank, share in zip(ranks, whole, strict=True) if share}) < case.layout.data:
            return counted, "gradients are not summed over data ranks: only some ranks' rows count"
        return counted, "a sampler that repeats or drops rows, so that some count more than once or not at all"
    if _constant_within(shares * _sum_within(weights, ranks), [0] * len(ranks)) and _constant_within(shares, ranks):
        return said, (
            "a mean over data ranks of their own means: with uneven rows each rank must add its sum, to be divided "
            "once by the weight of all"
        )
    micro = [(rank, place // case.task.micro) for rank, place in _places(ranks)]
    if _constant_within(shares, micro) and _constant_within(shares * _sum_within(weights, micro), ranks):
        return said, (
            "a loss scale that is wrong when gradients accumulate: each micro-batch counts alike, however many targets "
            "it has"
        )
    return said, f"{items} are weighted by something else than their targets"


def _places(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(data rank, number of the item among its own)."""
    seen: dict[int, int] = {}
    for rank in ranks:
        yield rank, seen.get(rank, 0)
        seen[rank] = seen.get(rank, 0) + 1


def _by_rank(shares: Tensor, ranks: Sequence[int]) -> str:
    own = (shares[[place for place, one in enumerate(ranks) if one == rank]] for rank in sorted(set(ranks)))
    return ", ".join(f"{float(one.mean()):.2f}" for one in own)


def _sum_within(values: Tensor, keys: Sequence[object]) -> Tensor:
    return torch.stack([values[[other == key for other in keys]].sum() for key in keys])


def _constant_within(values: Tensor, keys: Sequence[object]) -> bool:
    groups = (values[[other == key for other in keys]] for key in set(keys))
    return all(_all_are(group, float(group.mean())) for group in groups)


def _all_are(values: Tensor, value: float) -> bool:
    return bool(((values - value).abs() <= 0.01 * max(1.0, abs(value))).all())


def _of_norm(first: Compared, case: Case) -> tuple[str, str]:
    ratio = _ratio_of(first, case)
    if first.ranks is not None:
        norms = ", ".join(f"{float(one):.4g}" for one in first.many)
        return f"by rank {norms} instead of {float(first.one):.4g}", (
            "each process clips by the norm of what it holds: squares must be summed over all processes first"
        )
    return ratio, (
        "squares of a part that several processes hold are counted several times, or those of a part that one holds "
        "are missing (norms on another mesh, a sum over the wrong ranks)"
    )


def _of_weights(first: Compared, case: Case) -> str:
    if first.ranks is not None:
        return "processes that hold the same parameter update it differently: it drifts apart from here on"
    kind = case.recipe.optimizer.kind
    if kind in ("muon", "adafactor", "galore", "adamw8bit", "paged-adamw"):
        return (
            f"the gradients are right and the update is not: {kind} looks at whole matrices or blocks of numbers, and "
            "a process has parts of them"
        )
    return "the gradients are right and the update is not: another learning rate, decay or clipping factor on a part"


def _of_checkpoint(first: Compared) -> str:
    if first.stage.startswith("weights"):
        return "weights do not come back as they were saved: shards written or read at the wrong offset"
    return (
        "weights come back as they were saved, and the next step differs: the optimizer's state was loaded for "
        "another shard or not at all, or the counter of steps or the place in the data"
    )


def _ratio_of(first: Compared, case: Case) -> str:
    """By least squares of many against one; of weights after an update, of what it has changed."""
    many, one = first.many.flatten().double(), first.one.flatten().double()
    if first.before is not None and bool(many.isfinite().all()):
        before = first.before.flatten().double()
        return f"of the update: {_ratio(many - before, one - before, case)}"
    return _ratio(many, one, case)


def _ratio(many: Tensor, one: Tensor, case: Case) -> str:
    if many.shape != one.shape:
        one = one.expand_as(many)
    if not bool(many.isfinite().all()):
        return "not finite"
    square = float(one @ one)
    if square == 0:
        return "not zero, as it is in one process"
    ratio = float(many @ one) / square
    left = float((many - ratio * one).norm())
    if left <= _SAME * float(many.norm()) and abs(ratio - 1) > _SAME:
        return _named(ratio, case)
    return f"no constant one: nearest x{ratio:.4g}, which leaves {left / max(float(many.norm()), 1e-30):.1e} of it"


def _named(ratio: float, case: Case) -> str:
    """`x2 (data)`: a constant ratio, with whatever of the layout is just as large."""
    layout = case.layout
    rounds = max(-(-case.rank_of(case.task.steps[0]).count(rank) // case.task.micro) for rank in range(layout.data))
    sizes = {
        "data": layout.data,
        "shard": layout.shard,
        "replicate": layout.replicate,
        "tensor": layout.tensor,
        "world": layout.world,
        "micro-batches": rounds,
    }
    up = [name for name, size in sizes.items() if size > 1 and math.isclose(ratio, size, rel_tol=0.01)]
    down = [f"/{name}" for name, size in sizes.items() if size > 1 and math.isclose(ratio * size, 1, rel_tol=0.01)]
    names = up + down
    return f"x{ratio:.4g}" + (f" ({', '.join(names)})" if names else "")


def _of_constant(ratio: float, case: Case) -> str:
    if ratio > 1:
        return (
            "gradients are too large by a constant: summed twice along an axis, so as many times too large as it has "
            "ranks, or not divided by the number of micro-batches"
        )
    return (
        "gradients are too small by a constant: averaged over ranks where they should be summed (torch's DDP and FSDP "
        "divide by the number of ranks), or divided twice"
    )


def _close(value: Tensor, one: Tensor, share: float) -> bool:
    return float((value.double() - one.double()).norm()) <= share * float(one.double().norm())
