"""PipeDream: each micro-batch that goes through a pipeline is a step, updated while others are in flight.

A *turn* is the steps between two flushes, at which no micro-batch is in flight and all stages have the weights of one
step: before an evaluation, a checkpoint and the end of a run, and where a signal asks to stop. Which steps these are
follows from their numbers (but for the signal's), so a run that goes on from a checkpoint makes the same turns.

This is not synchronous SGD. With f the loss of a step's micro-batch, n stages and wi(t) the weights of stage i after
the t-th update of the turn (arXiv:1806.03377, section 3.3),

    w(t+1) = w(t) - lr grad f(w1(t-n+1), w2(t-n+2), .., wn(t))      weight stashing
    w(t+1) = w(t) - lr grad f(w1(t-n+1), w2(t-n+1), .., wn(t-n+1))  vertical sync

where a version before the turn is that at its beginning. No stage sees the gradient of another before it updates, so
each clips by the norm of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from danlu.core.errors import TrainingError
from danlu.core.types import Item, Loss, Totals
from danlu.optim.gradients import clip_grad_norm, non_finite
from danlu.optim.schedules import multiplier
from danlu.parallel.comm import PendingSum
from danlu.parallel.phase import PHASE
from danlu.parallel.weight_stash import WeightStash
from danlu.training.executor import AnyLearner, Executor
from danlu.training.learner import MicroStep, StepItems
from danlu.training.state import Cadence, Run
from danlu.training.step import StepGradients, StepObserver, StepSums
from danlu.training.step_record import has_spiked, log_step, pass_over
from danlu.training.units import first_few


class UnfinishedTurn(TrainingError):
    """A turn that was given up: stages have made different updates, so the weights are those of no step."""


def train_turn(run: Run, observer: StepObserver | None = None) -> list[StepGradients]:
    """Takes the steps up to the next flush; returns the gradients of each of them that trained anything, in order.

    The norm of each step is that over all stages, before each has clipped its own. Lines of metrics and events are
    written at the end, when the first process knows the losses. `observer` looks at each step on each stage.
    Raises UnfinishedTurn for numbers that are not finite.
    """
    turn = _Turn(run, observer or StepObserver())
    executor = Executor(run.learner, turn, turn.add_loss, on_update=turn.update, weights=turn.stash.in_place)
    try:
        executor.run(run.learner.parallel.actions(turn.most))
    except TrainingError as error:
        raise UnfinishedTurn(f"{error}. {_not_saved(run)}") from error
    return turn.finish()


def next_flush(cadence: Cadence, step: int) -> int:
    """The step after which the turn ends that begins after `step`, unless a signal or the rows end it before."""
    periods = [every for every in (cadence.checkpoint, cadence.evaluation) if every is not None]
    return min(cadence.total, *(step - step % every + every for every in periods))


@dataclass
class _Step:
    number: int
    items: Sequence[Item]
    totals: Totals
    sums: StepSums = field(default_factory=StepSums)
    norm: float = math.nan  # of this stage's gradient, before clipping
    seconds: float = math.nan  # from the update before to its own


class _Turn:
    """The steps of a turn on one process. A `MicroSteps`: micro-batch n is the n-th step that trains anything."""

    def __init__(self, run: Run, observer: StepObserver) -> None:
        self._run, self._observer = run, observer
        self._last = next_flush(run.cadence, run.state.step)
        self.most = self._last - run.state.step
        """Micro-batches, if no step is without targets and nothing ends the turn before."""
        pipeline = run.learner.parallel.pipeline
        assert pipeline is not None, "only a pipeline updates after each micro-batch"
        self.stash = WeightStash(run.optimizer.parameters.values(), self.most, pipeline.weight_delay)
        self._steps: list[_Step] = []  # all
        self._trained: list[_Step] = []  # of each micro-batch
        self._losses = 0  # how many there are so far, on the last stage
        self._stop_votes: list[PendingSum] = []  # of each micro-batch
        self._not_finite: list[str] | None = None  # where a gradient of this stage was not
        self._norm_weights = run.learner.parallel.norm_weights_without_pipeline()
        self._updated_at = time.perf_counter()

    def micro_step(self, learner: AnyLearner, micro: int) -> MicroStep[Any] | None:
        """The next step that trains anything; None where the turn ends."""
        if self._is_to_stop(micro) or (step := self._next_step()) is None:
            return None
        (numbers,) = learner.micro_batches(step.items)
        items = learner.prepare(step.items, [numbers], step.number)
        return StepItems(items, [numbers], step.totals, step.number).micro_step(learner, 0)

    def _next_step(self) -> _Step | None:
        """Takes items of steps up to the first that trains anything. All processes take the same ones."""
        run = self._run
        number = self._steps[-1].number if self._steps else run.state.step
        while number < self._last and not run.data_loader.exhausted:
            number += 1
            items = run.data_loader.take(number)
            step = _Step(number, items, run.learner.totals(items))
            self._steps.append(step)
            if step.totals.has_targets:
                self._trained.append(step)
                return step
        return None

    def _is_to_stop(self, micro: int) -> bool:
        """Whether the turn ends before a micro-batch since a process wants it, as all of them find here alike.

        Each adds its wish when a micro-batch begins, and looks at the sum when as many more have begun as there are
        stages. The first stage has had the gradient of that micro-batch then, so the last one has begun it, and nobody
        waits.
        """
        parallel = self._run.learner.parallel
        wish = self._run.stop_request.requested or self._not_finite is not None
        self._stop_votes.append(parallel.ranks.world.sum_async(torch.tensor(float(wish))))
        counted = micro - parallel.num_chunks
        return counted >= 0 and bool(self._stop_votes[counted].wait().item())

    def add_loss(self, loss: Loss) -> None:
        """Takes up the loss of the next micro-batch."""
        self._trained[self._losses].sums.add(loss)
        self._losses += 1

    def update(self, micro: int) -> None:
        """Updates this stage's weights with the gradient of a micro-batch, which is in `.grad` and is removed."""
        run, step = self._run, self._trained[micro]
        scale = 1 / step.totals.weight
        self._observer.before_clipping(scale)
        step.norm = clip_grad_norm(
            run.optimizer.gradient_holders(),
            run.clip,
            scale,
            group=run.learner.parallel.ranks.tensor,
            norm_weights=self._norm_weights,
            device=run.learner.device,
        )
        self._observer.after_clipping()
        self.stash.before_update()
        if not math.isfinite(step.norm) and self._not_finite is None:
            self._not_finite = non_finite(run.optimizer.named_gradients())
        if self._not_finite is None:
            run.optimizer.set_learning_rate(multiplier(step.number, run.cadence.total, run.schedule))
            run.optimizer.step(free_gradients=True)
            run.learner.updated(step.number)
        # No `end_step`: what it tells of the load of experts is of whole steps, and models with some are refused.
        run.optimizer.zero_grad()
        self._observer.after_update()
        now = time.perf_counter()
        step.seconds, self._updated_at = now - self._updated_at, now

    def finish(self) -> list[StepGradients]:
        """Ends the turn: returns its steps after their lines have been written. Raises as `train_turn`."""
        PHASE.begin("flush")
        run, parallel = self._run, self._run.learner.parallel
        for vote in self._stop_votes:
            vote.wait()
        self.stash.clear()
        own = [step.sums.own_means(step.totals.weight, parallel) for step in self._trained[: self._losses]]
        means = parallel.from_end_of_pipeline(own)
        by_rank = parallel.all_gather_pipeline([step.norm for step in self._trained])
        norms = [math.hypot(*of_step) for of_step in zip(*by_rank, strict=True)]
        self._check_finite([loss for loss, _ in means], norms)
        done, gradients_of = [], iter(zip(means, norms, strict=True))
        for step in self._steps:
            if not step.totals.has_targets:
                pass_over(run, step.items, step.totals)
                continue
            (loss, metrics), norm = next(gradients_of)
            gradients = StepGradients(loss, metrics, norm, step.totals)
            self._record(step, gradients)
            done.append(gradients)
        return done

    def _record(self, step: _Step, gradients: StepGradients) -> None:
        run = self._run
        run.state.step = step.number
        run.state.tokens += step.totals.tokens
        run.optimizer.set_learning_rate(multiplier(step.number, run.cadence.total, run.schedule))
        has_spiked(run, gradients)  # told only: the update has been made
        is_last = step is self._steps[-1] and run.finished
        if is_last or step.number % run.cadence.log == 0:
            log_step(run, gradients, step.seconds)

    def _check_finite(self, losses: Sequence[float], norms: Sequence[float]) -> None:
        """Raises UnfinishedTurn, on all processes, for the first step with a loss or gradient that is not finite."""
        run = self._run
        parallel = run.learner.parallel
        everyones = parallel.ranks.world.all_gather_objects((parallel.ranks.pipeline.index, self._not_finite))
        finite = [math.isfinite(loss) and math.isfinite(norm) for loss, norm in zip(losses, norms, strict=True)]
        if all(finite):
            return
        number = finite.index(False)
        step, names_by_rank = self._trained[number], dict[int, list[str]]()
        for rank, names in everyones:
            if names is not None:  # tensor ranks have different parts of a stage, and perhaps one alone a name
                names_by_rank.setdefault(rank, []).extend(names)
        rows = [row for item in step.items for row in item.rows]
        first = "the loss"
        if names_by_rank:  # of the last stage, where a gradient begins
            first = first_few(list(dict.fromkeys(names_by_rank[max(names_by_rank)]))) or "its norm"
        raise UnfinishedTurn(
            f"step {step.number}: its loss ({losses[number]:g}) or its gradient is not finite, first in {first}. The "
            f"step's rows: {first_few(rows)}. {_not_saved(run)} Look at these rows, lower optimizer.learning_rate, or "
            "train these steps with parallel.pipeline.schedule: 1f1b"
        )


def _not_saved(run: Run) -> str:
    since = f"Pipeline ranks have made different updates since step {run.state.step}"
    return f"{since}, which are not saved: earlier checkpoints stay."
