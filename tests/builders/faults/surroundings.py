"""Faults around a step: in saving, averaging, export and reports, and in sums from a size on."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor

from danlu.core.shard_box import ShardBox
from danlu.optim import gradients
from danlu.parallel import local_parameter
from danlu.parallel.comm import ALONE, Group
from danlu.parallel.gradient_buckets import GradientBuckets
from danlu.parallel.layout import Layout
from danlu.parallel.parallel_context import ParallelContext
from danlu.parallel.ranks import Ranks
from danlu.recipe import Recipe
from danlu.training import state
from danlu.training import step as step_module
from danlu.training.checkpoints.gathering import Gathering
from danlu.training.checkpoints.loading import load_checkpoint
from danlu.training.step import StepSums
from danlu.verification.fault import Fault, replaced
from danlu.verification.proxy import Proxy


def _average_not_restored(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The moving average's tensors are not restored where a run resumes."""

    def load(path: Any, into: Mapping[str, Any], *args: Any) -> dict[str, Any]:
        return load_checkpoint(path, {group: tensors for group, tensors in into.items() if group != "ema"}, *args)

    return replaced(state, "load_checkpoint", load)


def _average_counted_from_zero(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The moving average begins to count its updates again where a run resumes."""

    def load(*args: Any) -> dict[str, Any]:
        return load_checkpoint(*args) | {"ema": {"updates": 0}}

    return replaced(state, "load_checkpoint", load)


def _parts_doubled_in_export(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Parts of other processes are twice in the result."""
    original = Gathering.part

    def part(self: Gathering, name: str, local: Tensor, box: ShardBox | None, wanted: ShardBox | None) -> Tensor | None:
        whole = original(self, name, local, box, wanted)
        if whole is None or box is None or box.is_full:
            return whole
        own = box.intersection(wanted or ShardBox.full(box.global_shape))
        doubled = whole.mul(2)
        if own is not None:
            here = own if wanted is None else own.relative_to(wanted)
            here.view_of(doubled).copy_(here.view_of(whole))
        return doubled

    return replaced(Gathering, "part", part)


def _bucket_dropped(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The second bucket of gradients is not summed."""
    original = GradientBuckets.__init__

    def init(self: GradientBuckets, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        for bucket in self._buckets[1:2]:
            bucket._group = ALONE

    return replaced(GradientBuckets, "__init__", init)


def _clipped_to_larger_norm(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The norm that gradients are clipped to is as many times larger as there are processes."""

    def clip_norms(parameters: Any, max_norm: float | None, *args: Any, **options: Any) -> dict[str, float]:
        bound = None if max_norm is None else max_norm * ranks.world.size
        return gradients.clip_grad_norms(parameters, bound, *args, **options)

    return replaced(step_module, "clip_grad_norms", clip_norms)


def _metrics_of_one_rank(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Metrics are those of each process's own rows."""
    original = StepSums.own_means

    def own_means(self: StepSums, weight: float, parallel: ParallelContext) -> tuple[float, dict[str, float]]:
        loss, _ = original(self, weight, parallel)
        _, metrics = original(self, weight, ParallelContext())
        return loss, metrics

    return replaced(StepSums, "own_means", own_means)


class _FiniteSum:
    """Sums the finite numbers over the ranks of a group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, x: Tensor, /) -> Tensor:
        summed: Tensor = self._group.sum(x.nan_to_num(nan=0.0))
        return summed


def _not_finite_hidden(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """The norm that decides on a step leaves out numbers that are not finite on some process."""
    original = gradients._global_norm

    def global_norm(grads: Any, weights: Any, group: Any, device: Any) -> float:
        finite: Any = None if group is None else _FiniteSum(group)
        return original(grads, weights, finite, device)

    return replaced(gradients, "_global_norm", global_norm)


def _overlapping_parts(recipe: Recipe, ranks: Ranks) -> AbstractContextManager[None]:
    """Parts of a parameter begin one row too early, where another process's part has its last one."""
    original = local_parameter._copied

    def copied(box: ShardBox, group: Group) -> ShardBox:
        offsets = tuple(max(0, offset - 1) for offset in box.offsets)
        return original(replace(box, offsets=offsets), group)

    return replaced(local_parameter, "_copied", copied)


def _keeps_average(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.ema is not None


def _cuts_what_is_exported(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return (recipe.parallel.shard != "none" and layout.shard * layout.context > 1) or layout.tensor > 1


def _has_buckets(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.parallel.shard == "none" and layout.data * layout.context > 1


def _clips(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.gradient_clipping is not None and not recipe.parallel.pipeline.updates_each_micro_batch


def _has_rows_elsewhere(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.data * layout.context > 1


def _has_processes(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return layout.world > layout.pipeline  # of PipeDream stages have norms of their own


def _is_sharded(recipe: Recipe, layout: Layout, proxy: Proxy) -> bool:
    return recipe.parallel.shard != "none" and layout.shard * layout.context > 1


FAULTS: dict[str, Fault] = {
    "average-counted-from-zero": Fault(_keeps_average, _average_counted_from_zero),
    "average-not-restored": Fault(_keeps_average, _average_not_restored),
    "bucket-dropped": Fault(_has_buckets, _bucket_dropped),
    "clipped-to-larger-norm": Fault(_clips, _clipped_to_larger_norm),
    "metrics-of-one-rank": Fault(_has_rows_elsewhere, _metrics_of_one_rank),
    "not-finite-hidden": Fault(_has_processes, _not_finite_hidden),
    "overlapping-parts": Fault(_is_sharded, _overlapping_parts),
    "parts-doubled-in-export": Fault(_cuts_what_is_exported, _parts_doubled_in_export),
}
"""The faults by name, sorted."""
