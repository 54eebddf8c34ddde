"""The cause of a difference: how often items count in a gradient, and which stage of a step is the first with an error.

A step's gradient is a sum over its items, and one process computes each item's term. Least squares find the factor of
each in the layout's gradient: 2 everywhere is a gradient summed twice, 0 a rank with rows that are not summed, other
numbers for each rank a mean of means.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.core.types import ROUTES, Item, Pack
from danlu.numerics.relative_error import relative_error
from danlu.objectives.preference import sees_whole_step
from danlu.optim.state_shapes import eight_bits
from danlu.parallel.batch_sharding import shard_by_tokens, shard_in_order
from danlu.parallel.comm import Group
from danlu.parallel.layout import AXES, Layout
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.pipeline import Pipeline
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.recipe.reference import resolve_reference
from danlu.recipe.sections import AdapterOff, PreferenceTerm
from danlu.report.verification import Finding
from danlu.verification.causes import CAUSES, NOT_REPLAYED, OTHER_VERSION, WHERE_CUT
from danlu.verification.comparison import ComparedTensor, Comparison
from danlu.verification.role_proxies import has_frozen_models
from danlu.verification.routes import is_of_experts, is_of_router
from danlu.verification.trace import ItemGradient, LocalShards, assemble
from danlu.verification.workers import Task, Traces

_SAME = 1e-3  # relative error up to which a value counts as explained


@dataclass(frozen=True)
class Case:
    """The inputs of a diagnosis in addition to the comparison."""

    task: Task
    traces: Traces

    @property
    def layout(self) -> Layout:
        return self.task.layout

    @property
    def recipe(self) -> Recipe:
        return self.task.recipe

    @property
    def has_routes(self) -> bool:
        """Whether the items have recorded routes of tokens to experts."""
        return any(
            ROUTES in sample.columns for item in self.task.steps[0] if isinstance(item, Pack) for sample in item.samples
        )

    def places_of(self, items: Sequence[Item]) -> list[tuple[int, int]]:
        """The data rank that takes each item of a step, and the number of its micro-batch there."""
        data_ranks, places = tuple(range(self.layout.data)), dict[int, tuple[int, int]]()
        for rank in data_ranks:
            for micro_batch, numbers in enumerate(self._dealt(items, Group("data", data_ranks, rank))):
                places |= dict.fromkeys(numbers, (rank, micro_batch))
        return [places[number] for number in range(len(items))]

    def _dealt(self, items: Sequence[Item], data: Group) -> Sequence[Sequence[int]]:
        """The numbers of the items in each micro-batch of a data rank, as its learner deals them."""
        recipe, micro = self.recipe, self.task.micro
        if recipe.batch.rows is None:
            return shard_in_order(items, ParallelContext(Ranks(data=data)), micro)
        stages = Group("pipeline", tuple(range(self.layout.pipeline)))
        pipeline = None if stages.alone else Pipeline("1f1b", 1, stages)
        parallel = ParallelContext(Ranks(data=data), pipeline=pipeline)
        capacity, least = micro * recipe.data.max_length, parallel.least_micro_batches(len(items))
        return shard_by_tokens([item.tokens for item in items], data.index, data.size, capacity, least=least)


def diagnose(comparison: Comparison, case: Case) -> Finding | None:
    """Finds the first error, and its usual cause; None where there is none."""
    first = comparison.first_failure()
    if first is None:
        return None
    parameter = first.name
    if first.kind in ("loss", "targets") and (step := first.stage.rpartition(" of ")[2]):
        # A loss has no name: the first parameter with a wrong gradient says more.
        failed = [tensor for tensor in comparison.of(f"gradients of {step}") if not tensor.holds]
        parameter = failed[0].name if failed else None
    ratio, cause = _explained(first, comparison, case)
    return Finding(first.stage, parameter, ratio, cause)


def _explained(first: ComparedTensor, comparison: Comparison, case: Case) -> tuple[str, str]:
    """Returns (the ratio of the layout's value to the reference's in words, the usual cause)."""
    match first.kind:
        case "first weights":
            return _ratio_of(first, case), (
                "parameters are not drawn or read alike: their values must come from (seed, name) and be cut afterwards"
            )
        case "targets":
            return f"{float(first.layout_value[0]):,.0f} targets instead of {float(first.reference):,.0f}", (
                "rows are not dealt out once each: a sampler that fills up by repeating counts some rows more than "
                "once, one that cuts off drops some"
            )
        case "expert counts":
            return _of_counts(first, case)
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
        case "metrics" | "counters" | "saved counters, loaded":
            return _by_rank_of(first), CAUSES[first.kind]
        case "gradient not finite":
            processes = sum(map(bool, first.layout_value.tolist()))
            return f"told by {processes} of {len(first.layout_value)} processes", CAUSES[first.kind]
        case "saving" | "exporting" | "loading":
            return _problem(first.kind, case), CAUSES[first.kind]
    return _ratio_of(first, case), CAUSES.get(first.kind) or _of_checkpoint(first)


def _problem(doing: str, case: Case) -> str:
    """The first error of a process in a part of the task."""
    traces = [*case.traces.by_rank, case.traces.reference]
    text = next(trace.problems[doing] for trace in traces if doing in trace.problems)
    return " ".join(text.split("\n  ")[:2])


def _by_rank_of(first: ComparedTensor) -> str:
    """`by rank 0.5, 0.25 instead of 0.375` of a number."""
    numbers = ", ".join(f"{float(number):.4g}" for number in first.layout_value)
    return f"by rank {numbers} instead of {float(first.reference):.4g}"


def _of_counts(first: ComparedTensor, case: Case) -> tuple[str, str]:
    """Explains wrong counts of rows of a layer's experts in a step."""
    counted, rows = float(first.layout_value.sum()), float(first.reference.sum())
    ratio = f"{counted:,.0f} rows instead of {rows:,.0f}"
    if first.ranks is not None or counted < rows:
        return ratio, "each data rank knows the rows of its own tokens alone: counts are to be summed over all of them"
    if counted >= 2 * rows or case.recipe.memory.recompute.kind in ("full", "every"):
        return ratio, "rows are counted once more where a layer is recomputed in the backward pass"
    if counted > rows:
        return ratio, "tokens that fill a batch up, and belong to no row, are counted as others are"
    cause = "tokens go to other experts than in one process: the forward pass before the router differs"
    return ratio, cause + ("" if not case.has_routes else f", or there are {NOT_REPLAYED}")


def _of_loss(first: ComparedTensor, comparison: Comparison, case: Case) -> str:
    if not bool(first.layout_value.isfinite().all()):
        return (
            "numbers that are finite in one process are not here: memory that was never filled or is used after it was "
            "given back, or a division by the weight of a process that has no rows"
        )
    if first.stage == "loss of step 1":
        causes = []
        if case.recipe.drops_out and getattr(case.recipe.adapter, "dropout", 0.0) > 0:
            causes.append(
                "dropout masks that depend on the rank (each has the same one, or one of its own) instead of on the "
                "row, token and feature in the whole"
            )
        if case.recipe.row_type is not None or case.recipe.stage == "rl":
            causes.append("branches of a tree that see one another")
            causes.append("a mean over one process's own pairs in place of all of the step's")
        if any(isinstance(term, PreferenceTerm) and sees_whole_step(term) for term in case.recipe.answer_terms):
            causes.append("a sort or a mean over a micro-batch or one process's rows in place of the whole step's")
        if has_frozen_models(case.recipe):
            causes.append("weights of a reference or teacher that are not the same on all processes")
        if case.has_routes:
            causes.append(NOT_REPLAYED)
        if case.layout.tensor > 1:
            if case.task.proxy.norms_all_heads:
                causes.append("norms over all queries and keys that have the mean square of one rank's heads")
            causes.append("a bias or residual that each tensor rank adds, or parts of a cut matrix that are not summed")
        if case.layout.context > 1:
            causes.append(WHERE_CUT)
            if case.recipe.row_type is not None:
                causes.append("a sum over an answer of one context rank's tokens alone")
        causes.append("a loss that is averaged before it is summed")
        return "the forward pass differs: " + "; ".join(causes)
    cause = (
        "the step before left the right weights, and this forward pass used others: parameters that were gathered "
        "before the update are out of date"
    )
    if case.layout.context > 1 and getattr(case.task.steps[0][0], "stage_length", None) is not None:
        cause += f"; or the step is of another stage of lengths: {WHERE_CUT}"
    if isinstance(resolve_reference(case.recipe), AdapterOff):
        cause += "; or the reference is the policy with its adapter, which had no effect before"
    return cause


def _of_gradient(first: ComparedTensor, comparison: Comparison, case: Case) -> tuple[str, str]:
    if case.recipe.parallel.pipeline.updates_each_micro_batch and first.stage != "gradients of step 1":
        return _ratio_of(first, case), OTHER_VERSION
    gradients = comparison.of(first.stage)
    failed = [tensor for tensor in gradients if not tensor.holds]
    if first.ranks is not None or all(tensor.ranks is not None for tensor in failed):
        axis = _missing_sum(first, case)
        where = f"ranks {first.ranks[0]} and {first.ranks[1]} hold it with other numbers" if first.ranks else ""
        if axis is not None:
            return (
                f"/{axis}, a part on each rank ({where})",
                f"the all-reduce of this gradient over {axis} ranks is missing",
            )
        return where, "processes that hold one parameter do not sum its gradient to the same"
    if (
        case.task.proxy.has_tied_head
        and [tensor.name for tensor in failed] == ["embed_tokens.weight"]
        and len(gradients) > 1
    ):
        return _ratio_of(first, case), (
            "the tie of head and embedding is lost: the head's gradient does not arrive at the shared parameter"
        )
    if (of_mixture := _of_mixture(failed, case)) is not None:
        return _ratio_of(failed[-1], case), of_mixture
    if first.stage == "gradients of step 1" and case.traces.reference.item_gradients:
        shares = _shares_of_items(first, case.traces.reference.item_gradients)
        if shares is not None:
            return _by_shares(shares, case)
    return _ratio_of(first, case), _of_some_gradients(failed, case)


def _of_mixture(failed: Sequence[ComparedTensor], case: Case) -> str | None:
    """The cause of gradients that are wrong on the way back from experts or a router; None where it lies elsewhere.

    failed: in the order of the forward pass, so that the last one is the first to be wrong in the backward pass.
    """
    names = [tensor.name or "" for tensor in failed]
    if all(map(is_of_experts, names)):
        return (
            "gradients of experts alone are wrong: each is a sum over the data ranks that have the same experts, and "
            f"not over all of them, nor times the {case.layout.expert} ranks that have others"
        )
    return _of_router(failed[-1], case) if is_of_router(names[-1]) else None


def _of_router(gradient: ComparedTensor, case: Case) -> str:
    """The cause of a wrong gradient of the last router that has one, found by its numbers in the first step."""
    alone = (
        "the router's gradient is not what its weights multiply gives it: that is missing, and what balances the load "
        "trains the router alone"
    )
    on_each_rank = (
        "each tensor rank adds the router's gradient of what balances, which is whole on all of them, as that of the "
        "cross-entropy is not"
    )
    by_balance = assemble([case.traces.reference.balance_gradients])[0].get(gradient.name or "")
    if by_balance is not None and gradient.stage == "gradients of step 1":
        value, rounding = gradient.layout_value, gradient.allowed * gradient.reference.norm()
        if (value - by_balance).norm() <= rounding:
            return alone
        times = case.layout.tensor - 1
        if times and (value - gradient.reference - times * by_balance).norm() <= rounding:
            return on_each_rank
    causes = [alone]
    if case.layout.pipeline > 1:
        causes.append("a stage of the pipeline leaves out what balances, since it sees no loss")
    if case.layout.tensor > 1:
        causes.append(on_each_rank)
    if case.layout.context > 1:
        causes.append("a document's balance counts the tokens of one context rank's share")
    return "; or ".join(causes)


def _of_some_gradients(failed: Sequence[ComparedTensor], case: Case) -> str:
    if failed and all("norm" in (tensor.name or "") for tensor in failed):
        return (
            "only norms are wrong: their gradients are parts of a sum (over tokens under sequence parallelism, over "
            "rows under sharding), and one all-reduce is missing or done twice"
        )
    if case.layout.context > 1:
        return (
            "a loss that each context rank divides by the weight of its own targets, or that it averages over ranks; "
            "gradients of keys that do not come back to the rank that has their tokens"
        )
    if case.recipe.drops_out and getattr(case.recipe.adapter, "dropout", 0.0) > 0:
        return "dropout masks of backward and forward pass that differ, or masks that are the same on every shard"
    return (
        "the backward pass of a cut layer: a sum over tensor ranks that is missing at its entrance, or made twice; a "
        "part that is held several times and counted so"
    )


def _missing_sum(first: ComparedTensor, case: Case) -> str | None:
    """The axis with ranks on which the copies of a gradient would add up to that of one process; None for no axis."""
    step = int(first.stage.rpartition(" ")[2]) - 1
    gradients = [trace.steps[step].gradients for trace in case.traces.by_rank]
    assert first.name is not None
    for count in range(1, len(AXES) + 1):
        for axes in itertools.combinations([axis for axis in AXES if getattr(case.layout, axis) > 1], count):
            ranks = case.layout.ranks_along(0, axes)
            total = _sum_of_copies(first.name, [gradients[rank] for rank in ranks], first.reference)
            if total is not None and relative_error(total, first.reference) <= 1e-4:
                return "data" if {*axes} <= {"replicate", "shard"} else " x ".join(axes)
    return None


def _sum_of_copies(name: str, shards_by_rank: Sequence[LocalShards], reference: Tensor) -> Tensor | None:
    """The sum of the ranks' copies of a tensor; None where one of them does not have all of it."""
    if any(name not in shards or shards[name][0].sizes != tuple(reference.shape) for shards in shards_by_rank):
        return None
    return sum((shards[name][1] for shards in shards_by_rank), torch.zeros_like(reference))


def _shares_of_items(first: ComparedTensor, item_gradients: Sequence[ItemGradient]) -> Tensor | None:
    """[items] float64, how many times each counts in the layout's gradient; None where no factors explain it.

    Least squares: the layout's gradient as a combination of the gradients that one process has of each item.
    """
    assert first.name is not None
    columns = [
        assemble([item.gradients])[0].get(first.name, torch.zeros_like(first.reference)) for item in item_gradients
    ]
    matrix = torch.stack([column.flatten().double() for column in columns], dim=1)  # [numbers, items]
    if matrix.shape[0] < 2 * matrix.shape[1]:
        return None
    target = first.layout_value.flatten().double()
    shares: Tensor = torch.linalg.lstsq(matrix, target.unsqueeze(1)).solution.squeeze(1)
    residual = (matrix @ shares - target).norm().item()
    return shares if residual <= _SAME * target.norm().item() else None


def _by_shares(shares: Tensor, case: Case) -> tuple[str, str]:
    """Returns (ratio in words, usual cause) where items count `shares` times."""
    items = case.task.item_name
    mean = float(shares.mean())
    if _all_are(shares, mean):
        return _named(mean, case), _of_constant(mean, case)
    places = case.places_of(case.task.steps[0])
    ranks = [rank for rank, _ in places]
    weights = torch.tensor([item.weight for item in case.traces.reference.item_gradients], dtype=torch.float64)
    shares_by_rank = (
        f"{items} count {float(shares.min()):.2f} to {float(shares.max()):.2f} times, by rank {_by_rank(shares, ranks)}"
    )
    rounded = torch.round(shares)
    missing, repeated = int((shares < 0.5).sum()), int((shares > 1.5).sum())
    if _all_are(shares - rounded, 0.0) and (missing or repeated):
        ratio = f"{missing} {items} are not counted, {repeated} more than once"
        counted_ranks = {rank for rank, share in zip(ranks, rounded, strict=True) if share}
        if repeated == 0 and len(counted_ranks) < case.layout.data:
            return ratio, "gradients are not summed over data ranks: only some ranks' rows count"
        return ratio, "a sampler that repeats or drops rows, so that some count more than once or not at all"
    # A mean is over targets, or over rows.
    means = [_constant_within(shares * _sum_within(of, ranks), [0] * len(ranks)) for of in (weights, weights**0)]
    if any(means) and _constant_within(shares, ranks):
        return shares_by_rank, (
            "a mean over data ranks of their own means: with uneven rows each rank must add its sum, to be divided "
            "once by the weight of all"
        )
    if _constant_within(shares, places) and _constant_within(shares * _sum_within(weights, places), ranks):
        return shares_by_rank, (
            "a loss scale that is wrong when gradients accumulate: each micro-batch counts alike, however many targets "
            "it has"
        )
    return shares_by_rank, f"{items} are weighted by something else than their targets"


def _by_rank(shares: Tensor, ranks: Sequence[int]) -> str:
    """The mean share of each rank's items: `1.20, 0.80`."""
    own = (shares[[item for item, owner in enumerate(ranks) if owner == rank]] for rank in sorted(set(ranks)))
    return ", ".join(f"{float(values.mean()):.2f}" for values in own)


def _sum_within(values: Tensor, keys: Sequence[object]) -> Tensor:
    """The sum of all values with the same key, for each value."""
    return torch.stack([values[[item_key == key for item_key in keys]].sum() for key in keys])


def _constant_within(values: Tensor, keys: Sequence[object]) -> bool:
    groups = (values[[item_key == key for item_key in keys]] for key in set(keys))
    return all(_all_are(group, float(group.mean())) for group in groups)


def _all_are(values: Tensor, value: float) -> bool:
    return bool(((values - value).abs() <= 0.01 * max(1.0, abs(value))).all())


def _of_norm(first: ComparedTensor, case: Case) -> tuple[str, str]:
    if first.ranks is not None:
        return _by_rank_of(first), (
            "each process clips by the norm of what it holds: squares must be summed over all processes first"
        )
    step = case.traces.reference.steps[int(first.stage.rpartition(" ")[2]) - 1]
    gradients = {name: value for name, (_, value) in step.gradients.items() if not is_of_experts(name)}
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))
    if len(gradients) < len(step.gradients) and math.isclose(norm, float(first.layout_value[0]), rel_tol=_SAME):
        return _ratio_of(first, case), "squares of experts are not in the norm: it is that of all other parameters"
    return _ratio_of(first, case), (
        "squares of a part that several processes hold are counted several times, or those of a part that one holds "
        "are missing (norms on another mesh, a sum over the wrong ranks)"
    )


def _of_weights(first: ComparedTensor, case: Case) -> str:
    if first.ranks is not None:
        return "processes that hold the same parameter update it differently: it drifts apart from here on"
    if first.name is not None and is_of_experts(first.name) and _has_frozen_expert(first, first.name, case):
        return (
            "an expert that no token went to was left as it was: its gradient is zero and not absent, so its moments "
            "and its weight decay go on"
        )
    kind = case.recipe.optimizer.kind
    if kind in ("muon", "adafactor", "galore", "paged-adamw") or eight_bits(case.recipe.optimizer) is not None:
        return (
            f"the gradients are right and the update is not: {kind} looks at whole matrices or blocks of numbers, and "
            "a process has parts of them"
        )
    return "the gradients are right and the update is not: another learning rate, decay or clipping factor on a part"


def _has_frozen_expert(first: ComparedTensor, name: str, case: Case) -> bool:
    """Whether the layout's update changed nothing of an expert that one process's update changed."""
    step, traces = int(first.stage.rpartition(" ")[2]) - 1, case.traces
    before = [trace.steps[step - 1].weights if step else trace.initial_weights for trace in traces.by_rank]
    previous = assemble([{name: shards[name]} for shards in before])[0][name]
    assert first.previous is not None, "weights after an update"
    is_frozen = (first.layout_value == previous).flatten(1).all(1)
    is_updated = (first.reference != first.previous).flatten(1).any(1)
    return bool((is_frozen & is_updated).any())


def _of_checkpoint(first: ComparedTensor) -> str:
    if first.stage.startswith("weights"):
        return "weights do not come back as they were saved: shards written or read at the wrong offset"
    return (
        "weights come back as they were saved, and the next step differs: the optimizer's state was loaded for "
        "another shard or not at all, or the counter of steps or the place in the data"
    )


def _ratio_of(first: ComparedTensor, case: Case) -> str:
    """The layout's value against the reference's by least squares; of weights after an update, of the update."""
    value, reference = first.layout_value.flatten().double(), first.reference.flatten().double()
    if first.previous is not None and bool(value.isfinite().all()):
        previous = first.previous.flatten().double()
        return f"of the update: {_ratio(value - previous, reference - previous, case)}"
    return _ratio(value, reference, case)


def _ratio(value: Tensor, reference: Tensor, case: Case) -> str:
    if value.shape != reference.shape:  # a number, of each rank
        reference = reference.expand_as(value)
    if not bool(value.isfinite().all()):
        return "not finite"
    square = float(reference @ reference)
    if square == 0:
        return "not zero, as it is in one process"
    ratio = float(value @ reference) / square
    residual = float((value - ratio * reference).norm())
    if residual <= _SAME * float(value.norm()) and abs(ratio - 1) > _SAME:
        return _named(ratio, case)
    share = residual / max(float(value.norm()), 1e-30)
    return f"no constant one: nearest x{ratio:.4g}, which leaves {share:.1e} of it"


def _named(ratio: float, case: Case) -> str:
    """`x2 (data)`: a constant ratio, with whatever of the layout is just as large."""
    layout = case.layout
    micro_batches = 1 + max(micro_batch for _, micro_batch in case.places_of(case.task.steps[0]))
    sizes = {name: getattr(layout, name) for name in ("data", "shard", "replicate", "context", "tensor", "world")}
    sizes["micro-batches"] = micro_batches
    factors = [name for name, size in sizes.items() if size > 1 and math.isclose(ratio, size, rel_tol=0.01)]
    divisors = [f"/{name}" for name, size in sizes.items() if size > 1 and math.isclose(ratio * size, 1, rel_tol=0.01)]
    names = factors + divisors
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
