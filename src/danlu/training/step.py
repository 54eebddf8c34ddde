"""Forward and backward passes of one optimizer step over its micro-batches, one division by its weight, clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from danlu.core.types import Item, Loss, Metric, Totals
from danlu.optim.gradients import HasGradient, clip_grad_norms, coalesce_gradients
from danlu.parallel.parallel_context import ParallelContext
from danlu.training.executor import AnyLearner, Executor, untimed
from danlu.training.learner import StepItems

if TYPE_CHECKING:
    from danlu.training.timeline import TimelineWriter
    from danlu.training.trained_roles import RoleGradients


@dataclass(frozen=True)
class StepObserver:
    """Looks into a step while it is taken, as `danlu verify` does; each hook is called on every process."""

    before_clipping: Callable[[float], None] = lambda scale: None
    """Gradients are sums over all processes; times `scale` they are the gradient of the mean loss."""
    after_clipping: Callable[[], None] = lambda: None
    """Called after clipping, when gradients are as the optimizer will use them."""
    after_update: Callable[[], None] = lambda: None
    """Weights are those after the step, where others of a turn are in flight: see `pipedream`."""


@dataclass(frozen=True)
class StepGradients:
    """The result of `accumulate`, in addition to the gradients in `.grad`: means over the step, and the gradient's
    norm."""

    loss: float  # the objective's total over `totals.weight`
    metrics: Mapping[str, float]  # each over its own weight; those that nothing in the step has weight for are absent
    norm: float  # global 2-norm of the mean loss's gradient, before clipping; not finite after an fp16 overflow
    totals: Totals


def accumulate(
    learner: AnyLearner,
    items: Sequence[Item],
    *,
    step: int,
    clip: float | None,
    totals: Totals | None = None,
    loss_scale: float = 1.0,
    holders: Iterable[HasGradient] | None = None,
    roles: RoleGradients | None = None,
    observer: StepObserver | None = None,
    timeline: TimelineWriter | None = None,
) -> StepGradients:
    """Leaves in `.grad` the clipped gradient of the mean loss over `items`, however they are split into micro-batches.

    Each micro-batch adds the gradient of a sum; the division by the step's whole weight happens once, with clipping.
    Every process takes its share of the items. With an fp16 `loss_scale`, a gradient that overflowed is left alone and
    its norm returned as it is.

    Args:
        items: those of all processes.
        clip: the largest global norm; None to only measure it.
        totals: of `items`, where the caller has them already. They must have targets.
        holders: the parameters or tensors that the optimizer reads gradients from (`Optimizers.gradient_holders`); by
            default the parameters.
        roles: the same by model, where several are trained: `clip` is the largest norm of each then.
        timeline: which times the passes; by default nothing does.

    Raises TrainingError, which names step, rows and tensor, when a loss is not finite.
    """
    totals = totals or learner.totals(items)
    assert totals.has_targets, "a step without trained weight has no mean loss: see loop.train_step"
    parallel, observer = learner.parallel, observer or StepObserver()
    micro_batches = learner.micro_batches(items)
    items = learner.prepare(items, micro_batches, step)
    # Buckets and FSDP2 have gradients where they want them.
    moves_gradients = len(micro_batches) > 1 and parallel.alone and learner.device.type == "cpu"

    def arrange_gradients(micro: int) -> None:
        if parallel.alone:
            coalesce_gradients(learner.model.parameters())
        if moves_gradients and micro == 0:
            from danlu.training.gradient_memory import move_out_of_the_heap

            move_out_of_the_heap(learner.model.parameters())

    sums = StepSums()
    step_items = StepItems(items, micro_batches, totals, step, loss_scale)
    timed = untimed if timeline is None else timeline.timed
    executor = Executor(learner, step_items, sums.add, arrange_gradients, timed=timed)
    executor.run(parallel.actions(len(micro_batches)))
    mean_loss, metrics = sums.means(totals.weight, parallel)
    metrics |= learner.end_step()
    if not math.isfinite(mean_loss):
        cause = sums.first_non_finite()
        raise _explained(learner, [items[number] for number in micro_batches[cause or 0]], cause is not None, step)
    scale = 1 / (totals.weight * loss_scale)
    observer.before_clipping(scale)
    if roles is not None:
        roles.drop_frozen()
    norms = clip_grad_norms(
        {"": learner.model.parameters() if holders is None else holders} if roles is None else roles.updated,
        clip,
        scale=scale,
        group=None if parallel.alone else parallel.ranks.world,
        norm_weights=None if parallel.alone else parallel.norm_weights(),
        device=learner.device,
    )
    observer.after_clipping()
    if roles is not None:
        from danlu.training.trained_roles import NORM

        metrics |= {f"{NORM}/{role}": norm for role, norm in norms.items()}
    return StepGradients(mean_loss, metrics, math.hypot(*norms.values()), totals)


@dataclass
class StepSums:
    """The losses of a process's micro-batches, kept on the device until all work has been enqueued there."""

    _rows: list[Tensor] = field(default_factory=list)  # of each micro-batch [1 + metrics]: the total, then the sums
    _weights: dict[str, float] = field(default_factory=dict)  # of each metric
    _by_micro_batch: Tensor | None = None  # [micro-batches, 1 + metrics] float64, on the host

    def add(self, loss: Loss) -> None:
        """Takes up the loss of one more micro-batch."""
        self._rows.append(torch.stack((loss.total.detach(), *(metric.sum for metric in loss.metrics.values()))))
        for name, metric in loss.metrics.items():
            self._weights[name] = self._weights.get(name, 0.0) + metric.weight

    def fold(self) -> None:
        """Adds up the present rows in float64 on the host, for sums over any number of micro-batches."""
        if self._rows:
            self._rows = [reduce(torch.add, (row.double().cpu() for row in self._rows))]

    def means(self, weight: float, parallel: ParallelContext) -> tuple[float, dict[str, float]]:
        """Computes (loss, metrics) over all processes: the total over `weight`, each metric over its own.

        In a pipeline the stage with the last chunk has the losses, and sends them to the others.
        """
        has_losses = bool(self._rows) or parallel.pipeline is None
        own = self.own_means(weight, parallel) if has_losses else (math.nan, dict[str, float]())
        return parallel.from_end_of_pipeline(own)

    def own_means(self, weight: float, parallel: ParallelContext) -> tuple[float, dict[str, float]]:
        """The same on the stage that has losses, over its processes."""
        rows = self._by_micro_batch = torch.stack(self._rows).double().cpu()  # the one wait for the device in a step
        weights = torch.tensor(list(self._weights.values()), dtype=torch.float64)
        total, *sums = parallel.all_reduce_data(torch.cat((rows.sum(0), weights))).tolist()
        count = len(self._weights)
        of_metrics = zip(self._weights, sums[:count], sums[count:], strict=True)
        return total / weight, {name: metric / divisor for name, metric, divisor in of_metrics if divisor}

    def first_non_finite(self) -> int | None:
        """The number of the first micro-batch of this process with a total that is not finite; after `means`."""
        if self._by_micro_batch is None:  # another stage has the losses
            return None
        numbers = (~self._by_micro_batch[:, 0].isfinite()).nonzero()
        return int(numbers[0]) if len(numbers) else None


def sum_losses(losses: Sequence[Loss], device: torch.device) -> Loss:
    """The loss of a micro-batch with parts that were computed apart, on devices of their own."""

    def summed(values: Iterator[Tensor]) -> Tensor:
        return torch.stack([value.to(device) for value in values]).sum()

    by_name = {name: [loss.metrics[name] for loss in losses] for name in losses[0].metrics}
    metrics = {
        name: Metric(summed(part.sum for part in parts), sum(part.weight for part in parts))
        for name, parts in by_name.items()
    }
    return Loss(summed(loss.total for loss in losses), metrics)


def _explained(learner: AnyLearner, items: Sequence[Item], is_cause: bool, step: int) -> Exception:
    """The explanation by the first process with a loss that is not finite; all look, for looking takes collectives."""
    explanation = learner.explain(learner.collate(items), step)
    everyones = learner.parallel.ranks.world.all_gather_objects((is_cause, explanation))
    return next(error for caused, error in everyones if caused)
